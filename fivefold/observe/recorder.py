"""What crossed ranks, when, and on behalf of which part: the recorder that collectives, engine and executor report to.

Scopes say who is at work (module, phase, stage, microbatch); events say what moved. A scope is a value: an autograd
node keeps the one its forward ran in, so that its backward is reported under the same module. Spans say when the
actions of a schedule ran.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace

from .spans import Span, Spans


@dataclass(frozen=True, slots=True)
class Scope:
    """Who is at work."""

    module: str = ""
    """Dotted name of the part or layer."""
    phase: str = ""
    """forward, backward, recompute, gather, reduce, optimizer, or another step of the run."""
    stage: int = -1
    """Pipeline stage; -1 outside one."""
    microbatch: int = -1
    """Microbatch; -1 outside one."""

    def backward(self) -> Scope:
        """The scope that this forward's gradient runs in."""
        return replace(self, phase="backward")


@dataclass(slots=True)
class Event:
    """One operation between ranks, as one of them saw it. Times are ``time.perf_counter`` seconds."""

    op: str
    axis: str
    size: int
    """Ranks of the axis."""
    sequence: int
    """How many events this rank had on this axis before: the same number on every rank of the group."""
    states: str
    """State before and after, such as ``S(1)->R``."""
    dtype: str
    shape: tuple[int, ...]
    """Of the tensor handed in."""
    sent: int
    """Payload bytes that leave this rank, whatever the algorithm."""
    received: int
    """Payload bytes that arrive."""
    scope: Scope
    post: float = 0.0
    """When it was asked for."""
    begin: float = 0.0
    """When the call into the transport began."""
    end: float = 0.0
    """When its result could be used: for a waited handle, when the wait returned."""

    def start(self) -> None:
        """The call into the transport begins."""
        self.begin = time.perf_counter()

    def launched(self) -> None:
        """The call into the transport returned; the operation may go on."""

    def waiting(self) -> None:
        """Somebody begins to wait for the result."""

    def finish(self) -> None:
        """The result can be used."""
        self.end = time.perf_counter()


_AS_BEFORE = nullcontext()


class Recorder:
    """Reports nothing: what an ``Axis`` carries unless a run records. All calls are as cheap as a call can be."""

    on = False
    scope: Scope = Scope()

    def at(self, **changes: object) -> AbstractContextManager[None]:
        """Run the block under the current scope with ``changes``."""
        return _AS_BEFORE

    def under(self, scope: Scope) -> AbstractContextManager[None]:
        """Run the block under ``scope`` itself: what an autograd node kept from its forward."""
        return _AS_BEFORE

    def post(self, op: str, axis: str, size: int, states: str, dtype: str, shape: tuple[int, ...], sent: int,
             received: int, scope: Scope | None) -> Event | None:  # fmt: skip
        """Announce an event; the caller reports its start, launch, wait and finish to it."""
        return None

    def span(self, kind: str, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Time the block, an action or a wait, as a :class:`~.spans.Span`."""
        return _AS_BEFORE

    def step_spans(self) -> list[Span]:
        """The spans since the newest of kind ``step`` began; they stay. On a GPU this waits for the work queued."""
        return []


NULL = Recorder()
"""The recorder that reports nothing. It has no state."""


@dataclass
class SpanRecorder(Recorder):
    """Times spans and reports nothing else: a microsecond an action, so every run has one."""

    spans: Spans = field(default_factory=Spans, kw_only=True)

    def span(self, kind: str, stage: int, microbatch: int) -> AbstractContextManager[None]:
        return self.spans.open(kind, stage, microbatch)

    def step_spans(self) -> list[Span]:
        return self.spans.read()


@dataclass
class FlightRecorder(SpanRecorder):
    """Keeps the newest events, totals of all of them, and spans, of one rank.

    Autograd runs backward on threads of its own on CUDA, so the scope is one per thread.
    """

    keep: int = 100_000
    """Events kept; older ones fall out, their totals stay."""
    events: deque[Event] = field(init=False)
    totals: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Bytes sent by (op, axis, phase)."""
    _sequence: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _local: threading.local = field(default_factory=threading.local)

    on = True
    event_type = Event

    def __post_init__(self) -> None:
        self.events = deque(maxlen=self.keep)

    @property
    def scope(self) -> Scope:  # type: ignore[override]
        return getattr(self._local, "scope", Scope())

    @contextmanager
    def under(self, scope: Scope) -> Iterator[None]:
        before, self._local.scope = self.scope, scope
        try:
            yield
        finally:
            self._local.scope = before

    @contextmanager
    def at(self, **changes: object) -> Iterator[None]:
        with self.under(replace(self.scope, **changes)):  # type: ignore[arg-type]
            yield

    def post(self, op: str, axis: str, size: int, states: str, dtype: str, shape: tuple[int, ...], sent: int,
             received: int, scope: Scope | None) -> Event:  # fmt: skip
        at = scope if scope is not None else self.scope
        event = self.event_type(op, axis, size, self._sequence[axis], states, dtype, shape, sent, received, at,
                                time.perf_counter())  # fmt: skip
        self._sequence[axis] += 1
        self.events.append(event)
        self.totals[op, axis, at.phase] += sent
        return event

    def clear(self) -> None:
        """Forget events, totals and spans; sequence numbers go on, so that ranks still match."""
        self.spans.forget()
        self.events.clear()
        self.totals.clear()

    def sent(self, op: str | None = None, axis: str | None = None) -> int:
        """Bytes sent since the last ``clear``, of one op or axis if given."""
        return sum(n for (o, a, _), n in self.totals.items() if op in (None, o) and axis in (None, a))

    def lines(self) -> Iterator[str]:
        """The kept events as JSON, one a line."""
        for event in self.events:
            yield json.dumps(asdict(event))
