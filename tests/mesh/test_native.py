"""The branch of the transport that NCCL takes moves the same values as the one for gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fivefold.mesh import transport
from fivefold.mesh.axis import Axis
from fivefold.mesh.pool import Pool
from fivefold.mesh.pool_worker import RankContext

Pools = Callable[[int], Pool]


def moves(axis: Axis) -> Iterator[Tensor]:
    """Results of every call that has two branches."""
    n, x = axis.size, torch.arange(48.0).view(4, 6, 2) + 100 * axis.rank
    for dim in range(2):
        yield transport.all_gather(x, axis, dim=dim).wait()
    for dim, whole in ((0, x.repeat(n, 1, 1)), (1, x.repeat(1, n, 1)), (2, x.repeat(1, 1, n))):
        yield transport.reduce_scatter(whole, axis, dim=dim).wait()
    out = torch.empty(n * 8)
    mine = out[axis.rank * 8 :][:8].fill_(axis.rank + 1.0)  # at its place already
    yield transport.all_gather(mine, axis, out).wait()
    yield transport.reduce_scatter(out * (axis.rank + 1), axis, torch.empty(8)).wait()
    for op in ("sum", "max", "min"):
        yield transport.all_reduce(x.clone(), axis, op).wait()
    yield transport.shift(x, axis, 1).wait()


def both_branches(context: RankContext) -> list[tuple[Tensor, Tensor]]:
    axis = context.mesh(f"fsdp{context.world}").fsdp
    assert not axis.native
    gloo = [x.clone() for x in moves(axis)]
    axis.__dict__["native"] = True  # gloo has the operations too, only slower
    native = list(moves(axis))
    axis.__dict__["native"] = False
    return list(zip(gloo, native, strict=True))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_both_branches_agree(pool: Pools, world: int) -> None:
    for results in pool(world).run(both_branches):
        for gloo, native in results:
            torch.testing.assert_close(gloo, native, rtol=0, atol=0)
