"""Cut sequences against one rank: layouts with ``cp``, methods, placements, and rows of several documents or of one.

``full`` has every one of these with every other, on the dense model and on that with experts: 294 rows. Their other
options rotate. Rows of a pipeline have 24 sequences of 8 tokens, the others 8 of 16, so that pieces have 2 to 8 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from fivefold.config.context import METHODS, PLACEMENTS
from fivefold.config.dims import ParallelDims

from .grid import FROZEN, Row, pairwise, row

LAYOUTS = ("cp2", "cp4", "fsdp2-cp2", "cp2-tp2", "pp2-cp2", "fsdp2-cp2-tp2", "pp2-cp2-tp2")
SCHEDULES = ("zb_h1", "1f1b", "interleaved_split")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "method": METHODS,
    "model": ("moe", "moe_q", "dense"),
    "schedule": ("", *SCHEDULES),
    "placement": PLACEMENTS,
    "documents": (True, False),
    "zero": (1, 2, 3),
    "microbatches": (1, 2, 4),
    "recompute": ("none", "full"),
}


def legal(choice: Mapping[str, Any]) -> bool:
    """Whether stages have a schedule, and the model a latent to exchange, as far as both are chosen."""
    if choice.get("method") == "latent" and choice.get("model") == "dense":
        return False
    staged = ParallelDims.parse(choice["layout"]).pp > 1 if "layout" in choice else None
    return staged is None or "schedule" not in choice or bool(choice["schedule"]) == staged


def full() -> Iterator[Row]:
    """Every layout, model, method and placement, with and without documents; the other options rotate."""
    rest = list(product(*(OPTIONS[name] for name in ("zero", "microbatches", "recompute"))))
    names = ("layout", "model", "method", "placement", "documents")
    shapes = product(LAYOUTS, ("moe", "dense"), METHODS, PLACEMENTS, (True, False))
    for i, shape in enumerate(filter(legal, (dict(zip(names, values, strict=True)) for values in shapes))):
        zero, microbatches, recompute = rest[(7 * i + i // 18) % len(rest)]
        schedule = SCHEDULES[i % 7 % 3] if "pp" in shape["layout"] else ""
        yield Row(zero=zero, microbatches=microbatches, recompute=recompute, schedule=schedule, **shape)


def cover() -> list[Row]:
    """Rows in which every two option values that can meet do."""
    return [Row(**choice) for choice in pairwise(OPTIONS, legal)]


OWN = Path(__file__).with_name("own_context.py")
SHORT: dict[str, Any] = {"data__sequence_length": 4}
LONG: dict[str, Any] = {"data__batch_size": 4, "model__n_layers": 2}
COMPILED: dict[str, Any] = {"train__compile": "aot_eager", "model__n_layers": 1}
TWELVE: dict[str, Any] = {"model__attention__n_heads": 12}

EXTRAS: tuple[Row, ...] = (
    # a user's own
    row("cp2", "dense", 3, 2, method=f"{OWN}:masked"),
    row("cp2-tp2", "moe_q", 2, 1, "full", method=f"{OWN}:masked", placement="balanced"),
    row("pp2-cp2", "moe", 1, 4, "none", "zb_h1", method=f"{OWN}:masked", documents=False),
    row("cp2", "moe", 3, 1, method="ring", placement=f"{OWN}:striped", data__sequence_length=32),  # more than 8 steps
    row("cp4", "dense", 2, 2, method="ulysses", placement=f"{OWN}:striped"),
    row("fsdp2-cp2", "moe", 1, 1, method="latent", placement=f"{OWN}:striped", documents=False,
        data__sequence_length=32),
    row("cp2", "moe", 2, 1, method=f"{OWN}:masked", placement=f"{OWN}:striped"),
    # short rows, and pieces of an odd number of tokens
    row("cp2", "dense", 3, 1, method="ring", **SHORT),  # pieces and documents of one token
    row("cp2", "moe", 3, 2, "full", method="latent", placement="balanced", **SHORT),
    row("cp4", "moe", 2, 1, method="all_gather", placement="contiguous", **SHORT),  # one token a rank
    row("cp2-tp2", "moe_q", 1, 1, method="ulysses", placement="contiguous", **SHORT),
    row("cp2", "moe", 1, 1, method="ring", placement="contiguous", data__sequence_length=2, documents=False),
    row("cp2", "dense", 1, 2, method="all_gather", placement="contiguous", data__sequence_length=14),
    row("cp2-tp2", "moe", 3, 1, method="latent", placement="contiguous", data__sequence_length=12),
    row("cp2", "moe_q", 2, 1, method="ring", data__sequence_length=12),
    row("cp3", "dense", 3, 1, method="ring", data__sequence_length=18),
    row("cp3", "moe", 1, 2, "full", method="latent", data__sequence_length=18),
    row("cp3", "moe_q", 2, 1, method="all_gather", placement="balanced", data__sequence_length=6),
    row("cp3", "moe", 3, 1, method="ulysses", placement="contiguous", data__sequence_length=9, **TWELVE),
    # long rows: documents in calls of their own, and pieces that balance needs finer
    row("cp2", "moe", 3, 1, method="ring", data__sequence_length=512, **LONG),
    row("cp2", "dense", 1, 2, method="all_gather", placement="balanced", data__sequence_length=512, **LONG),
    row("cp2", "moe", 2, 1, "full", method="latent", placement="balanced", data__sequence_length=512, **LONG),
    row("cp2", "moe_q", 2, 1, method="ulysses", placement="contiguous", data__sequence_length=512, **LONG),
    # how a rank runs its own work
    row("cp2", "dense", 3, 1, method="all_gather", **COMPILED),
    row("cp2", "moe_q", 3, 1, "full", method="latent", **COMPILED),
    row("cp2", "moe", 1, 1, method="ulysses", documents=False, **COMPILED),
    row("cp2", "moe", 3, 2, "ops", method="latent"),
    row("fsdp2-cp2", "dense", 2, 2, "every-2", method="ring"),
    row("cp2-tp2", "moe_q", 3, 1, "ops", method="all_gather", placement="balanced"),
    # the split backward, on one rank of the pipeline too
    row("cp2", "moe", 1, 4, "none", "zb_v", method="latent"),
    row("cp2", "moe_q", 3, 3, "full", "interleaved_split", method="ring", documents=False),
    row("pp2-cp2", "moe_q", 3, 3, "full", "zb_v", True, method="latent", placement="balanced"),
    row("pp2-cp2", "moe", 1, 4, "ops", "dualpipe_v", method="latent", placement="contiguous"),
    # replicas, and where parameters are stored
    row("ddp2-cp2", "moe", 1, 2, method="latent"),
    row("ddp2-cp2", "dense", 3, 2, "full", method="ring", train__small_buffer=300),
    row("ddp2-cp2-tp2", "moe", 2, 1, method="ulysses", placement="balanced"),
    row("fsdp2-cp2", "moe_q", 2, 2, method="latent", train__small_buffer=300),
    row("cp2-tp2", "moe", 1, 1, method="ring", train__small_buffer=65536),
    row("cp2", "moe", 3, 2, method="latent", **FROZEN),
    # models
    row("cp2", "dense", 3, 2, tied=True, method="ring"),
    row("cp2-tp2", "moe", 1, 1, "full", tied=True, method="latent"),
    row("pp2-cp2", "dense", 1, 3, "none", "1f1b", True, method="ulysses", placement="contiguous"),
    row("cp2", "moe", 3, 2, model__moe__balance_loss=0.5, model__moe__z_loss=0.1, method="ring"),
    row("cp2-tp2", "moe", 1, 1, model__moe__balance_loss=0.5, model__moe__z_loss=0.1, model__moe__n_dense_layers=0,
        method="latent", placement="contiguous"),
    row("cp4", "moe", 2, 1, "full", method="auto", model__moe__score="softmax", model__moe__normalise=False),
    row("cp2", "dense", 1, 1, model__rope__scaling=None, model__attention__n_kv_heads=8, method="ulysses"),
    row("cp2", "dense", 2, 1, model__attention__n_kv_heads=1, method="ring", documents=False),
    row("cp2", "moe", 1, 1, model__attention__v_dim=8, model__attention__rope_dim=2, method="latent"),  # values wider
)  # fmt: skip
"""What the grid leaves out, each in the smallest layouts where it can go wrong."""
