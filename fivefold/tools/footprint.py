"""What each rank stores under a layout, from the shapes alone: no memory is taken and no process started."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from ..config.run import RunConfig
from ..mesh.mesh import Mesh
from ..mesh.run import Run
from ..models.builder import build_parts
from ..schedule.plan import Plan, plan
from ..train.state import precision
from ..wrap.arrange import arrange
from ..wrap.buffer import sizes_of
from ..wrap.entries import collect


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one rank; all ranks of one place on ``pp`` store equally much."""

    place: int
    """Place on ``pp``."""
    stages: tuple[int, ...]
    """Its pipeline stages."""
    ranks: int
    """Ranks like this one."""
    n_parts: int
    """The model's parts in its stages."""
    stored_bytes: int
    """Parameters in the master dtype, this rank's share."""
    gathered_bytes: int
    """Whole parameters in the compute dtype at the fullest moment: all of them, or under ZeRO 3 two units."""
    gradient_bytes: int
    """Summed gradients of the share; under ZeRO 1 also the whole flat gradient that microbatches add to."""
    optimizer_bytes: int
    """Adam's two moments of the share."""
    padding_bytes: int
    """Of ``stored_bytes``, what belongs to no parameter."""


def footprint(config: RunConfig) -> list[Footprint]:
    """One record for each place on ``pp`` of ``config.parallel``.

    Raises:
        ConfigError: if the model cannot be cut into the stages that the configuration asks for.
    """
    made = plan(config)
    return [_place(config, made, place) for place in range(config.dims.pp)]


def _place(config: RunConfig, made: Plan, place: int) -> Footprint:
    dims = config.dims
    ranks = dims.world // dims.pp
    run = Run(Mesh(dims, place * ranks, device="meta", connect=False, ends=(made.owners[0], made.owners[-1])))
    device = torch.device("cuda" if config.train.device == "cuda" else "cpu")
    dtypes = precision(config.train, device)
    stored = gathered = padding = flat = 0
    units: list[int] = []
    parts = build_parts(run, config.model, made.names(place))
    for groups in collect(parts, run).groups.values():
        unit = 0
        for (axis, _, trainable, own), entries in groups.items():
            arranged = arrange(sizes_of(entries), axis.size)
            compute = own or dtypes.compute
            stored += arranged.shard
            padding += arranged.padding // axis.size
            flat += arranged.shard * axis.size if trainable and axis.size > 1 else 0
            if axis.size > 1 or compute != dtypes.master:
                unit += arranged.shard * axis.size * compute.itemsize
        units.append(unit)
        gathered += unit
    if config.zero == 3:  # one in use and the next on its way
        gathered = max((a + b for a, b in pairwise([*units, 0])), default=0)
    master = dtypes.master.itemsize
    return Footprint(
        place=place,
        stages=made.stages(place),
        ranks=ranks,
        n_parts=len(parts),
        stored_bytes=stored * master,
        gathered_bytes=gathered,
        gradient_bytes=(stored + (flat if config.zero == 1 else 0)) * master,
        optimizer_bytes=2 * stored * master,
        padding_bytes=padding * master,
    )
