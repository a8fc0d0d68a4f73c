"""Context parallelism: how even the work is, what methods send, hold and take, and where the latent beats the ring."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from fivefold.config.context import MethodCost, costs
from fivefold.config.counts import part_flops
from fivefold.config.dims import ParallelDims
from fivefold.config.model import DecoderConfig
from fivefold.data.placement import PLACEMENTS, keys_seen
from fivefold.layers.context.work import work
from fivefold.layers.microbatch import Holders
from fivefold.mesh.pool import Pool
from fivefold.mesh.pool_worker import RankContext
from fivefold.mesh.process import keep_freed_memory
from fivefold.recipes import load
from fivefold.train.batch import Batches
from fivefold.train.step import train_step

from .contest import Contestant, compete, ratio
from .context_counted import METHODS_OF, measure_bytes, measure_memory
from .steps import make_state
from .table import Table, seconds
from .work import MODELS, UniformRows, on_one_row

GOAL = 1.02
"""Largest work of a rank over the mean."""
MEDIAN_LENGTH, SPREAD = 400.0, 1.2
"""Documents of packed rows: log-normal, of this median and this standard deviation of the logarithm."""
FLOPS_PER_S = 400e12
"""Speed of a rank where the latent meets the ring."""
LONG = 2048
"""Tokens of the one row of the contest of methods."""


# ---- even work -------------------------------------------------------------------------------------------------------


def packed_rows(rows: int, length: int) -> NDArray[np.int32]:
    """Documents of each token ``[rows, length]``."""
    random = np.random.default_rng(0)
    lengths = np.maximum(1, random.lognormal(np.log(MEDIAN_LENGTH), SPREAD, (rows, length)).astype(int))
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


def build_step(context: RankContext, model: str, layout: str, method: str) -> Callable[[], None]:
    """Our training step with its data."""
    keep_freed_memory()
    state = make_state(on_one_row(model, layout, method, LONG), context.mesh(layout))
    batches = Batches(UniformRows(1, LONG), state.config, state.mesh)

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


def deepseek_v3(layout: str, length: int, link_gb_per_s: float = 1.0) -> tuple[MethodCost, MethodCost, bool]:
    """Costs of ring and latent on rows of ``length`` tokens, and whether over that link the latent is the faster."""
    recipe = load("deepseek_v3").config
    data = recipe.data.model_copy(update={"sequence_length": length})
    found = costs(recipe.model_copy(update={"parallel": layout, "data": data}), ParallelDims.parse(layout))
    ring, latent = (found[name] for name in ("ring", "latent"))
    slower, faster = (cost.seconds(link_gb_per_s * 1e9, FLOPS_PER_S) for cost in (ring, latent))
    return ring, latent, faster < slower


def measure_latent(layouts: Sequence[str], lengths: Sequence[int]) -> Table:
    """DeepSeek-V3: bytes, extra operations, and the rate of a link below which the latent is the faster."""
    table = Table("DeepSeek-V3, one attention layer and row on a rank: latent against ring, zigzag, bfloat16",
                  ("layout", "tokens", "ring MB", "latent MB", "ring / latent", "extra operations, of attention's",
                   "of the layer's", "latent wins below"))  # fmt: skip
    model = load("deepseek_v3").config.model
    assert isinstance(model, DecoderConfig)
    for layout in layouts:
        ranks = ParallelDims.parse(layout).cp * ParallelDims.parse(layout).tp
        for length in lengths:
            ring, latent, _ = deepseek_v3(layout, length)
            layer = part_flops(model, length)[f"layers.{model.n_layers - 1}"] * length / ranks
            computing = (latent.attention_flops + latent.extra_flops) / FLOPS_PER_S
            rate = ring.sent_bytes / computing  # there the ring's messages take as long as the latent's operations
            cells = (f"{ring.sent_bytes / 1e6:,.1f}", f"{latent.sent_bytes / 1e6:,.1f}",
                     f"{ring.sent_bytes / latent.sent_bytes:.1f}", f"{latent.extra_flops / latent.attention_flops:.1%}",
                     f"{latent.extra_flops / layer:.1%}", f"{rate / 1e9:,.1f} GB/s")  # fmt: skip
            table.add(layout, f"{length:,}", *cells, data={"ring": asdict(ring), "latent": asdict(latent)})
    return table


def measure_crossover(layouts: Sequence[str], links_gb_per_s: Sequence[float]) -> Table:
    """DeepSeek-V3: the longest rows on which the latent is the faster, by the rate of the link."""
    title = "DeepSeek-V3: tokens of a row up to which the latent is faster than the ring, by the link's rate"
    table = Table(title, ("layout", *(f"{rate:g} GB/s" for rate in links_gb_per_s)))
    for layout in layouts:
        table.add(layout, *(f"{longest_row_of_latent(layout, rate):,}" for rate in links_gb_per_s))
    return table


def longest_row_of_latent(layout: str, link_gb_per_s: float) -> int:
    """Tokens of the longest row, in steps of 1,024, on which the latent is the faster; 0 if there is none."""
    rows = range(1, 2**14)
    return 1024 * bisect(rows, False, key=lambda n: not deepseek_v3(layout, 1024 * n, link_gb_per_s)[2])


def measure(quick: bool, say: Callable[[str], None]) -> Iterator[Table]:
    """All tables."""
    yield measure_balance([1024] if quick else [4096, 16384], [2] if quick else [2, 4, 8])
    yield measure_bytes(["cp2"] if quick else ["cp2", "cp4", "cp2-tp2"], say)
    models = ["llama"] if quick else list(MODELS)
    yield measure_memory(models, [256] if quick else [1024, 2048, 4096], [1, 2] if quick else [1, 2, 4], say)
    layouts = ["cp8"] if quick else ["cp8", "cp8-tp8"]
    yield measure_latent(layouts, [4096] if quick else [4096, 32768, 131072])
    yield measure_crossover(layouts, [50] if quick else [25, 50, 100, 200, 450])
    yield measure_methods(models, 2 if quick else 7, 1, say)
