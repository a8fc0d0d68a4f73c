"""A model under a layout with its optimizer: everything a step changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..config import context
from ..config.errors import ConfigError
from ..config.parts import TrainConfig
from ..config.run import RunConfig
from ..layers.moe import MoE
from ..mesh.mesh import Mesh
from ..mesh.run import Run
from ..mesh.text import gather_text
from ..models.builder import build_parts
from ..observe.progress import Progress
from ..schedule.plan import Plan, plan
from ..wrap.buffer import Precision, Shard
from ..wrap.compile import compiled
from ..wrap.data import Call, Stage, Watch
from ..wrap.entries import Entries, collect
from ..wrap.pipeline import Executor
from ..wrap.recompute import SaveList, chosen, recompute
from .balance import expert_layers
from .initial import load_initial
from .optimizer import build_optimizer


@dataclass
class TrainState:
    """What ``train_step`` reads and changes."""

    config: RunConfig
    mesh: Mesh
    run: Run
    pipeline: Plan
    """As the run starts: the schedule auto may change the executor's table."""
    stages: dict[int, Stage]
    executor: Executor
    shards: list[Shard]
    """Rows of every parameter that this rank stores, as the optimizer sees them."""
    optimizer: torch.optim.Optimizer | None
    experts: dict[str, MoE]
    """This rank's expert layers by name."""
    expert_layers: dict[str, int]
    """Experts of every expert layer of the model, by name, in one order on all ranks."""
    shapes: dict[str, tuple[int, ...]]
    """Whole shape of every parameter of the model, by name, in one order on all ranks."""
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


def build_state(config: RunConfig, mesh: Mesh, watch: Watch | None = None,
                progress: Progress | None = None, pipeline: Plan | None = None) -> TrainState:  # fmt: skip
    """Build this rank's parts of the model, give them storage and initial values, and wrap them.

    Args:
        watch: is shown every part's output; see :class:`~fivefold.wrap.data.Stage`.
        progress: where the rank says what it is at.
        pipeline: the plan of ``config``, where it is made already.

    Raises:
        ConfigError: if the model ties parameters of stages that are neither the first nor the last, or the weights to
            start from do not fit it.
    """
    pipeline = pipeline or plan(config)
    run = Run(mesh, context=context.method(config), progress=progress or Progress())
    parts = build_parts(run, config.model, pipeline.names(mesh.pp.rank), config.train.seed,
                        layout_free=config.model.part_costs(config.data.sequence_length) is not None)  # fmt: skip
    shapes, layers, shared = _whole_model(parts, collect(parts, run), mesh)
    entries = collect(parts, run, shared)
    stages = _stages(pipeline, parts, entries, run, config, watch)
    experts = expert_layers(parts)
    shards = [s for stage in stages.values() for s in stage.shards]
    if config.train.init_from:
        load_initial(config.train.init_from, [s.piece for s in shards], experts, shapes, layers)
    return TrainState(config, mesh, run, pipeline, stages, Executor(pipeline.table, stages, run), shards,
                      build_optimizer(shards, config.optim), experts, layers, shapes)  # fmt: skip


def _stages(pipeline: Plan, parts: dict[str, nn.Module], entries: Entries, run: Run, config: RunConfig,
            watch: Watch | None) -> dict[int, Stage]:  # fmt: skip
    """This rank's stages, each around its own of ``parts``."""
    train, mesh = config.train, run.mesh
    calls = _calls(parts, run, config)
    stages: dict[int, Stage] = {}
    for stage in pipeline.stages(mesh.pp.rank):
        names = list(parts) if pipeline.parts is None else pipeline.parts[stage]
        stages[stage] = Stage({name: parts[name] for name in names}, run, zero=config.zero,
                              precision=precision(train, mesh.device), seed=train.seed, small=train.small_buffer,
                              calls=calls, watch=watch, entries=entries, earlier=list(stages.values()))  # fmt: skip
    return stages


def _whole_model(parts: dict[str, nn.Module], entries: Entries,
                 mesh: Mesh) -> tuple[dict[str, tuple[int, ...]], dict[str, int], set[str]]:  # fmt: skip
    """Of all stages: the shape of every parameter, the number of experts of every expert layer, and the names of the
    parameters that two ranks have.

    Raises:
        ConfigError: if parameters are tied that ``mesh.tie`` does not join.
    """
    held = [e for groups in entries.groups.values() for group in groups.values() for e in group]
    own = {"shapes": {e.name: list(e.spec.global_shape) for e in held},
           "experts": {name: moe.config.n_experts for name, moe in expert_layers(parts).items()},
           "tied": sorted({e.name for e in held if e.spec.tied}), "tie": mesh.tie.size}  # fmt: skip
    every = [json.loads(text) for text in gather_text(json.dumps(own), mesh.pp, mesh.device)]
    places = {name: [place for place, one in enumerate(every) if name in one["tied"]]
              for one in every for name in one["tied"]}  # fmt: skip
    shared = {name for name, holders in places.items() if len(holders) > 1}
    for name, holders in places.items():
        if name in shared and any(every[place]["tie"] == 1 for place in holders):
            raise ConfigError([f"the model ties {name} on pp ranks {holders}, of which not all hold the first or the "
                               "last stage. Tie parameters of these two alone, or use pp=1."])  # fmt: skip
    shapes = {name: tuple(shape) for one in every for name, shape in one["shapes"].items()}
    return shapes, {name: n for one in every for name, n in one["experts"].items()}, shared


def _calls(parts: dict[str, nn.Module], run: Run, config: RunConfig) -> dict[str, Call]:
    """How each part is run: compiled, recomputed, or as it is."""
    train = config.train
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
