"""Context parallelism: how even the work is, what each method takes, and where the latent beats the ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from fivefold.config.context import METHODS, costs
from fivefold.config.dims import ParallelDims
from fivefold.config.run import RunConfig
from fivefold.data.placement import PLACEMENTS, keys_seen
from fivefold.data.rows import Rows
from fivefold.layers.context.work import work
from fivefold.layers.microbatch import Holders
from fivefold.mesh.pool import Pool
from fivefold.mesh.pool_worker import RankContext
from fivefold.mesh.process import keep_freed_memory
from fivefold.recipes import load
from fivefold.train.batch import Batches
from fivefold.train.step import train_step

from .contest import Contestant, compete, ratio
from .steps import make_state
from .table import Table, seconds
from .work import IDS, MODELS

GOAL = 1.02
"""Largest work of a rank over the mean."""
MEAN_LENGTH, SPREAD = 400.0, 1.2
"""Documents of packed rows: log-normal, of this median and this standard deviation of the logarithm."""
LONG = 2048
"""Tokens of the one row of the contest of methods."""
METHODS_OF = {"llama": tuple(m for m in METHODS if m != "latent"), "dsv3": METHODS}


# ---- even work -------------------------------------------------------------------------------------------------------


def packed_rows(rows: int, length: int) -> NDArray[np.int32]:
    """Documents of each token ``[rows, length]``."""
    random = np.random.default_rng(0)
    lengths = np.maximum(1, random.lognormal(np.log(MEAN_LENGTH), SPREAD, (rows, length)).astype(int))
    return np.stack([np.repeat(np.arange(length, dtype=np.int32), row)[:length] for row in lengths])


def measure_balance(lengths: Sequence[int], ranks: Sequence[int]) -> Table:
    """Pairs of queries and keys on the busiest rank over the mean: those that count, and those that are computed."""
    table = Table("Attention work of the busiest rank over the mean, 2 rows; in brackets, pairs computed over needed",
                  ("rows", "tokens", "cp", *PLACEMENTS, "goal"))  # fmt: skip
    for length in lengths:
        for name, documents in (("one document", np.zeros((2, length), np.int32)), ("packed", packed_rows(2, length))):
            for n in ranks:
                found = {p: imbalance(documents, n, p) for p in PLACEMENTS}
                cells = [f"{busiest:.3f} ({waste:.3f})" for busiest, waste in found.values()]
                table.add(name, f"{length:,}", str(n), *cells, f"{GOAL:.2f}", data={"work": found})
    return table


def imbalance(documents: NDArray[np.int32], n: int, placement: str) -> tuple[float, float]:
    """The busiest rank's pairs over the mean, and all pairs that ranks compute over those that queries need."""
    columns = PLACEMENTS[placement](documents, n)
    needed = np.take_along_axis(keys_seen(documents)[None], columns, 2).sum((1, 2))
    computed = 0.0
    for rank in range(n):
        _, first, last, q0, q1, k0, k1, kind = work(Holders(columns, documents), rank).T.astype(float)
        area = (q1 - q0) * (k1 - k0)
        triangle = (q1 - q0) * (q1 - q0 + 1) / 2
        computed += ((last - first) * np.where(kind == 1, triangle, area)).sum()
    return float(needed.max() / needed.mean()), float(computed / needed.sum())


# ---- the time of a step ----------------------------------------------------------------------------------------------


class LongRow:
    """One row of random ids, every token a target."""

    def rows(self, step: int, start: int, stop: int) -> Rows:
        """Rows ``[start, stop)`` of a step's batch."""
        ids = np.random.default_rng(step).integers(IDS, size=(1, LONG + 1))
        return Rows(tokens=ids[:, :-1].copy(), targets=ids[:, 1:].copy(), positions=np.arange(LONG)[None],
                    documents=np.zeros((1, LONG), np.int32), single_document=True)  # fmt: skip


def configured(model: str, layout: str, method: str) -> RunConfig:
    """The model's run on one long row."""
    config = MODELS[model]()
    data = config.data.model_copy(update={"batch_size": 1, "sequence_length": LONG})
    context = config.context.model_copy(update={"method": method})
    return config.model_copy(update={"parallel": layout, "data": data, "context": context})


def build_step(context: RankContext, model: str, layout: str, method: str) -> Callable[[], None]:
    """Our training step with its data."""
    keep_freed_memory()
    state = make_state(configured(model, layout, method), context.mesh(layout))
    batches = Batches(LongRow(), state.config, state.mesh)

    def step() -> None:
        train_step(state, batches.batch(batches.rows(state.step + 1))).loss.item()

    return step


def measure_methods(models: Sequence[str], rounds: int, steps: int, say: Callable[[str], None]) -> Table:
    """Every method beside one rank, all interleaved."""
    table = Table(f"A step on one row of {LONG:,} tokens over cp2, against one rank",
                  ("model", "method", "CPU s", "ratio", "wall s", "wall ratio"))  # fmt: skip
    with Pool(1) as alone, Pool(2) as two:
        for model in models:
            one = Contestant("one rank", alone, build_step, (model, "single", "auto"))
            others = [Contestant(m, two, build_step, (model, "cp2", m)) for m in METHODS_OF[model]]
            compete([one, *others], rounds, steps, lambda text, m=model: say(f"{m}: {text}"))
            table.add(model, one.name, seconds(one.cpu_s), "", seconds(one.wall_s), "")
            for c in others:
                cpu, wall = ratio(c.cpu_s, one.cpu_s), ratio(c.wall_s, one.wall_s)
                table.add(model, c.name, seconds(c.cpu_s), str(cpu), seconds(c.wall_s), str(wall),
                          data={"cpu_ratio": asdict(cpu), "wall_ratio": asdict(wall), "rounds": rounds})  # fmt: skip
    return table


# ---- the latent against the ring -------------------------------------------------------------------------------------


def measure_latent(layouts: Sequence[str], lengths: Sequence[int]) -> Table:
    """DeepSeek-V3: bytes, extra operations, and the rate of a link below which the latent is the faster."""
    table = Table("DeepSeek-V3, one attention layer and row on a rank: latent against ring, zigzag, bfloat16",
                  ("layout", "tokens", "ring bytes / latent bytes", "latent extra operations",
                   "latent wins below, at 400 TFLOP/s"))  # fmt: skip
    recipe = load("deepseek_v3").config
    for layout in layouts:
        dims = ParallelDims.parse(layout)
        for length in lengths:
            data = recipe.data.model_copy(update={"sequence_length": length})
            found = costs(recipe.model_copy(update={"parallel": layout, "data": data}), dims)
            ring, latent = found["ring"], found["latent"]
            extra = latent.extra_flops / latent.attention_flops
            computing = (latent.attention_flops + latent.extra_flops) / 400e12
            rate = ring.sent_bytes / computing  # there the ring's messages take as long as the latent's operations
            cells = (
                f"{ring.sent_bytes / latent.sent_bytes:.1f}",
                f"{extra:.1%} of attention's",
                f"{rate / 1e9:,.1f} GB/s",
            )
            table.add(layout, f"{length:,}", *cells, data={"ring": asdict(ring), "latent": asdict(latent)})
    return table


def measure(quick: bool, say: Callable[[str], None]) -> Iterator[Table]:
    """All tables."""
    yield measure_balance([1024] if quick else [4096, 16384], [2] if quick else [2, 4, 8])
    yield measure_latent(["cp8"] if quick else ["cp8", "cp8-tp8"], [4096] if quick else [4096, 32768, 131072])
    yield measure_methods(["llama"] if quick else list(MODELS), 2 if quick else 7, 1, say)
