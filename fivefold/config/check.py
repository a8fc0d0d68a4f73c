"""Everything about a whole configuration that is known without torch: one message for each rule it breaks."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Final

from . import context, weights
from .dims import AXES, ParallelDims
from .errors import ConfigError, nearest, not_multiple
from .run import RunConfig

BUILT: Final = ("pp", "ddp", "fsdp", "cp", "tp")
"""The axes that this version can run; the others are legal in a layout, and their sizes can be shown."""

RECOMPUTE: Final = re.compile(r"none|full|ops|every-[1-9]\d*")
"""What ``train.recompute`` may be."""


def check(
    config: RunConfig,
    *,
    world: int | None = None,
    gpus: int | None = None,
    local_world: int | None = None,
    run: bool = True,
) -> list[str]:
    """What forbids ``config``, one message each; empty when nothing does.

    Args:
        world: ranks that were started, when something else starts them (``torchrun``).
        gpus: GPUs of this machine, None to leave the device unchecked.
        local_world: ranks of this machine; None for all of the layout.
        run: whether the configuration is to be run here, and not only shown.
    """
    dims, problems = layout(config.parallel, world)
    if run:
        problems += _built(dims)
        problems += _device(config, gpus, local_world or dims.world) if gpus is not None else []
        problems += weights.problems(config.train.init_from)
    problems += batch(config, dims) + context.problems(config, dims)
    problems += config.model.problems(dims, config.data.sequence_length)
    return [*problems, *_schedule(config), *_training(config), *_data(config), *_reports(config, dims)]


def layout(parallel: str, world: int | None = None) -> tuple[ParallelDims, list[str]]:
    """The layout that ``parallel`` names, or one rank where it names none, and what is wrong with it."""
    try:
        return ParallelDims.parse(parallel, world), []
    except ConfigError as error:
        return ParallelDims(), list(error.problems)


def _built(dims: ParallelDims) -> list[str]:
    *some, last = BUILT
    return [
        f"{axis}={dims.size(axis)} is a legal axis that this version cannot run yet (parallel={dims}). "
        f"Use layouts of {', '.join(some)} and {last}."
        for axis in AXES
        if axis not in BUILT and dims.size(axis) > 1
    ]


def _device(config: RunConfig, gpus: int, ranks: int) -> list[str]:
    device = config.train.device
    if device == "cuda" and gpus == 0:
        return [
            "train.device=cuda asks for a GPU, and none was found that the installed PyTorch can use. "
            "Use train.device=cpu or auto, or install a driver and a PyTorch with CUDA."
        ]
    if device != "cpu" and 0 < gpus < ranks:
        return [
            f"train.device={device} needs {ranks} GPUs for parallel={config.parallel}, and this machine has {gpus}. "
            f"Use a layout of {gpus} {'ranks' if gpus > 1 else 'rank'} or fewer, or train.device=cpu."
        ]
    return []


def batch(config: RunConfig, dims: ParallelDims) -> list[str]:
    """Whether every data rank gets as many rows as any other, in equal microbatches."""
    factors = {"ddp": dims.ddp, "fsdp": dims.fsdp, "train.microbatches": config.train.microbatches}
    factors = {name: size for name, size in factors.items() if size > 1}
    return not_multiple("data.batch_size", config.data.batch_size, factors) if factors else []


def _schedule(config: RunConfig) -> list[str]:
    optim, steps = config.optim, config.train.steps
    if optim.warmup_steps > steps:
        return [
            f"optim.warmup_steps={optim.warmup_steps} is longer than the run (train.steps={steps}). "
            f"Use optim.warmup_steps from 0 to {steps}, or more train.steps."
        ]
    if optim.decay_steps is not None and optim.warmup_steps + optim.decay_steps > steps:
        return [
            f"optim.decay_steps={optim.decay_steps} does not fit behind the warm-up "
            f"(optim.warmup_steps={optim.warmup_steps}, train.steps={steps}). "
            f"Use optim.decay_steps from 0 to {steps - optim.warmup_steps}, or none for all steps after the warm-up."
        ]
    return []


def _training(config: RunConfig) -> list[str]:
    train = config.train
    found: list[str] = []
    if not RECOMPUTE.fullmatch(train.recompute):
        close = nearest(train.recompute, ("none", "full", "ops", "every-2"))
        hint = f" Did you mean {close}?" if close else ""
        found.append(
            f"train.recompute={train.recompute} is not one of the choices.{hint} "
            "Use none, full, ops, or every-N with a whole number N from 1, such as every-2."
        )
    if train.eval_every and not train.evaluate:
        found.append(
            f"train.eval_every={train.eval_every} asks for evaluations that train.evaluate=false turns off. "
            "Use train.eval_every=0, or train.evaluate=true."
        )
    return found


def _data(config: RunConfig) -> list[str]:
    files, weights = config.data.files, config.data.weights
    if "random" in files and len(files) > 1:
        return [f"data.files={','.join(files)} mixes random with other sets. Use random alone, or leave it out."]
    if "random" in files and weights:
        shares = ",".join(f"{w:g}" for w in weights)
        return [f"data.weights={shares} has nothing to weigh (data.files=random). Leave it out, or name prepared sets."]
    return []


def _reports(config: RunConfig, dims: ParallelDims) -> list[str]:
    found: list[str] = []
    absent = [rank for rank in config.profile.ranks if rank >= dims.world]
    if config.profile.every and absent:
        found.append(
            f"profile.ranks={','.join(map(str, config.profile.ranks))} names ranks the layout does not have "
            f"(parallel={dims}, {dims.world} ranks). Use ranks from 0 to {dims.world - 1}."
        )
    if config.metrics.wandb and find_spec("wandb") is None:
        found.append(
            f"metrics.wandb={config.metrics.wandb} needs wandb, which is not installed. "
            "Leave it out, or run `pip install 'fivefold[wandb]'`."
        )
    return found
