"""Spans: what is timed, on which clock, what is forgotten, and what it costs."""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from fivefold.observe.profile import RangeRecorder
from fivefold.observe.recorder import NULL, FlightRecorder, Recorder, SpanRecorder
from fivefold.observe.spans import EventClock, Span, Spans


def test_the_null_recorder_times_nothing() -> None:
    with NULL.span("F", 0, 1):
        pass
    assert NULL.step_spans() == [] and NULL.span("F", 0, 1) is NULL.span("B", 1, 2)


@pytest.mark.parametrize("kind", [SpanRecorder, FlightRecorder, RangeRecorder])
def test_spans_are_read_in_the_order_they_ended(kind: type[SpanRecorder]) -> None:
    recorder: Recorder = kind()
    before = time.perf_counter()
    with recorder.span("step", -1, -1):
        with recorder.span("F", 1, 2):
            time.sleep(0.002)
        with recorder.span("wait", 1, 2):
            pass
    after = time.perf_counter()
    forward, wait, step = recorder.step_spans()
    assert [s[:3] for s in (forward, wait, step)] == [("F", 1, 2), ("wait", 1, 2), ("step", -1, -1)]
    assert before <= step.begin <= forward.begin <= forward.end - 0.002
    assert forward.end <= wait.begin <= wait.end <= step.end <= after
    assert forward.name == "F1.2"


def test_reading_forgets_nothing() -> None:
    recorder = SpanRecorder()
    with recorder.span("F", 0, 0):
        pass
    seen = recorder.step_spans()
    assert [s.name for s in seen] == ["F0.0"] and recorder.step_spans() == seen


def test_a_block_that_fails_is_timed_too() -> None:
    recorder = SpanRecorder()
    with pytest.raises(ArithmeticError), recorder.span("B", 0, 0):
        raise ArithmeticError
    assert [s.name for s in recorder.step_spans()] == ["B0.0"]


def test_a_step_forgets_the_steps_before() -> None:
    recorder = SpanRecorder()
    for microbatch in range(3):
        with recorder.span("step", -1, -1), recorder.span("F", 0, microbatch):
            pass
    assert [s[:3] for s in recorder.step_spans()] == [("F", 0, 2), ("step", -1, -1)]


def test_clear_forgets_spans() -> None:
    recorder = FlightRecorder()
    with recorder.span("F", 0, 0):
        pass
    recorder.clear()
    assert recorder.step_spans() == []


class FakeEvent:
    """An event of a device whose work runs 2 s behind the host, and whose clock starts elsewhere."""

    device_s = 1000.0
    made = 0

    def __init__(self) -> None:
        FakeEvent.made += 1
        self.at: float | None = None
        self.waited = False

    def record(self) -> None:
        self.at, self.waited = FakeEvent.device_s, False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end_event: Any, /) -> float:
        assert self.at is not None and end_event.at is not None and end_event.waited
        return (end_event.at - self.at) * 1e3


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    monkeypatch.setattr(FakeEvent, "device_s", 1000.0)
    monkeypatch.setattr(FakeEvent, "made", 0)
    return Spans(EventClock(FakeEvent), keep=4)


def ran(spans: Spans, seconds: float, kind: str = "F", microbatch: int = 0) -> None:
    with spans.open(kind, 0, microbatch):
        FakeEvent.device_s += seconds


def test_events_become_times_of_the_host(spans: Spans) -> None:
    ran(spans, 3.0)
    FakeEvent.device_s += 1.0
    ran(spans, 2.0, "B")
    forward, backward = spans.read()
    now = time.perf_counter()
    assert backward.end == pytest.approx(now, abs=0.1)
    assert forward.end - forward.begin == pytest.approx(3.0)
    assert backward.begin - forward.end == pytest.approx(1.0)
    assert backward.end - backward.begin == pytest.approx(2.0)


def test_events_are_used_again(spans: Spans) -> None:
    for _ in range(5):
        with spans.open("step", -1, -1):
            ran(spans, 1.0)
        assert len(spans.read()) == 2
    assert FakeEvent.made == 5  # two a span, and the anchor
    for _ in range(5):  # steps that nobody asks about
        with spans.open("step", -1, -1):
            ran(spans, 1.0)
    assert FakeEvent.made == 5


def test_the_oldest_fall_out_and_give_their_events_back(spans: Spans) -> None:
    for microbatch in range(50):
        ran(spans, 1.0, microbatch=microbatch)
    assert FakeEvent.made == 4 * 2 + 2
    assert [s.microbatch for s in spans.read()] == [46, 47, 48, 49]


def test_a_span_costs_next_to_nothing() -> None:
    recorder, loops = SpanRecorder(spans=Spans(keep=100)), 20_000
    began = time.perf_counter()
    for _ in range(loops):
        with recorder.span("F", 0, 0):
            pass
    assert (time.perf_counter() - began) / loops < 20e-6  # measured: 1.1 us


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Kernels that are queued at once run one after the other, and each span has its own kernel's time."""
    clock = EventClock(partial(torch.Event, torch.device("cuda", 0), enable_timing=True))
    recorder = SpanRecorder(spans=Spans(clock))
    cycles = 50_000_000
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    kernel_s = time.perf_counter() - began
    queued = time.perf_counter()
    with recorder.span("step", -1, -1):
        for microbatch in range(4):
            with recorder.span("F", 0, microbatch):
                torch.cuda._sleep(cycles)
    queued_s = time.perf_counter() - queued
    *forwards, step = recorder.step_spans()
    now = time.perf_counter()
    assert queued_s < kernel_s  # the host did not wait
    assert [s.end - s.begin for s in forwards] == pytest.approx([kernel_s] * 4, rel=0.2)
    assert all(a.end <= b.begin + 1e-5 for a, b in pairwise(forwards))
    assert queued - 1e-3 <= step.begin and step.end <= now and step.end == pytest.approx(forwards[-1].end, abs=1e-3)
    assert isinstance(step, Span)
