"""``fivefold train``: check everything, then start the ranks."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from .. import recipes
from ..config.dims import ParallelDims
from ..config.errors import ConfigError
from ..config.hardware import gpu_count
from ..config.run import RunConfig
from ..data.check import locate
from ..data.check import problems as data_problems
from ..data.prepare import prepare
from ..data.request import STDLIB_VOCAB_SIZE, Request
from ..data.tokenfile import INDEX
from ..schedule.plan import check_run, warnings
from .common import Ranks, add_recipe, configure, go_on, started_ranks, stop_on, warn

SUMMARY = "train a recipe"
EXAMPLES = (
    "fivefold train moe_demo",
    "fivefold train moe_demo --parallel fsdp2-tp2 --train.steps 200 --optim.lr 1e-3",
    "fivefold train runs/moe_demo-fsdp2-tp2-20250131-120000 --train.seed 1",
    "fivefold train long_demo_2048 --init-from runs/long_demo-fsdp2-20250131-120000",
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\",
    "    -m fivefold train llama3_8b --parallel 'fsdp*-tp8' --run-dir /shared/run",
)
STDLIB, RANDOM = "stdlib", "random"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_recipe(parser)
    parser.add_argument("--parallel", metavar="LAYOUT", help="layout, such as fsdp2-tp2; it says how many ranks start")
    parser.add_argument("--init-from", metavar="PATH", help="run or weights folder to start from: --train.init-from")
    parser.add_argument("--run-dir", metavar="DIR", help="folder of the run (default: runs/RECIPE-LAYOUT-TIME)")


def run(args: argparse.Namespace, given: Mapping[str, str]) -> int:
    """Train; returns when all ranks are done."""
    ranks = started_ranks()
    gpus = gpu_count(os.environ.get("CUDA_VISIBLE_DEVICES"))
    recipe, problems = configure(args, given)
    config = recipe.config
    world, local_world = (ranks.world, ranks.local_world) if ranks else (None, None)
    problems += check_run(config, world=world, gpus=gpus, local_world=local_world)
    problems += _folder_problems(args.run_dir) + _data_problems(config)
    if args.init_from == "":
        problems.append("init_from= is empty. Give --init-from a run's folder, or leave it out to start from the seed.")
    stop_on(problems)
    go_on(ranks)
    config = config.model_copy(update={"parallel": str(ParallelDims.parse(config.parallel, world))})
    warn(warnings(config), ranks)
    if _without_stdlib(config):
        _provide_stdlib(config, ranks)
        stop_on(_data_problems(config))
    cuda = bool(gpus) and config.train.device != "cpu"
    _check_weights(config, cuda=cuda)
    folder = _make_folder(args.run_dir, recipe.name, config.parallel) if ranks is None or ranks.rank == 0 else None
    _start(recipe.name, config, folder, ranks, cuda=cuda)
    return 0


def train_rank(recipe: str, values: str, run_dir: str) -> None:
    """What each rank does: train the configuration ``values`` (JSON) of ``recipe``.

    Args:
        run_dir: folder of the run; empty on a rank that was not told, which takes rank 0's.
    """
    from ..train.main import run as train

    train(recipes.restore(recipe, json.loads(values)).config, recipe, run_dir)


def _check_weights(config: RunConfig, *, cuda: bool) -> None:
    """Import torch, once and not in each forked rank, and with it hold the weights to start from against the model.

    Raises:
        ConfigError: if they do not fit.
    """
    if not cuda:  # before torch is imported, or it does not count
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    from ..train.initial import check_initial

    check_initial(config)


def _start(recipe: str, config: RunConfig, folder: Path | None, ranks: Ranks | None, *, cuda: bool) -> None:
    from .launch import as_rank, launch

    args = (recipe, config.model_dump_json(), str(folder or ""))
    if ranks is None:
        assert folder is not None
        stop_s = math.ceil(config.comm.shutdown_timeout_s)
        launch(train_rank, args, world=config.dims.world, logs=folder / "logs", cuda=cuda, stop_timeout_s=stop_s)
    else:
        as_rank(train_rank, args)


def _folder_problems(run_dir: str | None) -> list[str]:
    if run_dir == "":
        return ["run_dir= is empty. Give --run-dir a folder, or leave it out for a new one."]
    if run_dir is None:
        folder, key = Path("runs"), "run_dir=runs (the default)"
    else:
        folder, key = Path(run_dir), f"run_dir={run_dir}"
    if run_dir is not None and (folder / "config.json").exists():
        return [f"{key} already holds a run (config.json). Use another --run-dir, or leave it out for a new one."]
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not existing.is_dir():
        return [f"{key} lies under a file ({existing}). Use a --run-dir that is a folder or does not exist."]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"{key} cannot be written ({existing} belongs to others). Use a --run-dir that you may write to."]
    return []


def _make_folder(run_dir: str | None, recipe: str, layout: str) -> Path:
    """The run's folder, made; by default a new one named after recipe, layout and time."""
    if run_dir is not None:
        return _made(Path(run_dir), exist_ok=True)
    name = f"{recipe.rpartition(':')[2]}-{layout}-{time.strftime('%Y%m%d-%H%M%S')}"
    for n in range(1, 100):
        folder = Path("runs") / (name if n == 1 else f"{name}-{n}")
        try:
            return _made(folder)
        except FileExistsError:
            continue
    raise ConfigError([f"run_dir=runs/{name} and 98 more exist. Give a --run-dir."])


def _made(folder: Path, exist_ok: bool = False) -> Path:
    """``folder``, made with all above it.

    Raises:
        FileExistsError: if it is there already, unless ``exist_ok``.
        ConfigError: if it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        why = f"{error.strerror} ({error.filename})"
        raise ConfigError([f"run_dir={folder} cannot be made: {why}. Give another --run-dir."]) from None
    return folder


def _without_stdlib(config: RunConfig) -> bool:
    """Whether the run reads the standard library's source code and it is not prepared yet."""
    return any(
        name == STDLIB and not (path / INDEX).is_file() for name, path in zip(config.data.files, locate(config.data))
    )


def _data_problems(config: RunConfig) -> list[str]:
    """What is wrong with the data; that the standard library is not prepared is not: it will be."""
    data, vocab_size = config.data, config.model.vocab_size
    if RANDOM in data.files:
        return []
    found = data_problems(data, vocab_size)
    if _without_stdlib(config):
        alone = data_problems(data.model_copy(update={"files": (STDLIB,), "weights": ()}), vocab_size)
        found = [problem for problem in found if problem not in alone]
        if vocab_size < STDLIB_VOCAB_SIZE:
            found.append(
                f"data.files={STDLIB} has a vocabulary of {STDLIB_VOCAB_SIZE}, more than the model's "
                f"(model.vocab_size={vocab_size}). Set model.vocab_size to at least {STDLIB_VOCAB_SIZE}."
            )
    return found


def _provide_stdlib(config: RunConfig, ranks: Ranks | None) -> None:
    """Prepare the standard library's source code; of several ranks on a host the first does, the others wait.

    Raises:
        ConfigError: if it is not there within ``comm.init_timeout_s``.
    """
    target = Path(config.data.dir) / STDLIB
    if ranks is None or ranks.local_rank == 0:
        prepare(Request(sources=(STDLIB,), out=str(target)))
        return
    deadline = time.monotonic() + config.comm.init_timeout_s
    while not (target / INDEX).is_file():
        if time.monotonic() > deadline:
            limit = f"comm.init_timeout_s={config.comm.init_timeout_s:g} s"
            command = f"`fivefold prepare {STDLIB} --out {target}`"
            raise ConfigError([f"data.files={STDLIB} was not prepared within {limit}. Run {command} first."])
        time.sleep(0.2)
