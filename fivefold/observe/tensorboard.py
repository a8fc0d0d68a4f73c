"""Scalars for TensorBoard, through its own event writer: it loads neither TensorFlow nor torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]  # generated when it is loaded
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from .metrics import scalars


class TensorBoardReporter:
    """Writes every number under its joined name: ``expert_load/3`` for the fourth layer's load."""

    def __init__(self, folder: str | Path, flush_s: float = 10.0) -> None:
        self._writer: EventFileWriter | None = EventFileWriter(str(folder), flush_secs=flush_s)  # type: ignore[arg-type]

    def report(self, step: int, values: Mapping[str, object]) -> None:
        assert self._writer is not None, "reported after close"
        summary = Summary(value=[Summary.Value(tag=name, simple_value=x) for name, x in scalars(values)])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None
