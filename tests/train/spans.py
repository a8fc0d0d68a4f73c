"""Cases for the pool about spans: what is gathered of them, and what is reported."""

from __future__ import annotations

from pathlib import Path

from fivefold.config.run import RunConfig
from fivefold.mesh.pool_worker import RankContext
from fivefold.observe.console import Console
from fivefold.observe.recorder import SpanRecorder
from fivefold.observe.spans import Span
from fivefold.train.report import Reporting, gather_spans
from fivefold.train.state import build_state
from fivefold.train.step import train_step
from tests.wrap.cases import batches


def of(stage: int, microbatch: int, clock_s: float = 0.0) -> Span:
    return Span("F", stage, microbatch, clock_s + microbatch, clock_s + microbatch + stage + 1)


def gathered(context: RankContext, layout: str) -> list[list[Span]]:
    """What each rank learns of the spans of its ``pp`` axis: place p has p+1 of them."""
    mesh = context.mesh(layout)
    place = mesh.pp.rank
    return gather_spans([of(place, m, 1000.0 * place) for m in range(place + 1)], mesh)


def reported(context: RankContext, config: RunConfig, folder: Path, steps: int) -> None:
    """Steps of a run with their reports."""
    mesh = context.mesh(config.parallel, SpanRecorder())
    state = build_state(config, mesh)
    source, told = batches(config, mesh), Reporting(config, mesh, folder, Console(steps, enabled=False))
    told.start(0)
    for step in range(1, steps + 1):
        told.step(state, train_step(state, source.batch(source.rows(step))), 0.0)
    told.close()
    source.close()
