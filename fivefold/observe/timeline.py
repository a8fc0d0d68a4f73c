"""A step's schedule as it ran: the bubble that was achieved, and a trace to look at."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

from .spans import Span

ACTIONS = ("F", "B", "I", "W")
KINDS = (*ACTIONS, "wait", "step")
# Names of the trace viewer's own palette, far apart in hue and in lightness.
_COLOURS = {
    "F": "rail_response",  # blue
    "B": "rail_load",  # green
    "I": "rail_idle",  # orange
    "W": "thread_state_uninterruptible",  # mauve
    "wait": "grey",
}


def begin_of(spans: Sequence[Span]) -> float:
    """When the rank's step began: at its span of kind ``step``, or at its first span without one."""
    steps = [span.begin for span in spans if span.kind == "step"]
    return max(steps) if steps else min((span.begin for span in spans), default=0.0)


def busy_and_makespan(spans: Sequence[Span]) -> tuple[float, float]:
    """How long a rank worked on its actions, and how long it took from the step's begin to the last action's end.

    What an action waits for inside is not work.

    Args:
        spans: of one rank and one step.
    Returns: Both in seconds; 0 without actions.
    """
    actions = sorted((span for span in spans if span.kind in ACTIONS), key=lambda span: span.begin)
    if not actions:
        return 0.0, 0.0
    busy = sum(action.end - action.begin for action in actions)
    begins = [action.begin for action in actions]
    for span in spans:
        around = bisect_right(begins, span.begin) - 1
        if span.kind == "wait" and around >= 0 and span.end <= actions[around].end:
            busy -= span.end - span.begin
    return busy, max(action.end for action in actions) - begin_of(spans)


def achieved_bubble(busy_s: float, makespan_s: float) -> float:
    """The share of the longest rank's makespan in which the busiest rank did not work; 0 if nothing ran.

    Each makespan is measured on its rank's own clock, so hosts need not agree on the time.

    Args:
        busy_s, makespan_s: the largest that :func:`busy_and_makespan` finds on any rank.
    """
    return 1 - busy_s / makespan_s if makespan_s else 0.0


def to_rows(spans: Sequence[Span]) -> list[list[float]]:
    """Spans as numbers that can cross ranks: kind, stage, microbatch, begin and end since the step's begin."""
    begin = begin_of(spans)
    return [[KINDS.index(s.kind), s.stage, s.microbatch, s.begin - begin, s.end - begin]
            for s in spans if s.kind in KINDS]  # fmt: skip


def from_rows(rows: Iterable[Sequence[float]]) -> list[Span]:
    """What :func:`to_rows` made numbers of, without rows of a negative kind, which fill up."""
    return [Span(KINDS[int(kind)], int(stage), int(mb), *times) for kind, stage, mb, *times in rows if kind >= 0]


def chrome_trace(ranks: Sequence[Sequence[Span]], **facts: object) -> dict[str, object]:
    """One step for chrome://tracing or ui.perfetto.dev: a process a ``pp`` rank, a lane of actions and one of waits.

    Every rank's times count from its own step's begin, for clocks of different hosts do not compare: all ranks leave
    the step before by the all-reduce of its gradient norm, so they begin within one collective's latency of each other.

    Args:
        ranks: the spans of one step by ``pp`` rank.
        facts: what else the file says, such as the step.
    """
    events: list[dict[str, object]] = []
    for rank, spans in enumerate(ranks):
        stages = sorted({span.stage for span in spans if span.kind in ACTIONS})
        of = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        events += [
            {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"pp rank {rank}: {of}"}},
            {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
            {"ph": "M", "pid": rank, "tid": 0, "name": "thread_name", "args": {"name": "actions"}},
            {"ph": "M", "pid": rank, "tid": 1, "name": "thread_name", "args": {"name": "waits"}},
        ]
        events += _slices(rank, spans)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def write_trace(path: Path, ranks: Sequence[Sequence[Span]], **facts: object) -> None:
    """Write :func:`chrome_trace` to ``path``, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(ranks, **facts)), encoding="utf-8")


def _slices(rank: int, spans: Sequence[Span]) -> list[dict[str, object]]:
    begin = begin_of(spans)
    return [
        {
            "ph": "X",
            "pid": rank,
            "tid": int(span.kind == "wait"),
            "name": f"wait {span.stage}.{span.microbatch}" if span.kind == "wait" else span.name,
            "cat": span.kind,
            "cname": _COLOURS[span.kind],
            "ts": (span.begin - begin) * 1e6,
            "dur": (span.end - span.begin) * 1e6,
            "args": {"stage": span.stage, "microbatch": span.microbatch},
        }
        for span in sorted(spans, key=lambda span: span.begin)
        if span.kind in _COLOURS
    ]
