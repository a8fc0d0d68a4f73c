"""Traces of single steps by torch's profiler, in which our modules and collectives have their names."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .memory import record_history, write_snapshot
from .recorder import Event, FlightRecorder, Scope


def label(scope: Scope) -> str:
    """A scope in a word or two: ``blocks.3 forward``, or ``backward stage0 mb1`` outside a module."""
    if scope.module:
        return f"{scope.module} {scope.phase}".rstrip()
    place = (("stage", scope.stage), ("mb", scope.microbatch))
    return " ".join([scope.phase or "step", *(f"{name}{n}" for name, n in place if n >= 0)])


class RangeEvent(Event):
    """An event that shows in a trace as two ranges: the call that starts it, and the wait for it.

    Two, because what runs between them is other work: one range over all of it would cross other ranges.
    """

    __slots__ = ("_range",)

    def _open(self, prefix: str) -> None:
        self._range = record_function(f"{prefix}{self.op} {self.axis}: {label(self.scope)}")
        self._range.__enter__()

    def _close(self) -> None:
        self._range.__exit__(None, None, None)

    def start(self) -> None:
        self._open("")
        super().start()

    def launched(self) -> None:
        self._close()

    def waiting(self) -> None:
        self._open("wait ")

    def finish(self) -> None:
        super().finish()
        self._close()


@dataclass
class RangeRecorder(FlightRecorder):
    """A recorder that is on only while a step is traced, and shows scopes and events as ranges of the trace.

    Spans are timed in every step.
    """

    on: bool = field(default=False, init=False)  # type: ignore[assignment]
    event_type = RangeEvent

    @contextmanager
    def under(self, scope: Scope) -> Iterator[None]:
        if not self.on:
            yield
        elif torch.compiler.is_compiling():
            with super().under(scope):  # a range would break the graph
                yield
        else:
            with super().under(scope), record_function(label(scope)):
                yield

    def at(self, **changes: object) -> AbstractContextManager[None]:
        return super().at(**changes) if self.on else nullcontext()


class Profiler:
    """Traces one step of every so many, on chosen ranks, into ``step<k>-rank<r>.json.gz``.

    Open a trace in chrome://tracing or ui.perfetto.dev. The step before a traced one warms the profiler up: both are
    slower than others.
    """

    def __init__(self, folder: str | Path, every: int, ranks: Collection[int] = (0,), rank: int = 0, *,
                 memory: bool = False, device: torch.device | str = "cpu",
                 recorder: RangeRecorder | None = None) -> None:  # fmt: skip
        """
        Args:
            every: steps between traces; 0 traces nothing.
            ranks: those that trace, of which this is ``rank``.
            memory: whether to write a CUDA memory snapshot of the traced step beside the trace.
            recorder: the mesh's, switched on for the traced step.
        """
        self.folder, self.every, self.rank = Path(folder), every, rank
        self.memory = memory and torch.device(device).type == "cuda"
        self.recorder = recorder
        self.active = every > 0 and rank in ranks
        self._activities = [ProfilerActivity.CPU]
        if torch.device(device).type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._ready: profile | None = None

    def path(self, step: int, suffix: str = "json.gz") -> Path:
        """Where this rank's trace of ``step`` goes."""
        return self.folder / f"step{step}-rank{self.rank}.{suffix}"

    def step(self, step: int) -> AbstractContextManager[None]:
        """Run a training step in this: it is traced if ``step`` is a multiple of ``every``."""
        if not self.active:
            return nullcontext()
        if step % self.every == 0:
            return self._traced(step)
        if (step + 1) % self.every == 0:
            self._ready = self._prepared()
        return nullcontext()

    def close(self) -> None:
        """Drop a profiler that was warmed up for a step that never came."""
        if self._ready is not None:
            self._ready.start_trace()
            self._ready.stop_trace()
        self._ready = None

    def _prepared(self) -> profile:
        ready = profile(activities=self._activities, record_shapes=True, acc_events=True)
        ready.prepare_trace()
        return ready

    @contextmanager
    def _traced(self, step: int) -> Iterator[None]:
        """Trace the block. If it fails nothing is written, and a memory history goes on for the caller's snapshot."""
        running, self._ready = self._ready or self._prepared(), None
        if self.memory:
            record_history(True)
        running.start_trace()
        if self.recorder is not None:
            self.recorder.clear()
            self.recorder.on = True
        try:
            with record_function(f"step {step}"):
                yield
        finally:
            if self.recorder is not None:
                self.recorder.on = False
            running.stop_trace()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.memory:
            write_snapshot(self.path(step, "memory.pickle"))
            record_history(False)
        running.export_chrome_trace(str(self.path(step)))
