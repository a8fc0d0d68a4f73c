"""Pipelines against one rank: layouts, schedules and microbatches with every other option, on 24 short rows.

``full`` has every layout under every schedule with every number of microbatches that divides a data rank's rows: 420
rows. Their other options rotate, so that every schedule also meets every combination of ZeRO stage, model, recompute
and tied or untied embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from fivefold.config.dims import ParallelDims
from fivefold.schedule.named import NAMES

from .grid import FROZEN, Row, pairwise, row

LAYOUTS = ("pp2", "pp4", "pp2-fsdp2", "pp2-tp2", "pp2-ddp2-tp2", "pp2-fsdp2-tp2")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "schedule": NAMES,
    "microbatches": (1, 2, 3, 4, 6, 12, 8, 24),
    "zero": (1, 2, 3),
    "model": ("moe", "moe_q", "dense"),
    "recompute": ("none", "full"),
    "tied": (False, True),
}
ROWS_OF_ALL = 24


def legal(choice: Mapping[str, Any]) -> bool:
    """Whether the microbatches divide a data rank's rows, as far as both are chosen."""
    data = ParallelDims.parse(choice.get("layout", "pp2")).data
    return ROWS_OF_ALL // data % choice.get("microbatches", 1) == 0


def full() -> Iterator[Row]:
    """Every layout, schedule and number of microbatches, the other options rotating."""
    rest = list(product(*(OPTIONS[name] for name in ("zero", "model", "recompute", "tied"))))
    for s, schedule in enumerate(NAMES):
        shapes = [{"layout": layout, "microbatches": m} for layout in LAYOUTS for m in OPTIONS["microbatches"]]
        for i, shape in enumerate(filter(legal, shapes)):  # 7 and 36 have no common factor: all of rest come
            zero, model, recompute, tied = rest[(7 * i + 5 * s) % len(rest)]
            yield Row(schedule=schedule, zero=zero, model=model, recompute=recompute, tied=tied, **shape)


def cover() -> list[Row]:
    """Rows in which every two option values that can meet do."""
    return [Row(**choice) for choice in pairwise(OPTIONS, legal)]


OWN = Path(__file__).with_name("own_table.py")
NO_DENSE: dict[str, Any] = {"model__moe__n_dense_layers": 0}

EXTRAS: tuple[Row, ...] = (
    # one rank holds all stages, or every part is a stage
    row("single", "moe_q", 3, 6, "full", "interleaved_split", pipeline__chunks=3),
    row("single", "dense", 2, 8, "none", "zb_v", True),
    row("fsdp2", "moe", 3, 4, "none", "looped_bfs", pipeline__chunks=7),
    row("tp2", "dense", 1, 2, "full", "dualpipe_v", True),
    # stages that are given, uneven, or do not divide
    row("pp2", "moe", 1, 4, "none", "1f1b", pipeline__stages=(1, 6)),
    row("pp2-fsdp2", "dense", 3, 3, "full", "zb_h1", True, pipeline__stages=(6, 1)),
    row("pp4", "moe_q", 2, 6, "none", "interleaved", pipeline__stages=(1, 1, 1, 1, 1, 1, 1, 2)),
    row("pp3", "moe", 1, 6, "none", "1f1b"),
    row("pp3", "dense", 3, 4, "full", "zb_v", True),
    row("pp3", "moe_q", 2, 8, "full", "interleaved_split", True),
    row("pp3", "moe", 1, 3, "none", "zb_h2", True),
    # frozen parameters, some of them all that a stage has
    row("pp2", "moe", 1, 4, "none", "zb_h1", pipeline__stages=(2, 5), **FROZEN),
    row("pp2-fsdp2", "moe", 3, 3, "full", "zb_v", **FROZEN),
    row("pp4", "moe", 2, 4, "none", "dualpipe_v", **FROZEN),
    row("pp2-fsdp2", "moe", 2, 2, "none", "1f1b", train__small_buffer=300, pipeline__stages=(1, 6), **FROZEN),
    # a user's own modules
    row("pp2", "plain", 1, 4, "none", "1f1b"),
    row("pp4", "plain", 3, 3, "full", "zb_h2"),
    row("pp2-fsdp2", "plain", 3, 2, "none", "interleaved_split"),
    row("pp2-tp2", "between", 2, 3, "full", "zb_v"),
    # what every stage adds to the loss and counts
    row("pp4", "moe", 1, 4, "none", "zb_h1", model__moe__n_dense_layers=4),  # one layer of experts
    row("pp4", "moe_q", 3, 2, "full", "gpipe", model__moe__balance_loss=0.5, model__moe__z_loss=0.1, **NO_DENSE),
    row("pp2-tp2", "moe", 2, 3, "none", "zb_v", model__moe__bias_off_layers=(1, 4), model__moe__balance_loss=0.5),
    # how a rank runs its own work
    row("pp2", "moe", 1, 4, "ops", "zb_v"),
    row("pp2-fsdp2", "moe_q", 3, 3, "every-2", "zb_v", True),
    row("pp2-tp2", "dense", 2, 3, "ops", "zb_h1"),
    row("pp2", "dense", 1, 2, "none", "zb_h1", train__compile="aot_eager", model__n_layers=2),
    # where parameters are stored
    row("pp2-fsdp2", "moe", 3, 3, "none", "1f1b", train__small_buffer=300),
    row("pp2-fsdp2", "moe_q", 2, 4, "full", "zb_v", True, train__small_buffer=300),
    row("pp2-tp2", "moe", 1, 4, "none", "dualpipe_v", train__small_buffer=65536),
    # tied: on two ranks, and on one, with every way to store them
    row("pp2-fsdp2", "dense", 1, 2, "none", "zb_h1", True),
    row("pp2-fsdp2", "dense", 2, 3, "none", "interleaved", True),
    row("pp2-fsdp2", "dense", 3, 3, "none", "1f1b", True),
    row("pp2-tp2", "dense", 2, 4, "none", "looped_bfs", True),
    row("pp2-tp2", "dense", 3, 3, "none", "zb_v", True, train__small_buffer=300),
    row("pp4", "dense", 3, 3, "none", "dualpipe_v", True),
    row("pp2-ddp2-tp2", "dense", 3, 2, "none", "zb_h2", True),
    # tables of one's own, and those that auto finds
    row("pp2-fsdp2", "moe", 3, 3, "full", f"{OWN}:upside_down", True),
    row("pp4", "moe_q", 1, 4, "none", f"{OWN}:upside_down"),
    row("pp2", "dense", 2, 6, "none", f"{OWN}:weights_last", True, pipeline__chunks=3),
    row("pp2-fsdp2", "moe", 3, 6, "none", "auto", pipeline__chunks=2),
    row("pp4", "dense", 1, 8, "full", "auto", True, pipeline__memory_limit=3.0),
)  # fmt: skip
"""What the grid leaves out, each in the smallest layouts where it can go wrong."""
