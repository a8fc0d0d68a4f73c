"""What stands for gloo's own collectives (``fivefold/mesh/gloo.py``) against them, one call at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.mesh import transport
from fivefold.mesh.axis import Axis
from fivefold.mesh.pool import Pool
from fivefold.mesh.pool_worker import RankContext

from .contest import Contestant, compete, ratio
from .table import Table

CASES = (
    ("all-gather", 1 << 22),
    ("all-gather", 1 << 12),
    ("reduce-scatter", 1 << 22),
    ("all-reduce", 1 << 10),
    ("shift", 1 << 10),
)
"""Operations, and float32 elements of the whole tensor."""


def build(context: RankContext, op: str, numel: int, ours: bool) -> Callable[[], object]:
    """One call of ``op`` on all ranks."""
    axis = context.mesh(f"fsdp{context.world}").fsdp
    whole, shard = torch.ones(numel), torch.ones(numel // axis.size)
    group = axis.group
    calls: dict[tuple[str, bool], Callable[[], object]] = {
        ("all-gather", True): lambda: transport.all_gather(shard, axis).wait(),
        ("all-gather", False): lambda: dist.all_gather_single(torch.empty(numel), shard, group=group),
        ("reduce-scatter", True): lambda: transport.reduce_scatter(whole, axis).wait(),
        ("reduce-scatter", False): lambda: dist.reduce_scatter_single(torch.empty_like(shard), whole, group=group),
        ("all-reduce", True): lambda: transport.all_reduce(whole, axis, "max").wait(),
        ("all-reduce", False): lambda: dist.all_reduce(whole, dist.ReduceOp.MAX, group=group),
        ("shift", True): lambda: transport.shift(whole, axis).wait(),
        ("shift", False): lambda: _send_and_receive(whole, axis),
    }
    return calls[op, ours]


def _send_and_receive(x: Tensor, axis: Axis) -> None:
    to, source = (axis.ranks[(axis.rank + by) % axis.size] for by in (1, -1))
    ops = [dist.P2POp(dist.isend, x, to, axis.group), dist.P2POp(dist.irecv, torch.empty_like(x), source, axis.group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def measure(worlds: list[int], rounds: int, say: Callable[[str], None]) -> Table:
    """A row for each operation, size and number of ranks."""
    columns = ("operation", "whole tensor", "ranks", "gloo's CPU ms", "ours", "CPU ratio", "wall ratio")
    table = Table("One collective on gloo: CPU milliseconds summed over ranks", columns)
    for world in worlds:
        with Pool(world) as pool:
            for op, numel in CASES:
                theirs, ours = (Contestant(op, pool, build, (op, numel, kind)) for kind in (False, True))
                calls = 5 if numel > 1 << 20 else 50
                compete([theirs, ours], rounds, calls, lambda text, o=op: say(f"{o}: {text}"))
                cpu, wall = ratio(ours.cpu_s, theirs.cpu_s), ratio(ours.wall_s, theirs.wall_s)
                times = [f"{sorted(c.cpu_s)[len(c.cpu_s) // 2] * 1e3:.2f}" for c in (theirs, ours)]
                table.add(op, f"{numel * 4 >> 10:,} KiB", str(world), *times, str(cpu), str(wall),
                          data={"cpu_ratio": asdict(cpu), "wall_ratio": asdict(wall), "rounds": rounds})  # fmt: skip
    return table
