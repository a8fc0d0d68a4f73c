"""What one run of a few steps did, as whole tensors that do not depend on the layout, and how two such runs differ."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..layers.microbatch import MicroBatch
from ..mesh import transport
from ..mesh.collectives import sum_values
from ..mesh.mesh import Mesh
from ..mesh.text import gather_text
from ..train.state import TrainState, precision
from ..wrap.buffer import Shard


@dataclass(frozen=True)
class Whole:
    """One tensor a parameter, from every rank's rows, and what the gathering proved."""

    tensors: dict[str, Tensor]
    owners: bool
    """Whether every element has exactly one owner in each replica."""
    replicas: bool
    """Whether all owners of an element hold the same bits."""


def gather_whole(state: TrainState, value: Callable[[Shard], Tensor]) -> Whole:
    """Gather ``value`` of every row: the largest, the smallest and the number of owners of each element tell all."""
    mesh, offsets, total = state.mesh, {}, 0
    for name, shape in state.shapes.items():
        offsets[name] = total
        total += math.prod(shape)
    dtype = precision(state.config.train, mesh.device).master
    high = torch.full((total,), -torch.inf, dtype=dtype, device=mesh.device)
    low, owned = -high, torch.zeros(total, dtype=torch.int32, device=mesh.device)
    for s in state.shards:
        at = offsets[s.piece.name] + s.piece.place()
        high[at] = low[at] = value(s).detach()
        owned[at] += s.original
    reduce_everywhere(high, mesh, "max")
    reduce_everywhere(low, mesh, "min")
    reduce_everywhere(owned, mesh, "sum")
    tensors = {n: high[o : o + math.prod(state.shapes[n])].view(state.shapes[n]) for n, o in offsets.items()}
    same = (high == low) | (high.isnan() & low.isnan())
    return Whole(tensors, bool((owned == mesh.ddp.size).all()), bool(same.all()))


def reduce_everywhere(x: Tensor, mesh: Mesh, op: str) -> None:
    """Reduce ``x`` in place over all ranks."""
    if mesh.world.size > 1:
        transport.all_reduce(x, mesh.world, op).wait()


def relative_error(a: Tensor, b: Tensor) -> float:
    """``max|a - b| / max|b|``; where ``b`` is all zero, 0 if ``a`` is exactly zero too, else infinity."""
    difference, size = (a - b).abs().max().item() if a.numel() else 0.0, b.abs().max().item() if b.numel() else 0.0
    if math.isnan(difference) or math.isnan(size):
        return math.inf
    return difference / size if size else math.inf if difference else 0.0


def worst(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[str, float]:
    """The name with the largest relative error, and that error; one that ``a`` lacks is infinitely wrong."""
    errors = {name: relative_error(a[name], x) if name in a else math.inf for name, x in b.items()}
    name = max(errors, key=lambda n: errors[n])
    return name, errors[name]


class Watcher:
    """Keeps each part's output and its gradient, and gives them whole.

    Between parts a tensor is ``[B, t, D]``: rows are cut over ``ddp`` and ``fsdp``, tokens over ``cp`` and ``tp``. The
    last part's is the loss: P over ``ddp``, ``fsdp`` and ``cp``.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], list[Tensor]] = {}

    def __call__(self, name: str, x: Tensor) -> None:
        self._keep(name, "activation", x)
        if x.requires_grad:
            x.register_hook(lambda gradient: self._keep(name, "gradient", gradient))

    def _keep(self, name: str, kind: str, x: Tensor) -> None:
        if x.ndim == 3 or (x.ndim == 0 and kind == "activation"):
            self._seen.setdefault((name, kind), []).append(x.detach())

    def whole(self, mesh: Mesh, microbatches: Sequence[MicroBatch]) -> dict[tuple[str, str], Tensor]:
        """Everything seen on any stage, whole on every rank: forward in order, then backward in the order it ran."""
        columns = [np.concatenate(mb.holders.columns, 1) for mb in microbatches]
        order = torch.from_numpy(np.concatenate(columns or [np.empty((0, 0))]).argsort(1)).to(mesh.device)
        own = {key: self._gathered(key, mesh, order) for key in self._seen}
        keys = [[name, kind, str(x.dtype).removeprefix("torch."), list(x.shape)] for (name, kind), x in own.items()]
        found = {}
        for place, text in enumerate(gather_text(json.dumps(keys), mesh.pp, mesh.device)):
            for name, kind, dtype, shape in json.loads(text):
                x = own.get((name, kind), torch.empty(shape, dtype=getattr(torch, dtype), device=mesh.device))
                if mesh.pp.size > 1:
                    transport.broadcast(x, mesh.pp, place).wait()
                found[name, kind] = x
        return dict(sorted(found.items(), key=lambda item: item[0][1]))

    def _gathered(self, key: tuple[str, str], mesh: Mesh, order: Tensor) -> Tensor:
        """The whole of what is kept under ``key``; ``order`` says where each column of a row is among the ranks'."""
        if self._seen[key][0].ndim == 0:
            return sum_values(torch.stack(self._seen[key]).sum(), mesh.join("ddp", "fsdp", "cp"))
        x = torch.cat(self._seen[key])
        for axis, dim in ((mesh.join("cp", "tp"), 1), (mesh.join("ddp", "fsdp"), 0)):
            if axis.size > 1:
                x = transport.all_gather(x.contiguous(), axis, dim=dim).wait()
            if dim == 1:
                x = x.take_along_dim(order[:, :, None], 1)
        return x.contiguous()
