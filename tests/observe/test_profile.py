"""Traces hold our names, come from the right steps and ranks, and cost nothing otherwise."""

from __future__ import annotations

import gzip
import json
import os
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fivefold.mesh import transport
from fivefold.mesh.axis import Axis
from fivefold.observe import profile as module
from fivefold.observe.profile import Profiler, RangeRecorder, label
from fivefold.observe.recorder import Scope


def trace(path):
    """The complete events of a Chrome trace, by name."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found = {}
    for event in events:
        if event.get("ph") == "X":
            found.setdefault(event["name"], []).append(event)
    return found


def inside(inner, outer):
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


@pytest.fixture
def axis(tmp_path):
    """An axis over a group of this process alone, so that the transport really runs."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Axis("fsdp", 1, 0, (0,), dist.group.WORLD, RangeRecorder())
    dist.destroy_process_group()


def test_labels():
    assert label(Scope("blocks.3", "forward", 0, 1)) == "blocks.3 forward"
    assert label(Scope("", "backward", 0, 1)) == "backward stage0 mb1"
    assert label(Scope()) == "step"
    assert label(Scope("head")) == "head"


def test_trace_has_our_names(tmp_path, axis):
    recorder = axis.recorder
    profiler = Profiler(tmp_path / "profile", 2, (0,), 0, recorder=recorder)
    layer = nn.Linear(8, 8)
    for step in range(1, 6):
        with profiler.step(step), recorder.at(stage=0, microbatch=1):
            with recorder.at(module="blocks.0", phase="forward"):
                y = layer(transport.all_gather(torch.ones(4, 8), axis).wait())
            with recorder.at(phase="backward"):
                y.sum().backward()
                transport.reduce_scatter(layer.weight.grad, axis, scope=Scope("blocks.0", "backward")).wait()
    profiler.close()
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "step2-rank0.json.gz",
        "step4-rank0.json.gz",
    ]
    events = trace(profiler.path(4))
    names = [
        "step 4",
        "step stage0 mb1",
        "blocks.0 forward",
        "all_gather fsdp: blocks.0 forward",
        "wait all_gather fsdp: blocks.0 forward",
        "backward stage0 mb1",
        "reduce_scatter fsdp: blocks.0 backward",
        "wait reduce_scatter fsdp: blocks.0 backward",
    ]
    assert [len(events.get(name, [])) for name in names] == [1] * len(names)
    whole, forward = events["step 4"][0], events["blocks.0 forward"][0]
    assert all(inside(events[name][0], whole) for name in names)
    assert inside(events["all_gather fsdp: blocks.0 forward"][0], forward)
    assert inside(events["wait all_gather fsdp: blocks.0 forward"][0], forward)
    assert any(inside(event, forward) for event in events["aten::linear"])
    assert "step 2" not in events
    # The recorder's own record of that step, and of that one alone.
    assert [(e.op, e.sequence) for e in recorder.events] == [("all_gather", 2), ("reduce_scatter", 3)]
    assert all(e.post <= e.begin <= e.end for e in recorder.events)
    assert not recorder.on


def test_ranges_of_work_under_way_do_not_cross(tmp_path, axis):
    """A gather started in one module and waited for in the next, as prefetch does it."""
    recorder = axis.recorder
    profiler = Profiler(tmp_path, 1, recorder=recorder)
    with profiler.step(1):
        with recorder.at(module="a", phase="forward"):
            handle = transport.all_gather(torch.ones(4), axis)
        with recorder.at(module="b", phase="forward"):
            handle.wait()
    events = trace(profiler.path(1))
    assert inside(events["all_gather fsdp: a forward"][0], events["a forward"][0])
    assert inside(events["wait all_gather fsdp: a forward"][0], events["b forward"][0])


def test_recompute_has_its_range(tmp_path):
    recorder = RangeRecorder()
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    profiler = Profiler(tmp_path, 1, recorder=recorder)

    def contexts():
        return nullcontext(), recorder.under(Scope("blocks.0", "recompute"))

    with profiler.step(3):
        checkpoint(layer, torch.ones(2, 4), use_reentrant=False, context_fn=contexts).sum().backward()
    assert "blocks.0 recompute" in trace(profiler.path(3))


@pytest.mark.parametrize(("every", "ranks"), [(0, (0,)), (1, (1, 2))])
def test_inert_when_not_asked(tmp_path, monkeypatch, every, ranks):
    monkeypatch.setattr(module, "profile", None)  # not even made
    recorder = RangeRecorder()
    profiler = Profiler(tmp_path / "profile", every, ranks, 0, memory=True, recorder=recorder)
    for step in range(4):
        with profiler.step(step), recorder.at(module="a"):
            assert not recorder.on
            assert recorder.scope == Scope()
    profiler.close()
    assert not (tmp_path / "profile").exists()


def test_a_failing_step_leaves_no_trace_and_no_profiler(tmp_path):
    recorder = RangeRecorder()
    profiler = Profiler(tmp_path / "profile", 1, recorder=recorder)
    with pytest.raises(RuntimeError, match="planted"), profiler.step(1), recorder.at(module="a"):
        raise RuntimeError("planted")
    assert not (tmp_path / "profile").exists()
    assert not recorder.on
    with profiler.step(2):
        torch.ones(2).sum()
    assert "aten::sum" in trace(profiler.path(2))


def test_close_after_a_warm_up_frees_the_profiler(tmp_path):
    profiler = Profiler(tmp_path, 10)
    with profiler.step(9):
        pass
    profiler.close()
    profiler.close()
    with Profiler(tmp_path, 1).step(1):  # fails if one is still on
        pass


def test_compiles_without_a_graph_break():
    recorder = RangeRecorder()
    recorder.on = True

    def f(x):
        with recorder.at(module="a", phase="forward"):
            return x * 2

    with recorder.at(module="outside"):
        y = torch.compile(f, backend="eager")(torch.ones(2))
    assert y.tolist() == [2, 2]


def test_a_recorder_that_is_off_costs_next_to_nothing():
    recorder = RangeRecorder()
    loops = 20_000
    began = time.perf_counter()
    for _ in range(loops):
        with recorder.at(module="a", phase="forward"):
            pass
    per_scope_s = (time.perf_counter() - began) / loops
    assert per_scope_s < 20e-6  # measured: 0.6 us


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    recorder = RangeRecorder()
    profiler = Profiler(tmp_path, 2, memory=True, device="cuda", recorder=recorder)
    for step in (1, 2):
        with profiler.step(step), recorder.at(module="a", phase="forward"):
            x = torch.ones(1024, 1024, device="cuda")
            (x @ x).sum().item()
    events = trace(profiler.path(2))
    assert any(event.get("cat") == "gpu_user_annotation" for event in events["a forward"])
    assert any("gemm" in name for name in events)
    assert os.path.getsize(profiler.path(2, "memory.pickle")) > 0
