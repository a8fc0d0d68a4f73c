"""The achieved bubble against cases worked out by hand, and what a trace holds."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fivefold.observe.spans import Span
from fivefold.observe.timeline import (
    achieved_bubble,
    busy_and_makespan,
    chrome_trace,
    from_rows,
    to_rows,
    write_trace,
)


def one_f_one_b(shift: tuple[float, float] = (0.0, 0.0)) -> list[list[Span]]:
    """1F1B on two stages and two microbatches, F of 1 s and B of 2 s; the clock of each rank is ``shift`` ahead.

    rank 0   F0 F1 .  .  B0 B0 B1 B1
    rank 1   .  F0 B0 B0 F1 B1 B1
    """
    rows = (
        [("step", -1, -1, 0, 8.5), ("F", 0, 0, 0, 1), ("F", 0, 1, 1, 2), ("wait", 0, 0, 2, 4), ("B", 0, 0, 4, 6),
         ("B", 0, 1, 7, 9)],
        [("step", -1, -1, 0, 7.5), ("wait", 1, 0, 0, 1), ("F", 1, 0, 1, 2), ("B", 1, 0, 2, 4), ("F", 1, 1, 4, 5),
         ("B", 1, 1, 5, 7)],
    )  # fmt: skip
    return [[Span(kind, s, m, b + by, e + by) for kind, s, m, b, e in rank] for rank, by in zip(rows, shift)]


def bubble(ranks: list[list[Span]]) -> float:
    """As a run reports it: each of the two numbers the largest of any rank."""
    return achieved_bubble(*map(max, zip(*map(busy_and_makespan, ranks))))


def test_bubble_by_hand() -> None:
    zero, one = one_f_one_b()
    assert busy_and_makespan(zero) == (6, 9)
    assert busy_and_makespan(one) == (6, 7)
    assert bubble([zero, one]) == pytest.approx(1 - 6 / 9)


def test_clocks_of_hosts_need_not_agree() -> None:
    assert bubble(one_f_one_b((1000.0, -50.0))) == pytest.approx(1 - 6 / 9)


def test_an_idle_start_counts_from_the_steps_begin() -> None:
    late = [Span("F", 1, 0, 4, 5), Span("B", 1, 0, 5, 7)]
    assert busy_and_makespan(late) == (3, 3)
    assert busy_and_makespan([*late, Span("step", -1, -1, 1, 8)]) == (3, 6)


def test_what_an_action_waits_for_inside_is_not_work() -> None:
    spans = [Span("wait", 0, 0, 1, 2), Span("B", 0, 0, 0, 4), Span("wait", 0, 1, 4, 6), Span("W", 0, 0, 6, 7)]
    assert busy_and_makespan(spans) == (4, 7)


def test_nothing_ran() -> None:
    assert busy_and_makespan([]) == (0, 0)
    assert busy_and_makespan([Span("wait", 0, 0, 0, 1)]) == (0, 0)
    assert bubble([[], []]) == 0


def test_spans_cross_ranks_as_numbers() -> None:
    zero, _ = one_f_one_b((100.0, 0.0))
    rows = [*to_rows(zero), [-1.0] * 5]  # and one that fills up
    assert from_rows(rows) == one_f_one_b()[0]
    assert to_rows([]) == []


def slices(trace: dict[str, Any], rank: int, lane: int) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, lane)]


def test_trace(tmp_path: Path) -> None:
    path = tmp_path / "timeline" / "step7.json"
    write_trace(path, one_f_one_b((1000.0, -50.0)), step=7, layout="pp2")
    trace = json.loads(path.read_text())
    assert trace["otherData"] == {"step": 7, "layout": "pp2"}
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in trace["traceEvents"] if "name" in e.get("args", {})}
    assert names[0, None] == "pp rank 0: stage 0" and names[1, None] == "pp rank 1: stage 1"
    assert names[0, 0] == "actions" and names[0, 1] == "waits"
    actions = slices(trace, 0, 0)
    assert [e["name"] for e in actions] == ["F0.0", "F0.1", "B0.0", "B0.1"]
    assert [(e["ts"], e["dur"]) for e in actions] == [(0, 1e6), (1e6, 1e6), (4e6, 2e6), (7e6, 2e6)]
    assert actions[3]["args"] == {"stage": 0, "microbatch": 1}
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(actions))
    assert [(e["name"], e["ts"], e["dur"]) for e in slices(trace, 1, 1)] == [("wait 1.0", 0, 1e6)]


def test_kinds_have_colours_of_their_own() -> None:
    trace: Any = chrome_trace([[Span(kind, stage, 0, i, i + 1) for i, (kind, stage) in
                                enumerate((k, s) for s in (0, 3) for k in ("F", "B", "I", "W", "wait"))]])  # fmt: skip
    colours = {e["cat"]: e["cname"] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert len(set(colours.values())) == 5
    assert trace["traceEvents"][0]["args"]["name"] == "pp rank 0: stages 0, 3"
