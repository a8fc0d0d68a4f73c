"""What rows of cut sequences rest on: rows of one document each, evaluation, and parts seen in the order of the row."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from fivefold.config.parts import ContextConfig, PipelineConfig
from fivefold.data.synthetic import Synthetic
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool import Pool
from fivefold.mesh.pool_worker import RankContext
from fivefold.tools.verify import one_rank, run_steps, verify
from tests.train import cases

from .grid import Row, row

Pools = Callable[[int], Pool]


def test_rows_of_one_document_are_the_same_tokens() -> None:
    many, one = (Synthetic(37, 16, 8, 3, documents=documents).rows(2, 0, 8) for documents in (True, False))
    assert not many.single_document and one.single_document
    assert np.array_equal(many.tokens, one.tokens) and np.array_equal(many.targets, one.targets)
    assert not one.documents.any() and np.array_equal(one.positions, np.broadcast_to(np.arange(16), (8, 16)))
    assert many.documents.max(1).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_verify_runs_rows_of_one_document(pool: Pools) -> None:
    """Its oracle is kept apart from that of rows of several."""

    def run(documents: bool) -> Any:
        config = row("cp2", method="latent").config
        return verify(config, ["cp2"], documents=documents, pools=lambda n: nullcontext(pool(n)))[0]  # type: ignore[arg-type, return-value]

    many, one, again = run(True), run(False), run(True)
    assert many.passed and one.passed and again == many
    assert many.gradient != one.gradient


EVALUATED = [
    row("cp2", "dense", 3, 2, method="ring"),
    row("cp4", "moe", 1, 1, method="all_gather", placement="balanced"),
    row("fsdp2-cp2", "moe", 3, 2, "full", method="latent"),
    row("cp2-tp2", "moe_q", 3, 1, method="ulysses", placement="contiguous"),
    row("pp2-cp2", "moe", 1, 3, "none", "zb_h1", True, method="latent"),
]


@pytest.mark.parametrize("n_rows", [5, 9])
@pytest.mark.parametrize("row", EVALUATED, ids=str)
def test_evaluation_finds_what_one_rank_finds(pool: Pools, row: Row, n_rows: int) -> None:
    plain = {"parallel": "single", "pipeline": PipelineConfig(), "context": ContextConfig()}
    alone = pool(1).run(cases.evaluated, row.config.model_copy(update=plain), n_rows)[0]
    for rank in pool(row.world).run(cases.evaluated, row.config, n_rows):
        assert rank.found.loss == pytest.approx(alone.found.loss, rel=1e-12)
        assert rank.found.bits_per_byte == pytest.approx(alone.found.bits_per_byte, rel=1e-12)
        assert rank.found.n_targets == alone.found.n_targets
        assert rank.touched == [] and rank.gathered_bytes == 0 and rank.training


def watched(context: RankContext, row: Row) -> tuple[list[str], float] | None:
    """On rank 0, what is seen of a layout that one rank also shows, and the largest difference between the two."""
    seen = run_steps(row.config, context.mesh(row.layout), 1, watch=True).seen
    if context.rank:
        return None
    alone = run_steps(one_rank(row.config), Mesh.single(), 1, watch=True).seen
    assert seen.keys() == alone.keys()
    return [" ".join(key) for key in seen], max(float((seen[key] - alone[key]).abs().max()) for key in seen)


@pytest.mark.parametrize(
    "row",
    [row("cp2", "dense", 1, 2, placement="balanced"), row("cp2-tp2", "moe", 2, 1), row("fsdp2-cp2", "dense", 3, 2)],
    ids=str,
)
def test_parts_are_seen_in_the_order_of_the_row(pool: Pools, row: Row) -> None:
    """Each row is put together again from columns that its placement dealt out in its own way."""
    names, difference = pool(row.world).run(watched, row)[0]
    assert {"embed activation", "layers.3 activation", "head activation", "layers.0 gradient"} <= set(names)
    assert difference < 1e-13
