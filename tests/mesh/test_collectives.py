"""Value, gradient, bytes and record of every collective, against a one-process emulation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.config.dims import ParallelDims
from fivefold.mesh import collectives as c
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool import Pool

from . import cases
from .operations import Operation, operations

Pools = Callable[[int], Pool]
ELEMENT = 8  # bytes of a float64
NAMES = [(n, name) for n in (2, 3, 4) for name in operations(n)]


def check(op: Operation, seen: list[cases.Seen]) -> None:
    outputs, gradients = op.expected()
    for rank, s in enumerate(seen):
        assert s.value.shape == outputs[rank].shape
        assert torch.equal(s.value, outputs[rank]), f"value on rank {rank}"
        assert torch.equal(s.gradient, gradients[rank]), f"gradient on rank {rank}"


def events(op: Operation, rank: int) -> list[tuple[str, int, int, int]]:
    """What the record of a rank should say: op, sequence, bytes sent, bytes received."""
    return [(name, i, round(ELEMENT * by_rank[rank][0]), round(ELEMENT * by_rank[rank][1]))
            for i, (name, by_rank) in enumerate(op.moved)]  # fmt: skip


@pytest.mark.parametrize(("n", "name"), NAMES, ids=[f"{n}-{name}" for n, name in NAMES])
def test_value_gradient_and_bytes(pool: Pools, n: int, name: str) -> None:
    op = operations(n)[name]
    seen = pool(n).run(cases.operation, name, f"tp{n}", "tp")
    check(op, seen)
    for rank, s in enumerate(seen):
        assert [(e["op"], e["sequence"], e["sent"], e["received"]) for e in s.events] == events(op, rank)
    assert sum(e["sent"] for s in seen for e in s.events) == sum(e["received"] for s in seen for e in s.events)


@pytest.mark.parametrize("name", ["all_gather-R-1", "reduce_scatter-2", "all_to_all", "all_reduce-R", "shift+1"])
def test_input_with_gaps(pool: Pools, name: str) -> None:
    check(operations(2)[name], pool(2).run(cases.operation, name, "tp2", "tp", True))


@pytest.mark.parametrize("axis", ["fsdp", "tp"])
def test_groups_inside_the_world(pool: Pools, axis: str) -> None:
    """Two groups of two among four ranks, neighbours and not."""
    for name in ("all_gather-R-1", "reduce_scatter-1", "broadcast-R", "shift+1", "all_to_all"):
        seen = pool(4).run(cases.operation, name, "fsdp2-tp2", axis)
        pairs = [(0, 1), (2, 3)] if axis == "tp" else [(0, 2), (1, 3)]
        for pair in pairs:
            check(operations(2)[name], [seen[rank] for rank in pair])


def test_events_match_between_ranks_and_carry_the_forwards_scope(pool: Pools) -> None:
    for name in ("all_gather-R-1", "broadcast-R", "all_to_all", "shift-1"):
        seen = pool(3).run(cases.operation, name, "tp3", "tp")
        keys = [[(e["axis"], e["sequence"], e["op"], e["size"]) for e in s.events] for s in seen]
        assert keys[0] == keys[1] == keys[2]
        for s in seen:
            forward, backward = s.events
            scope = {"module": "blocks.1", "stage": -1, "microbatch": 3}
            assert forward["scope"] == {**scope, "phase": "forward"}
            assert backward["scope"] == {**scope, "phase": "backward"}
            for e in s.events:
                assert 0 < e["post"] <= e["begin"] <= e["end"]
                assert (e["dtype"], e["axis"]) == ("float64", "tp")


@pytest.mark.parametrize(
    ("name", "states", "shape"),
    [
        ("all_gather-R-1", ["S(1)->R", "P->S(1)"], (2, 3, 4)),
        ("reduce_scatter-2", ["P->S(2)", "S(2)->R"], (2, 3, 8)),
        ("all_reduce-I", ["P->I"], (2, 5)),
        ("replicate", ["P->I"], (2, 5)),
        ("shard-I-0", ["S(0)->I"], (2, 3, 4)),
        ("broadcast-R", ["->R", "P->root"], (2, 5)),
    ],
)
def test_events_tell_states_and_shape(pool: Pools, name: str, states: list[str], shape: tuple[int, ...]) -> None:
    for s in pool(2).run(cases.operation, name, "tp2", "tp"):
        assert [e["states"] for e in s.events] == states
        assert s.events[0]["shape"] == shape


def test_exchanges_without_gradient(pool: Pools) -> None:
    for rank, seen in enumerate(results := pool(3).run(cases.values)):
        xs = torch.stack([r["x"] for r in results])
        assert torch.equal(seen["sum"], xs.sum(0))
        assert torch.equal(seen["max"], xs.max(0).values)
        assert torch.equal(seen["gather"], xs)
        assert seen["swap"].tolist() == [[100 * i + 2 * rank, 100 * i + 2 * rank + 1] for i in range(3)]
        assert seen["grads"] == [False] * 4


def test_a_recorder_that_is_off_is_never_called(pool: Pools) -> None:
    pool(2).run(cases.off)


def test_compiled_to_one_graph_equals_eager(pool: Pools) -> None:
    for (value, gradient), seen in pool(2).run(cases.compiled, "all_in_one", "aot_eager"):
        assert torch.equal(seen[0], value)
        assert torch.equal(seen[1], gradient)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("which", ["all_in_one", "ragged"])
def test_compiled_graphs_on_disk_are_each_ranks_own(tmp_path: Path, which: str) -> None:
    """Twice from new processes: the second finds what the first left."""
    for _ in range(2):
        with Pool(2) as own:
            for (value, gradient), seen in own.run(cases.compiled, which, "inductor", str(tmp_path)):
                torch.testing.assert_close(seen[0], value, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(seen[1], gradient, rtol=1e-12, atol=1e-10)


def test_operators_pass_torchs_own_check(pool: Pools) -> None:
    pool(2).run(cases.checked)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_meta_tensors_get_the_same_shapes(n: int) -> None:
    """On a planned mesh, where nothing could be sent."""
    for rank in range(n):
        axis = Mesh(ParallelDims(tp=n), rank, connect=False).tp
        for name, op in operations(n).items():
            x = torch.empty(op.shapes[rank], device="meta", requires_grad=True)
            y = op.call(x, axis)
            assert y.device.type == "meta"
            assert y.shape == op.expected()[0][rank].shape, name
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.shape == x.shape


def test_at_size_one_nothing_is_left() -> None:
    axis = Mesh.single().tp
    x = torch.ones(3, 4, requires_grad=True)
    calls: list[Callable[[Any], Any]] = [
        lambda x: c.all_gather(x, axis, 0), lambda x: c.reduce_scatter(x, axis, 1), lambda x: c.all_reduce(x, axis),
        lambda x: c.replicate(x, axis), lambda x: c.shard(x, axis, 0), lambda x: c.all_to_all(x, axis, [3], [3]),
        lambda x: c.all_gather_uneven(x, axis, [3]), lambda x: c.reduce_scatter_uneven(x, axis, [3]),
        lambda x: c.broadcast(x, axis), lambda x: c.shift(x, axis), lambda x: c.sum_values(x, axis),
        lambda x: c.max_values(x, axis),
    ]  # fmt: skip
    assert all(call(x) is x for call in calls)
    assert c.gather_values(x, axis).shape == (1, 3, 4)
    assert c.swap_values(x[None], axis).shape == (1, 3, 4)


@pytest.mark.parametrize("op", [c.reduce_scatter, c.shard])
def test_a_dim_that_does_not_divide_is_refused(op: Callable[..., Any]) -> None:
    axis = Mesh(ParallelDims(tp=4), connect=False).tp
    with pytest.raises(ValueError, match=r"over tp=4 cannot cut dim 1 of \(8, 6\).*that 4 divides"):
        op(torch.ones(8, 6), axis, 1)


def test_a_dim_may_count_from_the_end() -> None:
    axis = Mesh(ParallelDims(tp=2), connect=False).tp
    x = torch.empty(3, 4, 6, device="meta")
    assert c.all_gather(x, axis, -1).shape == (3, 4, 12)
    assert c.reduce_scatter(x, axis, -2).shape == (3, 2, 6)
    assert torch.equal(c.shard(torch.arange(6).view(1, 6), axis, -1), torch.tensor([[0, 1, 2]]))
