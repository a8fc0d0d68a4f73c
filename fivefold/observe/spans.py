"""When each action of the schedule ran: spans, and the clocks that time them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

KEEP = 100_000
"""Spans kept while no step begins: a few tens of megabytes."""


class Span(NamedTuple):
    """One stretch of work or waiting of one rank."""

    kind: str
    """F, B, I or W for an action, wait for the wait for a message, step for all of a step's schedule."""
    stage: int
    microbatch: int
    begin: float
    """Seconds of this process's ``time.perf_counter``."""
    end: float

    @property
    def name(self) -> str:
        """The action as the schedule prints it: ``F0.3``."""
        return f"{self.kind}{self.stage}.{self.microbatch}"


class Clock(Protocol):
    """Marks an instant now, and tells later when that was."""

    def mark(self) -> Any:
        """This instant of the device's work."""
        ...

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """When each of ``marks`` was, in seconds of ``time.perf_counter``."""
        ...

    def free(self, marks: Sequence[Any]) -> None:
        """Take back ``marks`` that nobody will ask about."""
        ...


class HostClock:
    """Where the device is the host: a mark is the time itself."""

    mark = staticmethod(time.perf_counter)

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return list(marks)

    def free(self, marks: Sequence[float]) -> None:
        pass


class Event(Protocol):
    """What is needed of a ``torch.Event`` made with ``enable_timing``."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...


class EventClock:
    """Where kernels run after the call that queued them: a mark is an event on the current stream.

    Events are reused, and read only when their times are asked for: that waits for the work queued before. Their
    distance is to an event recorded at that moment, at which the host's clock is read too; it is a float32 of
    milliseconds, exact to a microsecond over ten seconds.
    """

    def __init__(self, make: Callable[[], Event]) -> None:
        self._make = make
        self._idle: list[Event] = []

    def mark(self) -> Event:
        event = self._idle.pop() if self._idle else self._make()
        event.record()
        return event

    def seconds(self, marks: Sequence[Event]) -> list[float]:
        anchor = self.mark()
        anchor.synchronize()
        now = time.perf_counter()
        found = [now - mark.elapsed_time(anchor) / 1e3 for mark in marks]
        self.free([anchor])
        return found

    def free(self, marks: Sequence[Event]) -> None:
        self._idle.extend(marks)


class Spans:
    """The spans of one rank since its last step began.

    A span of kind ``step`` begins a new record: those of the steps before are forgotten.

    Args:
        clock: what times them.
        keep: how many are kept; older ones fall out.
    """

    def __init__(self, clock: Clock | None = None, keep: int = KEEP) -> None:
        self.clock: Clock = clock or HostClock()
        self.keep = keep
        self._ended: deque[tuple[str, int, int, Any, Any]] = deque()

    def open(self, kind: str, stage: int, microbatch: int) -> Running:
        """A context manager that times its block, also one that fails."""
        return Running(self, kind, stage, microbatch)

    def read(self) -> list[Span]:
        """All spans in the order they ended."""
        if not self._ended:
            return []
        seconds = self.clock.seconds([mark for *_, begin, end in self._ended for mark in (begin, end)])
        pairs = zip(seconds[::2], seconds[1::2], strict=True)
        return [Span(*ended[:3], *pair) for ended, pair in zip(self._ended, pairs, strict=True)]

    def forget(self) -> None:
        """Drop all spans."""
        self.clock.free([mark for *_, begin, end in self._ended for mark in (begin, end)])
        self._ended.clear()

    def add(self, kind: str, stage: int, microbatch: int, begin: Any, end: Any) -> None:
        """Keep a span that ended, given the clock's marks."""
        if len(self._ended) >= self.keep:
            self.clock.free(self._ended.popleft()[3:])
        self._ended.append((kind, stage, microbatch, begin, end))


class Running:
    """A span under way. A class of its own, for it is opened twice an action and a generator would cost more."""

    __slots__ = ("_at", "_begin", "_spans")

    def __init__(self, spans: Spans, kind: str, stage: int, microbatch: int) -> None:
        self._spans, self._at = spans, (kind, stage, microbatch)

    def __enter__(self) -> None:
        if self._at[0] == "step":
            self._spans.forget()
        self._begin = self._spans.clock.mark()

    def __exit__(self, *_: object) -> None:
        self._spans.add(*self._at, self._begin, self._spans.clock.mark())
