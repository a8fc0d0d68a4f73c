"""The ranks of a run, read as a dense mesh ``pp, ddp, fsdp, cp, tp`` and a sparse one ``pp, ddp, efsdp, ep, etp``."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from ..config.dims import DENSE, SPARSE, ParallelDims
from ..observe.recorder import NULL, Recorder
from .axis import Axis

JOINS: tuple[tuple[str, ...], ...] = (
    ("ddp", "fsdp"),
    ("fsdp", "cp"),
    ("cp", "tp"),
    ("fsdp", "cp", "tp"),
    ("ddp", "fsdp", "cp"),
    ("ddp", "fsdp", "cp", "tp"),
    ("pp", "ddp", "fsdp", "cp"),
    ("pp", "fsdp", "cp", "tp"),
    ("pp", "ddp", "fsdp", "cp", "tp"),
)
"""Joined axes that exist. They are declared, because every rank must create every group, in one order."""


def coordinates(dims: ParallelDims, axes: tuple[str, ...], rank: int) -> dict[str, int]:
    """Place of ``rank`` on each of ``axes`` (the dense or the sparse ones), the last varying fastest."""
    place: dict[str, int] = {}
    for axis in reversed(axes):
        rank, place[axis] = divmod(rank, dims.size(axis))
    return place


def members(dims: ParallelDims, axes: tuple[str, ...], names: Iterable[str], rank: int) -> tuple[int, ...]:
    """World ranks that differ from ``rank`` only in ``names``, in order of their place along the join."""
    place, names = coordinates(dims, axes, rank), set(names)
    ranks = [0]
    for axis in axes:
        at = range(dims.size(axis)) if axis in names else (place[axis],)
        ranks = [r * dims.size(axis) + i for r in ranks for i in at]
    return tuple(ranks)


class Groups:
    """The process groups of one rank by their ranks, each created once: axes that run over the same ranks share one.

    Args:
        rank: this process's world rank.
        timeout_s: limit of every collective on the groups, in seconds; None takes torch's default.
    """

    def __init__(self, rank: int, timeout_s: float | None = None) -> None:
        self.rank = rank
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup | None] = {}

    def create(self, ranks: tuple[int, ...], use: str = "") -> None:
        """Create the group of ``ranks`` unless it exists. All ranks of the world must ask, also those outside.

        Args:
            use: names a group of its own for the same ranks.
        """
        if (ranks, use) not in self._groups:
            group = dist.new_group(list(ranks), timeout=self._timeout)
            self._groups[ranks, use] = group if isinstance(group, dist.ProcessGroup) and self.rank in ranks else None

    def get(self, ranks: tuple[int, ...], use: str = "") -> dist.ProcessGroup:
        """The group of ``ranks``, which this rank is in."""
        group = self._groups[ranks, use]
        assert group is not None, f"rank {self.rank} is not in {ranks}"
        return group


class Mesh:
    """The axes of one rank. ``mesh.tp`` and ``mesh.join("cp", "tp")`` are both an :class:`Axis`.

    Every rank builds the same groups in the same order, also those it is not in: torch names a group by how many
    there were before it, so a rank that skips one leaves all others waiting.

    Args:
        dims: sizes of the axes.
        rank: this process's world rank.
        device: where tensors of this rank live.
        recorder: where this mesh's collectives report.
        connect: whether to create process groups; without, the mesh can only plan (shapes, storage, bytes).
        timeout_s: limit of every collective on the new groups, in seconds; None takes torch's default.
        groups: where groups come from and go to, for several meshes of one process to share; None starts afresh.
        ends: places on ``pp`` of the first and of the last stage; None says 0 and the last place.
    """

    def __init__(self, dims: ParallelDims, rank: int = 0, *, device: torch.device | str = "cpu",
                 recorder: Recorder = NULL, connect: bool = True, timeout_s: float | None = None,
                 groups: Groups | None = None, ends: tuple[int, int] | None = None) -> None:  # fmt: skip
        self.dims, self.rank, self.device = dims, rank, torch.device(device)
        connected = (groups or Groups(rank, timeout_s)) if connect and dims.world > 1 else None
        singles = [(a,) for a in (*DENSE, *SPARSE[2:])]
        axes = {names: self._axis(names, recorder, connected) for names in [*singles, *JOINS]}
        axes["pp_back",] = self._back(axes["pp",], connected)
        axes["tie",] = self._tie(ends or (0, dims.pp - 1), recorder, connected)
        self._set(axes, recorder)

    def _set(self, axes: dict[tuple[str, ...], Axis], recorder: Recorder) -> None:
        self._axes, self.recorder = axes, recorder
        self.world = axes["pp", "ddp", "fsdp", "cp", "tp"]
        self.pp, self.ddp, self.fsdp, self.cp, self.tp = (axes[a,] for a in DENSE)
        self.efsdp, self.ep, self.etp = (axes[a,] for a in SPARSE[2:])
        self.pp_back = axes["pp_back",]
        """``pp`` for the gradients that travel back, which must not queue behind activations."""
        self.tie = axes["tie",]
        """The two ranks that hold a parameter which the first and the last stage share; size 1 elsewhere."""

    @classmethod
    def single(cls, device: torch.device | str = "cpu", recorder: Recorder = NULL) -> Mesh:
        """One rank: every axis has size 1, no process group is needed, and every collective disappears."""
        return cls(ParallelDims(), device=device, recorder=recorder, connect=False)

    def recorded(self, recorder: Recorder) -> Mesh:
        """This mesh, on the same groups, reporting to ``recorder``."""
        mesh = copy.copy(self)
        mesh._set({names: replace(axis, recorder=recorder) for names, axis in self._axes.items()}, recorder)
        return mesh

    def join(self, *names: str) -> Axis:
        """The axis that runs over all of ``names`` at once, slowest first.

        Raises:
            KeyError: if the join is not declared in ``JOINS``.
        """
        if len(names) == 1:
            return self._axes[names]
        if names not in self._axes:
            raise KeyError(f"join{names} is not declared. Declared: {', '.join('+'.join(j) for j in JOINS)}.")
        return self._axes[names]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The distinct process groups this rank is in."""
        return list(dict.fromkeys(axis.group for axis in self._axes.values() if axis.group is not None))

    def data_rank(self) -> int:
        """Which share of the batch this rank reads, of ``ddp*fsdp``."""
        return self.join("ddp", "fsdp").rank

    def _axis(self, names: tuple[str, ...], recorder: Recorder, groups: Groups | None) -> Axis:
        axes = DENSE if set(names) <= set(DENSE) else SPARSE
        ranks = members(self.dims, axes, names, self.rank)
        if groups is None or len(ranks) == 1:
            return Axis("+".join(names), len(ranks), ranks.index(self.rank), ranks, None, recorder)
        for first in self._first_ranks(axes, names):
            groups.create(members(self.dims, axes, names, first))
        return Axis("+".join(names), len(ranks), ranks.index(self.rank), ranks, groups.get(ranks), recorder)

    def _back(self, pp: Axis, groups: Groups | None) -> Axis:
        """NCCL keeps what two ranks send each other through one group in one order; gloo tells it apart by tags."""
        if groups is None or pp.size == 1 or not pp.native:
            return replace(pp)
        for first in self._first_ranks(DENSE, ("pp",)):
            groups.create(members(self.dims, DENSE, ("pp",), first), "back")
        return replace(pp, group=groups.get(pp.ranks, "back"))

    def _tie(self, ends: tuple[int, int], recorder: Recorder, groups: Groups | None) -> Axis:
        place = coordinates(self.dims, DENSE, self.rank)["pp"]
        stride = self.dims.world // self.dims.pp
        low, high = sorted(ends)
        pairs = [(low * stride + i, high * stride + i) for i in range(stride)]
        if groups is not None and ends[0] != ends[1]:
            for pair in pairs:
                groups.create(pair)
        if place not in ends or ends[0] == ends[1]:
            return Axis("tie", ranks=(self.rank,), recorder=recorder)
        pair = pairs[self.rank % stride]
        return Axis("tie", 2, pair.index(self.rank), pair, groups and groups.get(pair), recorder)

    def _first_ranks(self, axes: tuple[str, ...], names: tuple[str, ...]) -> list[int]:
        """One rank of every group of this join, ascending."""
        at = [(0,) if a in names else range(self.dims.size(a)) for a in axes]
        strides = [math.prod(self.dims.size(b) for b in axes[i + 1 :]) for i in range(len(axes))]
        ranks = [0]
        for stride, places in zip(strides, at, strict=True):
            ranks = [r + stride * p for r in ranks for p in places]
        return sorted(ranks)
