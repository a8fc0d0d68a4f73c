"""A model under a layout with its optimizer: everything a step changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..config.parts import TrainConfig
from ..config.run import RunConfig
from ..layers.moe import MoE
from ..mesh.mesh import Mesh
from ..mesh.parameter import spec_of
from ..mesh.run import Run
from ..models.builder import build_parts
from ..schedule.table import accumulate
from ..wrap.buffer import Precision, Shard
from ..wrap.compile import compiled
from ..wrap.data import Call, Stage, Watch
from ..wrap.pipeline import Executor
from ..wrap.recompute import SaveList, chosen, recompute
from .optimizer import build_optimizer


@dataclass
class TrainState:
    """What ``train_step`` reads and changes."""

    config: RunConfig
    mesh: Mesh
    run: Run
    stages: dict[int, Stage]
    executor: Executor
    shards: list[Shard]
    """Rows of every parameter that this rank stores, as the optimizer sees them."""
    optimizer: torch.optim.Optimizer | None
    experts: dict[str, MoE]
    """This rank's expert layers by name."""
    shapes: dict[str, tuple[int, ...]]
    """Whole shape of every parameter, by name."""
    step: int = 0
    """Optimizer steps done."""
    targets: int = 0
    """Target tokens trained on, over all ranks."""


def precision(train: TrainConfig, device: torch.device) -> Precision:
    """The dtypes of a run, with ``auto`` resolved."""
    compute = train.dtype
    if compute == "auto":
        compute = "bfloat16" if device.type == "cuda" else "float32"
    master = train.master_dtype
    if master == "auto":
        master = "float64" if compute == "float64" else "float32"
    reduce = master if train.reduce_dtype == "auto" else train.reduce_dtype
    return Precision(master=getattr(torch, master), compute=getattr(torch, compute), reduce=getattr(torch, reduce))


def build_state(config: RunConfig, mesh: Mesh, watch: Watch | None = None) -> TrainState:
    """Build this rank's parts of the model, give them storage and initial values, and wrap them.

    Args:
        watch: is shown every part's output; see :class:`~fivefold.wrap.data.Stage`.
    """
    run = Run(mesh)
    dtypes = precision(config.train, mesh.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)  # plain modules draw their own first values: the same on every rank
        parts = build_parts(run, config.model)
    named = [(f"{part}.{name}", p) for part, module in parts.items() for name, p in module.named_parameters()]
    shapes = {name: spec_of(p).global_shape for name, p in named}
    stage = Stage(parts, run, zero=config.train.zero, precision=dtypes, seed=config.train.seed,
                  small=config.train.small_buffer, calls=_calls(parts, run, config.train), watch=watch)  # fmt: skip
    stages = {0: stage}
    experts = {f"{part}.{name}".rstrip("."): m for part, module in parts.items()
               for name, m in module.named_modules() if isinstance(m, MoE)}  # fmt: skip
    shards = [s for stage in stages.values() for s in stage.shards]
    return TrainState(config, mesh, run, stages, Executor(accumulate(config.train.microbatches), stages, run), shards,
                      build_optimizer(shards, config.optim), experts, shapes)  # fmt: skip


def _calls(parts: dict[str, nn.Module], run: Run, train: TrainConfig) -> dict[str, Call]:
    """How each part is run: compiled, recomputed, or as it is."""
    calls: dict[str, Call] = {}
    policy = SaveList if train.recompute == "ops" else None
    blocks = [name for name in parts if getattr(parts[name], "recomputes", True)]
    for name, part in parts.items():
        call: Callable[..., Any] = compiled(part, train.compile)
        if name in blocks and chosen(train.recompute, blocks.index(name)):
            call = partial(_recomputed, call, run, policy)
        calls[name] = call
    return calls


def _recomputed(call: Callable[..., Any], run: Run, policy: Callable[[], Any] | None, x: Any, microbatch: Any) -> Any:
    return recompute(call, run, x, microbatch, policy=policy) if torch.is_grad_enabled() else call(x, microbatch)
