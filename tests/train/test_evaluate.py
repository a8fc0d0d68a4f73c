"""The held-out loss does not depend on the layout, and looking at it changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from fivefold.config.parts import PipelineConfig
from fivefold.data.rows import IGNORE
from fivefold.data.synthetic import Synthetic
from fivefold.mesh.pool import Pool
from tests.parity.grid import Row, row
from tests.parity.pipelines import OWN

from . import cases

Pools = Callable[[int], Pool]
ROWS = [
    row("fsdp2", "moe", 3, 2),
    row("ddp2", "dense", 1),
    row("fsdp2", "dense", 1),
    row("tp2", "moe_q", 3),
    row("ddp2-tp2", "moe", 2, 2, "full"),
    row("fsdp4", "dense", 3, 2),
    row("fsdp2-tp2", "moe", 3, train__small_buffer=300),
    row("pp2-fsdp2", "moe", 3, 2, "none", "zb_v", True),  # both ends on one rank
    row("pp2", "moe_q", 1, 3, "full", "looped_bfs"),
    row("pp2-tp2", "dense", 2, 4, "none", "1f1b", True),
    row("pp4", "moe", 1, 2, "none", f"{OWN}:upside_down"),
]


@pytest.mark.parametrize("n_rows", [5, 8, 9])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_any_layout_finds_what_one_rank_finds(pool: Pools, row: Row, n_rows: int) -> None:
    config = row.config
    alone = config.model_copy(update={"parallel": "single", "pipeline": PipelineConfig()})
    one: cases.Evaluated = pool(1).run(cases.evaluated, alone, n_rows)[0]
    ranks: list[cases.Evaluated] = pool(row.world).run(cases.evaluated, config, n_rows)
    for r in ranks:
        assert r.found.loss == pytest.approx(one.found.loss, rel=1e-12)
        assert r.found.bits_per_byte == pytest.approx(one.found.bits_per_byte, rel=1e-12)
        assert r.found.n_targets == Synthetic(37, config.data.sequence_length, n_rows, 1).heldout.n_bytes  # each once
        assert r.found == ranks[0].found
        assert r.touched == [] and r.gathered_bytes == 0 and r.training


@pytest.mark.parametrize("row", [row("fsdp2", "moe", 3, 2), row("tp2", "moe", 1),
                                 row("pp2", "moe", 3, 2, "full", "zb_v", True)], ids=str)  # fmt: skip
def test_training_goes_on_as_if_nothing_had_happened(pool: Pools, row: Row) -> None:
    looked = pool(row.world).run(cases.evaluated, row.config, 5)[0].parameters
    went_on = pool(row.world).run(cases.evaluated, row.config, 5, False)[0].parameters
    assert looked.keys() == went_on.keys() and all(torch.equal(looked[n], went_on[n]) for n in looked)


def test_bits_per_byte_and_rows_past_the_end(pool: Pools) -> None:
    """Made-up targets are one byte each, so bits per byte are nats over log 2."""
    config = row("fsdp2", "dense").config
    found = pool(2).run(cases.evaluated, config, 5)[0].found
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))
    heldout = Synthetic(37, 16, 5, 1).heldout
    assert found.n_targets == heldout.n_bytes == 16 + 7 + 5 + 1 + 0
    rows = heldout.rows(3, 8)
    assert (rows.targets[:2] != IGNORE).sum() == 1 and (rows.targets[2:] == IGNORE).all()
