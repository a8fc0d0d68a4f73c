"""The benchmarks measure what they say, and run. No time is asserted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import engine, pipeline, simulation, steps
from benchmarks.__main__ import main
from benchmarks.contest import Spread, ratio
from benchmarks.live import Live
from fivefold.mesh.pool import Pool
from fivefold.observe.spans import Span
from fivefold.schedule.simulate import simulate

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("model", ["llama", "dsv3"])
def test_both_sides_do_the_same_work(pool: Pools, model: str) -> None:
    pool(1).run(steps.check_same, model)


def test_both_engines_compute_the_same_gradients(pool: Pools) -> None:
    worst = pool(2).run(engine.check_gradients, "small")
    assert max(worst) < engine.TOLERANCE


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_both_executors_compute_the_same_gradients(pool: Pools, schedule: str) -> None:
    worst = pool(2).run(pipeline.check_gradients, schedule)
    assert max(worst) < pipeline.TOLERANCE


def test_live_bytes_are_of_what_lives() -> None:
    with Live() as live:
        x = torch.zeros(1000)
        y = x.view(10, 100)
        z = x + 1
        del x, z
        assert (live.now, live.peak) == (4000, 8000)  # the view keeps the storage
        del y
    assert (live.now, live.peak) == (0, 8000)


def test_sleeping_stages_run_the_whole_table(pool: Pools) -> None:
    case = simulation.Case("zb_h1", 2)
    for order, spans in zip(case.table, pool(simulation.PP).run(simulation.run_case, case), strict=True):
        ran = [span for span in spans if span.kind in simulation.ACTIONS]
        assert [span.name for span in ran] == [str(action) for action in order]
        slept = {kind: min(s.end - s.begin for s in ran if s.kind == kind) for kind in "FIW"}
        assert all(slept[kind] >= simulation.SLEEP_S[kind] for kind in slept)


def test_a_run_that_is_as_fast_as_its_simulation_has_the_ratio_one() -> None:
    case, cost, hop_s = simulation.Case("zb_v", 3), {"F": 3.0, "I": 2.0, "W": 1.0}, 0.25
    timeline = simulate(case.table, cost, hop_s)
    ranks = [[Span(*a, timeline.start[a], timeline.end[a]) for a in order] for order in case.table]
    result = simulation.Result()
    result.take(case, ranks, hop_s)
    assert result.measured == pytest.approx(result.simulated) == pytest.approx(timeline.makespan)
    slower = [[Span(*s[:3], 2 * s.begin, 2 * s.end) for s in spans] for spans in ranks]
    result.take(case, slower, hop_s)  # not kept
    assert result.measured == pytest.approx(timeline.makespan)


def test_ratios_are_of_the_same_round() -> None:
    assert ratio([2.0, 6.0, 20.0], [1.0, 2.0, 4.0]) == Spread(3.0, 2.5, 4.0)
    assert ratio([3.0], [2.0]) == Spread(1.5, 1.5, 1.5)


def test_a_section_prints_a_table_and_writes_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--only", "bytes", "--quick", "--json", str(tmp_path / "out.json")]) == 0
    assert "| llama | fsdp2" in capsys.readouterr().out
    (table,) = json.loads((tmp_path / "out.json").read_text())["bytes"]
    assert {(row["layout"], row["traffic"]) for row in table["rows"]} == {
        ("fsdp2", "parameters"), ("fsdp2", "gradients"), ("fsdp2", "statistics"),
        ("pp2", "activations"), ("pp2", "statistics"),
    }  # fmt: skip
    assert all(row["equal"] == "yes" for row in table["rows"])
