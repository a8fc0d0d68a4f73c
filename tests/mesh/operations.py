"""Every collective beside the same map on all ranks' tensors at once, written as plain tensor algebra in one process.

Values are whole numbers in float64, so that sums are exact in any order and results can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fivefold.mesh import collectives
from fivefold.mesh.axis import Axis


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One call of a collective, its emulation, and what it has to move."""

    call: Callable[[Tensor, Axis], Tensor]
    emulate: Callable[[list[Tensor]], list[Tensor]]
    """Inputs by rank to outputs by rank."""
    shapes: list[tuple[int, ...]]
    """Of the input, by rank."""
    before: str
    """State of the input: R, I, S or P."""
    after: str
    """State of the output."""
    moved: Sequence[tuple[str, Sequence[tuple[float, float]]]]
    """Events in order, forward then backward: op, and (sent, received) elements by rank."""

    def inputs(self, seed: int = 0) -> list[Tensor]:
        """Inputs by rank; equal ones where the state says so."""
        generator = torch.Generator().manual_seed(seed)
        values = [torch.randint(-99, 99, s, generator=generator).double() for s in self.shapes]
        return [values[0].clone() for _ in values] if self.before in "RI" else values

    def cotangents(self, outputs: list[Tensor], seed: int = 1) -> list[Tensor]:
        """Gradients of the outputs by rank: one for all where the output is I, each its own otherwise."""
        generator = torch.Generator().manual_seed(seed)
        values = [torch.randint(-99, 99, y.shape, generator=generator).double() for y in outputs]
        return [values[0].clone() for _ in values] if self.after == "I" else values

    def expected(self) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and input gradients by rank, from the states' meaning.

        An output in state I is used once, however many ranks hold it. An input in state I is one variable; one in state
        R is a variable of each rank, whose gradient is that rank's part.
        """
        leaves = [x.requires_grad_() for x in self.inputs()]
        outputs = self.emulate([leaves[0]] * len(leaves) if self.before == "I" else leaves)
        used = list(zip(outputs, self.cotangents(outputs)))
        loss = sum((y * c).sum() for y, c in (used[:1] if self.after == "I" else used))
        assert isinstance(loss, Tensor)
        loss.backward()
        gradients = [x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves]
        if self.before == "I":
            gradients = [gradients[0]] * len(leaves)
        return [y.detach() for y in outputs], gradients


def _total(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


def _even(n: int, dim: int) -> dict[str, Operation]:
    """Operations that cut ``dim`` into equal slices."""
    local, whole = [2, 3, 4], [2, 3, 4]
    whole[dim] *= n
    size = 24
    slices, wholes = [tuple(local)] * n, [tuple(whole)] * n
    shards = [((n - 1) * size, (n - 1) * size)] * n

    def op(name: str, **arguments: Any) -> Callable[[Tensor, Axis], Tensor]:
        return lambda x, axis: getattr(collectives, name)(x, axis, dim, **arguments)

    def chunk(x: Tensor, rank: int) -> Tensor:
        return x.chunk(n, dim)[rank]

    return {
        f"all_gather-R-{dim}": Operation(
            call=op("all_gather"), emulate=lambda xs: [torch.cat(xs, dim)] * n, shapes=slices, before="S", after="R",
            moved=[("all_gather", shards), ("reduce_scatter", shards)]),
        f"all_gather-I-{dim}": Operation(
            call=op("all_gather", to="I"), emulate=lambda xs: [torch.cat(xs, dim)] * n, shapes=slices, before="S",
            after="I", moved=[("all_gather", shards)]),
        f"reduce_scatter-{dim}": Operation(
            call=op("reduce_scatter"), emulate=lambda xs: list(_total(xs).chunk(n, dim)), shapes=wholes, before="P",
            after="S", moved=[("reduce_scatter", shards), ("all_gather", shards)]),
        f"shard-I-{dim}": Operation(
            call=op("shard"), emulate=lambda xs: [chunk(x, i) for i, x in enumerate(xs)], shapes=wholes, before="I",
            after="S", moved=[("all_gather", shards)]),
        f"shard-R-{dim}": Operation(
            call=op("shard", of="R"), emulate=lambda xs: [chunk(x, i) for i, x in enumerate(xs)], shapes=wholes,
            before="R", after="S", moved=[]),
    }  # fmt: skip


def _whole(n: int) -> dict[str, Operation]:
    """Operations on whole tensors."""
    shapes, size = [(2, 5)] * n, 10
    around = 2 * (n - 1) * size / n
    ring = [(around, around)] * n
    root = n - 1
    fan = [((n - 1) * size, 0) if i == root else (0, size) for i in range(n)]
    passed = [(size, size)] * n

    def op(name: str, *arguments: Any, **more: Any) -> Callable[[Tensor, Axis], Tensor]:
        return lambda x, axis: getattr(collectives, name)(x, axis, *arguments, **more)

    operations = {
        "all_reduce-I": Operation(
            call=op("all_reduce"), emulate=lambda xs: [_total(xs)] * n, shapes=shapes, before="P", after="I",
            moved=[("all_reduce", ring)]),
        "all_reduce-R": Operation(
            call=op("all_reduce", to="R"), emulate=lambda xs: [_total(xs)] * n, shapes=shapes, before="P", after="R",
            moved=[("all_reduce", ring)] * 2),
        "replicate": Operation(
            call=op("replicate"), emulate=lambda xs: list(xs), shapes=shapes, before="I", after="R",
            moved=[("all_reduce", ring)]),
        "broadcast-R": Operation(
            call=op("broadcast", root), emulate=lambda xs: [xs[root]] * n, shapes=shapes, before="S", after="R",
            moved=[("broadcast", fan), ("all_reduce", ring)]),
        "broadcast-I": Operation(
            call=op("broadcast", root, to="I"), emulate=lambda xs: [xs[root]] * n, shapes=shapes, before="S", after="I",
            moved=[("broadcast", fan)]),
    }  # fmt: skip
    for by in (1, -1, 2, n):
        operations[f"shift{by:+}"] = Operation(
            call=op("shift", by), emulate=lambda xs, by=by: [xs[(i - by) % n] for i in range(n)], shapes=shapes,
            before="S", after="S", moved=[("shift", passed)] * 2 if by % n else [])  # fmt: skip
    return operations


def _swapped(n: int) -> dict[str, Operation]:
    """Operations that cut one dim and make another whole."""
    found = {}
    for split, join in ((2, 1), (1, 2), (0, 1), (2, 0)):
        local = [2, 3, 4]
        local[split] *= n
        found[f"reshard-{join}-{split}"] = Operation(
            call=lambda x, axis, split=split, join=join: collectives.reshard(x, axis, split, join),
            emulate=lambda xs, split=split, join=join: list(torch.cat(xs, join).chunk(n, split)),
            shapes=[tuple(local)] * n, before="S", after="S",
            moved=[("reshard", [((n - 1) * 24, (n - 1) * 24)] * n)] * 2)  # fmt: skip
    return found


def _uneven(n: int) -> dict[str, Operation]:
    """Operations on slices of any length, some empty."""
    counts = [3, 0, 1, 2][:n]
    total, row = sum(counts), 4
    whole_to_slices = [((total - counts[i]) * row, (n - 1) * counts[i] * row) for i in range(n)]
    slices_to_whole = [(b, a) for a, b in whole_to_slices]
    send = [[(2 * i + 3 * j) % 4 for j in range(n)] for i in range(n)]  # zeros among them
    send[0] = [0] * n  # a rank with nothing to send
    receive = [[send[i][j] for i in range(n)] for j in range(n)]
    out = [(sum(send[i]) - send[i][i], sum(receive[i]) - receive[i][i]) for i in range(n)]

    def exchange(xs: list[Tensor]) -> list[Tensor]:
        parts = [x.split(send[i]) for i, x in enumerate(xs)]
        return [torch.cat([parts[i][j] for i in range(n)]) for j in range(n)]

    return {
        "all_to_all": Operation(
            call=lambda x, axis: collectives.all_to_all(x, axis, send[axis.rank], receive[axis.rank]),
            emulate=exchange, shapes=[(sum(send[i]), row) for i in range(n)], before="S", after="S",
            moved=[("all_to_all", [(a * row, b * row) for a, b in out]),
                   ("all_to_all", [(b * row, a * row) for a, b in out])]),
        "all_gather_uneven": Operation(
            call=lambda x, axis: collectives.all_gather_uneven(x, axis, counts),
            emulate=lambda xs: [torch.cat(xs)] * n, shapes=[(c, row) for c in counts], before="S", after="R",
            moved=[("all_gather_uneven", slices_to_whole), ("reduce_scatter_uneven", whole_to_slices)]),
        "reduce_scatter_uneven": Operation(
            call=lambda x, axis: collectives.reduce_scatter_uneven(x, axis, counts),
            emulate=lambda xs: list(_total(xs).split(counts)), shapes=[(total, row)] * n, before="P", after="S",
            moved=[("reduce_scatter_uneven", whole_to_slices), ("all_gather_uneven", slices_to_whole)]),
        "all_gather_uneven-none": Operation(
            call=lambda x, axis: collectives.all_gather_uneven(x, axis, [0] * n),
            emulate=lambda xs: [torch.cat(xs)] * n, shapes=[(0, row)] * n, before="S", after="R",
            moved=[("all_gather_uneven", [(0, 0)] * n), ("reduce_scatter_uneven", [(0, 0)] * n)]),
    }  # fmt: skip


def operations(n: int) -> dict[str, Operation]:
    """All of them on ``n`` ranks, by name."""
    return {**_even(n, 0), **_even(n, 1), **_even(n, 2), **_swapped(n), **_whole(n), **_uneven(n)}
