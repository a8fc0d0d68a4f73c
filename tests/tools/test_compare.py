"""What an error is, and how whole tensors are gathered from ranks and watched between parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool import Pool
from fivefold.mesh.pool_worker import RankContext
from fivefold.tools.compare import Watcher, Whole, gather_whole, relative_error, worst
from fivefold.train.state import build_state
from tests.helpers import microbatch
from tests.parity.grid import row

Pools = Callable[[int], Pool]
T = torch.tensor


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),  # over the whole tensor: the largest difference by the largest value
        ([0.0, 8.0], [1.0, -8.0], 2.0),
        ([1e-3, 4.0], [0.0, 4.0], 0.25e-3),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1e-300], [0.0, 0.0], math.inf),
        ([], [], 0.0),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([1.0, 1.0], [math.nan, 1.0], math.inf),
        ([math.inf, 1.0], [1.0, 1.0], math.inf),
        ([math.inf, 1.0], [math.inf, 1.0], math.inf),
    ],
)
def test_relative_error(a: list[float], b: list[float], error: float) -> None:
    found = relative_error(T(a, dtype=torch.float64), T(b, dtype=torch.float64))
    assert found == pytest.approx(error, rel=1e-12)


def test_worst_is_the_largest_relative_error() -> None:
    b = {"big": T([100.0, 0.0]), "small": T([1e-3]), "equal": T([5.0])}
    a = {"big": T([101.0, 0.0]), "small": T([2e-3]), "equal": T([5.0])}
    assert worst(a, b) == ("small", pytest.approx(1.0, rel=1e-5))
    assert worst(b, b)[1] == 0.0


def gathered(context: RankContext, layout: str, mistake: str) -> Whole:
    """Whole initial values, with a mistake in what ranks hold."""
    state = build_state(row(layout, "dense", 3).config, context.mesh(layout))
    if context.rank == 1:
        if mistake == "missing":
            state.shards.pop()
        elif mistake == "twice":
            state.shards.append(state.shards[-1])
        elif mistake == "short":  # the last element of a piece belongs to nobody
            s = state.shards[-1]
            state.shards[-1] = replace(s, piece=replace(s.piece, stop=s.piece.stop - 1, data=s.piece.data[:-1]))
        elif mistake == "bit":
            data = state.shards[-1].piece.data
            data[-1] = torch.nextafter(data[-1], torch.full_like(data[-1], 9.0))
    return gather_whole(state, lambda s: s.piece.data)


MISTAKES = {"": (True, True), "missing": (False, None), "twice": (False, True), "short": (False, None),
            "bit": (True, False)}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
def test_gathering_proves_owners_and_replicas(pool: Pools, layout: str, mistake: str) -> None:
    owners, replicas = MISTAKES[mistake]
    if layout == "fsdp2" and mistake == "bit":
        replicas = True  # nobody else holds it
    for found in pool(2).run(gathered, layout, mistake):
        assert found.owners == owners
        assert replicas is None or found.replicas == replicas


def watched(context: RankContext, layout: str, microbatches: int) -> dict[tuple[str, str], Tensor]:
    """What a watcher sees of made-up parts over two microbatches: ``2x``, then the sum of its squares over ranks."""
    mesh, watcher = context.mesh(layout), Watcher()
    whole = torch.arange(8.0 * 4 * 3).view(8, 4, 3)
    share = whole.chunk(mesh.dims.data)[mesh.data_rank()].chunk(mesh.tp.size, 1)[mesh.tp.rank]
    for rows in share.chunk(microbatches):
        x = rows.clone().requires_grad_()
        y = 2 * x
        watcher("first", y)
        loss = y.square().sum() / mesh.tp.size  # I over tp would be the whole sum: a stand-in for it
        watcher("second", loss)
        loss.backward()
    tokens = torch.zeros(8 // mesh.dims.data, 4, dtype=torch.int64)
    return watcher.whole(mesh, [microbatch(tokens)])


@pytest.mark.parametrize("layout", ["fsdp2", "ddp2", "tp2", "fsdp2-tp2"])
def test_a_watcher_gives_activations_gradients_and_the_loss_whole(pool: Pools, layout: str) -> None:
    world = row(layout).world
    whole = torch.arange(8.0 * 4 * 3).view(8, 4, 3)
    for microbatches in (1, 2):
        for found in pool(world).run(watched, layout, microbatches):
            assert list(found) == [("first", "activation"), ("second", "activation"), ("first", "gradient")]
            order = torch.arange(8)
            assert torch.equal(found["first", "activation"][order], 2 * whole) or microbatches > 1
            assert torch.equal(found["first", "activation"].sum((1, 2)).sort().values, 2 * whole.sum((1, 2)))
            assert found["second", "activation"].ndim == 0
    one: dict[Any, Tensor] = pool(1).run(watched, "single", 2)[0]
    assert torch.equal(one["first", "activation"], 2 * whole) and torch.equal(one["first", "gradient"], 4 * whole)
    assert one["second", "activation"] == (2 * whole).square().sum()


def test_nothing_watched_gives_nothing() -> None:
    assert Watcher().whole(Mesh.single(), []) == {}
