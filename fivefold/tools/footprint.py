"""What each rank stores under a layout, from the shapes alone: no memory is taken and no process started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ..config.dims import ParallelDims
from ..config.run import RunConfig
from ..mesh.mesh import Mesh
from ..mesh.run import Run
from ..models.builder import build_parts
from ..train.state import precision
from ..wrap.arrange import arrange
from ..wrap.buffer import sizes_of
from ..wrap.data import group_entries


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one rank; all ranks of a pipeline stage store equally much."""

    stage: int
    """Place on ``pp``."""
    ranks: int
    """Ranks like this one."""
    n_parts: int
    stored_bytes: int
    """Parameters in the master dtype, this rank's share."""
    gathered_bytes: int
    """Whole parameters in the compute dtype at the fullest moment: all of the stage, or under ZeRO 3 two units."""
    gradient_bytes: int
    """Summed gradients of the share; under ZeRO 1 also the whole flat gradient that microbatches add to."""
    optimizer_bytes: int
    """Adam's two moments of the share."""
    padding_bytes: int
    """Of ``stored_bytes``, what belongs to no parameter."""


def stages_of(names: Sequence[str], pp: int) -> list[Sequence[str]]:
    """The parts of each stage: in order, as equal in number as can be."""
    cut = [round(len(names) * i / pp) for i in range(pp + 1)]
    return [names[a:b] for a, b in pairwise(cut)]


def footprint(config: RunConfig) -> list[Footprint]:
    """One record for each pipeline stage of ``config.parallel``."""
    dims = config.dims
    names = list(build_parts(Run(Mesh(dims, device="meta", connect=False)), config.model))
    return [_stage(config, dims, i, parts) for i, parts in enumerate(stages_of(names, dims.pp))]


def _stage(config: RunConfig, dims: ParallelDims, stage: int, names: Sequence[str]) -> Footprint:
    ranks = dims.world // dims.pp
    mesh = Mesh(dims, stage * ranks, device="meta", connect=False)
    run = Run(mesh)
    device = torch.device("cuda" if config.train.device == "cuda" else "cpu")
    dtypes = precision(config.train, device)
    stored = gathered = padding = flat = 0
    units: list[int] = []
    for name, part in build_parts(run, config.model, names).items():
        unit = 0
        for (axis, _, trainable, own), entries in group_entries(name, part, run).items():
            plan = arrange(sizes_of(entries), axis.size)
            compute = own or dtypes.compute
            stored += plan.shard
            padding += plan.padding // axis.size
            flat += plan.shard * axis.size if trainable and axis.size > 1 else 0
            if axis.size > 1 or compute != dtypes.master:
                unit += plan.shard * axis.size * compute.itemsize
        units.append(unit)
        gathered += unit
    if config.train.zero == 3:  # one in use and the next on its way
        gathered = max((a + b for a, b in pairwise([*units, 0])), default=0)
    master = dtypes.master.itemsize
    return Footprint(
        stage=stage,
        ranks=ranks,
        n_parts=len(names),
        stored_bytes=stored * master,
        gathered_bytes=gathered,
        gradient_bytes=(stored + (flat if config.train.zero == 1 else 0)) * master,
        optimizer_bytes=2 * stored * master,
        padding_bytes=padding * master,
    )
