"""Our data engine against torch's ``fully_shard``: the same plain blocks, the same tokens, on gloo.

Measured is what an engine does: forward, backward, and gradients summed and in the optimizer's hands; parameters are
freed after each use and gathered again. There is no optimizer step. Gradients are compared before anything is timed.

Letters: D width, F hidden width, L blocks, N tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from fivefold.mesh.collectives import gather_values
from fivefold.mesh.pool import Pool
from fivefold.mesh.pool_worker import RankContext
from fivefold.mesh.run import Run
from fivefold.tools.compare import relative_error
from fivefold.wrap.data import Stage

from .contest import Contestant, compete, ratio
from .table import Table, seconds

TOLERANCE = 1e-6
GOALS = {"CPU s": "1", "wall s": "0.71"}
"""Ours over torch's: never slower, 1.4 times less wall time."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A stack of feed-forward blocks and the tokens it sees."""

    width: int
    hidden: int
    blocks: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.blocks} x {2 * self.width * self.hidden / 1e6:.2f} M"


SHAPES = {
    "small": Shape(width=128, hidden=512, blocks=16, tokens=128),
    "large": Shape(width=1024, hidden=4096, blocks=4, tokens=128),
}


class FeedForward(nn.Module):
    """``x + down(gelu(up(x)))``: a block with nothing of ours in it. ``microbatch`` is not used."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, microbatch: Any = None) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def _blocks(shape: Shape) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([FeedForward(shape) for _ in range(shape.blocks)])


def _tokens(shape: Shape, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(shape.tokens, shape.width, generator=generator)


def build_ours(context: RankContext, size: str) -> Callable[[], None]:
    """The blocks as parts of a stage, each a unit of its own."""
    return _ours(context, size)[1]


def _ours(context: RankContext, size: str) -> tuple[Stage, Callable[[], None]]:
    shape = SHAPES[size]
    parts = {str(i): block for i, block in enumerate(_blocks(shape))}
    stage = Stage(parts, Run(context.mesh(f"fsdp{context.world}")), zero=3)
    x = _tokens(shape, context.rank)

    def step() -> None:
        stage.begin()
        loss = stage.forward(x, None).square().sum()
        stage.backward(get_gradient_edge(loss), torch.ones_like(loss), last=True)
        stage.finish()

    return stage, step


def build_torch(context: RankContext, size: str) -> Callable[[], None]:
    """The blocks under ``fully_shard``, each a unit of its own, gradients summed and not averaged."""
    return _torch(context, size)[1]


def _torch(context: RankContext, size: str) -> tuple[nn.Module, Callable[[], None]]:
    shape = SHAPES[size]
    if "device mesh" not in context.cache:
        context.cache["device mesh"] = init_device_mesh("cpu", (context.world,))
    mesh = context.cache["device mesh"]
    model = nn.Sequential(*_blocks(shape))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # no pass over the gradients to average them
            module.set_force_sum_reduction_for_comms(True)
    x = _tokens(shape, context.rank)

    def step() -> None:
        model.zero_grad()
        model(x).square().sum().backward()

    return model, step


def check_gradients(context: RankContext, size: str) -> float:
    """The largest relative difference between the two engines' gradients, whole parameters compared.

    Raises:
        AssertionError: if it is above ``TOLERANCE``, or if the two do not have the same parameters.
    """
    stage, ours = _ours(context, size)
    model, theirs = _torch(context, size)
    ours()
    theirs()
    axis = context.mesh(f"fsdp{context.world}").fsdp
    expected = dict(model.named_parameters())
    worst = 0.0
    whole = {name: torch.zeros(p.shape) for name, p in expected.items()}
    for shard in stage.shards:
        name, grad = shard.piece.name, shard.value.grad
        assert grad is not None
        whole[name].view(-1)[shard.piece.start : shard.piece.stop] = grad
    for name, p in expected.items():
        got = gather_values(whole[name], axis).sum(0)  # each row has one owner
        assert isinstance(p.grad, DTensor)
        worst = max(worst, relative_error(got, p.grad.full_tensor()))
    assert worst < TOLERANCE, f"gradients differ by {worst:.1e}"
    return worst


def measure(worlds: list[int], sizes: list[str], rounds: int, steps: int, say: Callable[[str], None]) -> Table:
    """A row for each number of ranks and size of layers."""
    table = Table("Data engine against torch's fully_shard on gloo: forward, backward, gradients summed (ZeRO 3)",
                  ("ranks", "layers", "engine", "CPU s", "CPU ratio", "wall s", "wall ratio"))  # fmt: skip
    for world in worlds:
        with Pool(world) as pool:
            for size in sizes:
                pool.run(check_gradients, size)
                theirs = Contestant("fully_shard", pool, build_torch, (size,))
                ours = Contestant("ours", pool, build_ours, (size,))
                compete([theirs, ours], rounds, steps, lambda text, w=world, s=size: say(f"{w} ranks, {s}: {text}"))
                row = (str(world), f"{size}: {SHAPES[size]}")
                table.add(*row, theirs.name, seconds(theirs.cpu_s), "", seconds(theirs.wall_s), "")
                cpu, wall = ratio(ours.cpu_s, theirs.cpu_s), ratio(ours.wall_s, theirs.wall_s)
                table.add(*row, ours.name, seconds(ours.cpu_s), str(cpu), seconds(ours.wall_s), str(wall),
                          data={"cpu_ratio": asdict(cpu), "wall_ratio": asdict(wall), "rounds": rounds})  # fmt: skip
    return table
