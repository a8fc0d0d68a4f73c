"""How what one rank holds of a sequence reaches the others, and how its gradient comes back.

An exchange gives every rank's block in some order, its own first, and takes a gradient for each in the same order. A
block is two tensors that differ in their last dim alone; they travel as one.

Letters: n ranks of the axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ...mesh import transport
from ...mesh.axis import Axis
from ...mesh.operators import parse_scope

Block = tuple[Tensor, Tensor]


@runtime_checkable
class Exchange(Protocol):
    """One exchange over one axis; made anew for each call."""

    def blocks(self, own: Block) -> Iterator[tuple[int, Block]]:
        """Each rank's block with its place on the axis, this rank's first."""
        ...

    def give(self, place: int, gradient: Block) -> None:
        """Take this rank's part of the gradient of the block of ``place``."""
        ...

    def returned(self) -> Block:
        """The gradient of this rank's own block, summed over all ranks in the dtype given."""
        ...


class Alone:
    """One rank, which has all there is."""

    def blocks(self, own: Block) -> Iterator[tuple[int, Block]]:
        yield 0, own

    def give(self, place: int, gradient: Block) -> None:
        self._gradient = gradient

    def returned(self) -> Block:
        return self._gradient


class Ring:
    """Blocks go around: while one is used, the next is on its way.

    A gradient follows its block one step behind, each rank adding its part, and is home after the last step. So each
    direction sends n-1 blocks a rank.
    """

    def __init__(self, axis: Axis, scope: str) -> None:
        self._axis, self._scope = axis, parse_scope(scope)
        self._travelling: transport.Handle | None = None

    def blocks(self, own: Block) -> Iterator[tuple[int, Block]]:
        n, widths, packed = self._axis.size, [x.shape[-1] for x in own], torch.cat(own, -1)
        first, second = own
        for step in range(n):
            coming = self._shift(packed) if step < n - 1 else None
            yield (self._axis.rank - step) % n, (first, second)
            if coming is not None:
                packed = coming.wait()
                first, second = packed.split(widths, -1)

    def give(self, place: int, gradient: Block) -> None:
        if place == self._axis.rank:
            self._own = gradient
            return
        packed = torch.cat(gradient, -1)
        if self._travelling is not None:
            packed += self._travelling.wait()
        self._travelling = self._shift(packed)

    def returned(self) -> Block:
        assert self._travelling is not None
        first, second = self._own
        others = self._travelling.wait().split([first.shape[-1], second.shape[-1]], -1)
        return first.add_(others[0]), second.add_(others[1])

    def _shift(self, x: Tensor) -> transport.Handle:
        return transport.shift(x, self._axis, states="S(1)->S(1)", scope=self._scope)


class Gather:
    """Every rank gets all blocks at once; gradients are summed and cut by one reduce-scatter."""

    def __init__(self, axis: Axis, scope: str) -> None:
        self._axis, self._scope = axis, parse_scope(scope)
        self._gradients: list[Tensor | None] = [None] * axis.size

    def blocks(self, own: Block) -> Iterator[tuple[int, Block]]:
        n, rank, self._widths = self._axis.size, self._axis.rank, [x.shape[-1] for x in own]
        whole = transport.all_gather(torch.cat(own, -1), self._axis, states="S(1)->R", scope=self._scope).wait()
        yield rank, own
        for place, block in enumerate(whole.chunk(n)):
            if place != rank:
                first, second = block.split(self._widths, -1)
                yield place, (first, second)

    def give(self, place: int, gradient: Block) -> None:
        self._gradients[place] = torch.cat(gradient, -1)

    def returned(self) -> Block:
        whole = torch.cat([g for g in self._gradients if g is not None])
        own = transport.reduce_scatter(whole, self._axis, states="P->S(1)", scope=self._scope).wait()
        first, second = own.split(self._widths, -1)
        return first.contiguous(), second.contiguous()


EXCHANGES: dict[str, type[Ring | Gather]] = {"ring": Ring, "all_gather": Gather}


def exchange(name: str, axis: Axis, scope: str) -> Exchange:
    """A new exchange over the axis."""
    return EXCHANGES[name](axis, scope) if axis.size > 1 else Alone()
