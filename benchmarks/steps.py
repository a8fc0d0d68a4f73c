"""Training steps of both models under several layouts against the plain loop, all interleaved in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from fivefold.config.dims import ParallelDims
from fivefold.config.run import RunConfig
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool import Pool
from fivefold.mesh.pool_worker import RankContext
from fivefold.mesh.process import keep_freed_memory
from fivefold.train.batch import Batches
from fivefold.train.state import TrainState, build_state
from fivefold.train.step import train_step

from .contest import Contestant, compete, ratio
from .plain import PlainLoop
from .same import assert_same
from .table import Table, seconds
from .work import MODELS, UniformRows

GOALS = {"single": 1.03, "ddp2": 1.15, "fsdp2": 1.35, "tp2": 1.60, "pp2": 1.10, "cp2": 1.60, "ddp2-fsdp2": 1.60,
         "fsdp2-tp2": 2.10, "pp2-fsdp2-tp2": 3.00}  # fmt: skip
"""Layouts, and the ratio of CPU seconds to the plain loop's that they should stay under."""


def build_plain(context: RankContext, model: str, microbatches: int) -> Callable[[], float]:
    """The plain loop."""
    return PlainLoop(model, microbatches).step


def build_ours(context: RankContext, model: str, layout: str) -> Callable[[], None]:
    """Our training step with its data, as the training loop runs it."""
    keep_freed_memory()  # as a rank does when it joins
    state = make_state(configured(model, layout), context.mesh(layout))
    batches = Batches(UniformRows(), state.config, state.mesh)

    def step() -> None:
        train_step(state, batches.batch(batches.rows(state.step + 1))).loss.item()

    return step


def configured(model: str, layout: str) -> RunConfig:
    """The model's run under a layout; a pipeline's microbatches are of one sequence."""
    config, dims = MODELS[model](), ParallelDims.parse(layout)
    parts = config.data.batch_size // dims.data if dims.pp > 1 else 1
    train = config.train.model_copy(update={"microbatches": parts})
    return config.model_copy(update={"parallel": layout, "train": train})


def make_state(config: RunConfig, mesh: Mesh) -> TrainState:
    """A state to train; the benchmark's own configurations are right by construction, so nothing is checked."""
    return build_state(config, mesh)


def check_same(context: RankContext, model: str) -> None:
    """Both sides do the same work: equal loss and gradients from equal weights."""
    assert_same(make_state(MODELS[model](), context.mesh("single")), PlainLoop(model))


def measure(
    models: Sequence[str], layouts: Sequence[str], rounds: int, steps: int, say: Callable[[str], None]
) -> Table:
    """One table: a row for each model and layout. With ``pp2`` comes the plain loop in as many microbatches."""
    accumulated = [configured(models[0], "pp2").train.microbatches] if "pp2" in layouts else []
    worlds = {layout: ParallelDims.parse(layout).world for layout in layouts}
    alone, pools = Pool(1), {n: Pool(n) for n in sorted(set(worlds.values()))}
    table = Table("Training step against the plain loop: CPU seconds summed over ranks, and wall seconds",
                  ("model", "layout", "CPU s", "ratio", "goal", "wall s", "wall ratio"))  # fmt: skip
    try:
        for model in models:
            alone.run(check_same, model)
            plain = Contestant("plain", alone, build_plain, (model, 1))
            others = [Contestant(f"plain, {n} microbatches", alone, build_plain, (model, n)) for n in accumulated]
            others += [Contestant(layout, pools[worlds[layout]], build_ours, (model, layout)) for layout in layouts]
            compete([plain, *others], rounds, steps, lambda text, m=model: say(f"{m}: {text}"))
            table.add(model, plain.name, seconds(plain.cpu_s), "", "", seconds(plain.wall_s), "")
            for c in others:
                cpu, wall = ratio(c.cpu_s, plain.cpu_s), ratio(c.wall_s, plain.wall_s)
                goal = f"{GOALS[c.name]:.2f}" if c.name in GOALS else ""
                table.add(model, c.name, seconds(c.cpu_s), str(cpu), goal, seconds(c.wall_s), str(wall),
                          data={"cpu_ratio": asdict(cpu), "wall_ratio": asdict(wall), "rounds": rounds})  # fmt: skip
    finally:
        for pool in (alone, *pools.values()):
            pool.close()
    return table
