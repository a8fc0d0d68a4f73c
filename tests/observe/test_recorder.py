"""Scopes, events and totals."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from fivefold.observe.recorder import NULL, FlightRecorder, Recorder, Scope


def post(recorder: Recorder, op: str = "all_gather", axis: str = "tp", sent: int = 8, **changes: Any) -> Any:
    given = {"size": 2, "states": "S(0)->R", "dtype": "float32", "shape": (2, 3), "received": sent, "scope": None}
    return recorder.post(op, axis, sent=sent, **{**given, **changes})


def test_the_null_recorder_keeps_nothing() -> None:
    with NULL.at(module="a"), NULL.under(Scope(module="b")):
        assert post(NULL) is None
        assert NULL.scope == Scope()
    assert not NULL.on
    assert not hasattr(NULL, "events")


def test_scopes_nest_and_end_with_their_block() -> None:
    r = FlightRecorder()
    with r.at(module="blocks.0", phase="forward"):
        with r.at(microbatch=2):
            assert r.scope == Scope("blocks.0", "forward", -1, 2)
        with r.under(Scope(module="head")):
            assert r.scope == Scope(module="head")
        assert r.scope == Scope("blocks.0", "forward")
    with pytest.raises(ArithmeticError), r.at(stage=1):
        raise ArithmeticError
    assert r.scope == Scope()


def test_an_unknown_field_of_a_scope_is_an_error() -> None:
    with pytest.raises(TypeError), FlightRecorder().at(modul="a"):
        pass


def test_a_forwards_scope_becomes_its_backwards() -> None:
    assert Scope("blocks.0", "recompute", 1, 4).backward() == Scope("blocks.0", "backward", 1, 4)


def test_events_take_the_current_scope_or_the_given_one() -> None:
    r = FlightRecorder()
    with r.at(module="blocks.0"):
        assert post(r).scope.module == "blocks.0"
        assert post(r, scope=Scope(module="head")).scope.module == "head"


def test_each_axis_counts_its_events() -> None:
    r = FlightRecorder()
    assert [post(r, axis=a).sequence for a in ("tp", "fsdp", "tp", "tp", "fsdp")] == [0, 0, 1, 2, 1]
    r.clear()
    assert post(r).sequence == 3


def test_totals_outlive_the_events() -> None:
    r = FlightRecorder(keep=2)
    with r.at(phase="forward"):
        for op, axis, sent in (("all_gather", "tp", 1), ("all_gather", "fsdp", 10), ("all_reduce", "tp", 100)):
            post(r, op, axis, sent)
    assert len(r.events) == 2
    assert (r.sent(), r.sent("all_gather"), r.sent(axis="tp"), r.sent("all_gather", "tp")) == (111, 11, 101, 1)
    assert r.totals["all_reduce", "tp", "forward"] == 100
    r.clear()
    assert (r.sent(), len(r.events)) == (0, 0)


def test_events_are_lines_of_json() -> None:
    r = FlightRecorder()
    event = post(r)
    event.start()
    event.finish()
    (line,) = map(json.loads, r.lines())
    assert line["op"] == "all_gather"
    assert line["shape"] == [2, 3]
    assert line["scope"] == {"module": "", "phase": "", "stage": -1, "microbatch": -1}
    assert line["post"] <= line["begin"] <= line["end"]


def test_each_thread_has_its_scope() -> None:
    """Autograd's threads on CUDA do not see the forward's."""
    r, seen = FlightRecorder(), []
    with r.at(module="blocks.0"):
        thread = threading.Thread(target=lambda: seen.append(r.scope))
        thread.start()
        thread.join()
    assert seen == [Scope()]
