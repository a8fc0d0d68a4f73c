"""Layouts against one rank: every two option values of a grid meet in a row here; ``make parity`` runs all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

from fivefold.config.context import METHODS, PLACEMENTS
from fivefold.mesh.pool import Pool
from fivefold.schedule.named import NAMES
from fivefold.schedule.plan import check_run
from fivefold.tools.verify import TOLERANCE, Report, verify_rank

from . import contexts, pipelines
from .grid import EXTRAS, LAYOUTS, OPTIONS, STEPS, Row, cover, full, pairwise

Pools = Callable[[int], Pool]
COVER, PIPELINES, CONTEXTS = cover(), pipelines.cover(), contexts.cover()
ROWS = sorted([*COVER, *EXTRAS, *PIPELINES, *pipelines.EXTRAS, *CONTEXTS, *contexts.EXTRAS], key=Row.place)
"""Each pool's rows together, and in them those of each oracle."""


def verified(pool: Pools, row: Row) -> Report:
    """The report of one row."""
    return pool(row.world).run(verify_rank, row.config, STEPS, TOLERANCE["float64"], row.documents)[0]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_equals_one_rank(pool: Pools, row: Row) -> None:
    report = verified(pool, row)
    assert max(report.loss, report.grad_norm, report.gradient, report.parameter) < 1e-10, report
    assert report.experts and report.replicas and report.owners, report
    assert report.passed and report.first_difference is None, report


def test_rows_are_legal_and_distinct() -> None:
    rows = [*full(), *pipelines.full(), *contexts.full(), *ROWS]
    assert [problem for row in rows for problem in check_run(row.config)] == []
    assert len({str(row) for row in ROWS}) == len(ROWS)


def test_full_grid_is_every_combination() -> None:
    rows = list(full())
    assert len(rows) == len(set(rows)) == 10 * 3 * 3 * 2 * 2
    assert {row.layout for row in rows} == set(LAYOUTS)


def test_full_grid_of_pipelines_is_what_it_says() -> None:
    rows = list(pipelines.full())
    assert len(rows) == len(set(rows)) == 10 * (3 * 8 + 3 * 6) == 420
    wanted = {
        (layout, name, m)
        for layout in pipelines.LAYOUTS
        for name in NAMES
        for m in ((1, 2, 3, 4, 6, 12) if "ddp" in layout or "fsdp" in layout else (1, 2, 3, 4, 6, 8, 12, 24))
    }
    assert {(row.layout, row.schedule, row.microbatches) for row in rows} == wanted  # fmt: skip
    assert len({(row.schedule, row.zero, row.model, row.recompute, row.tied) for row in rows}) == 10 * 36
    assert {row.config.data.batch_size for row in rows} == {24}
    assert {row.layers for row in rows} == {5, 7}
    check_pairs(rows, pipelines.OPTIONS, pipelines.legal)


def test_full_grid_of_cut_sequences_is_every_combination() -> None:
    rows = list(contexts.full())
    wanted = {
        (layout, model, method, placement, documents)
        for layout in contexts.LAYOUTS
        for model, methods in (("moe", METHODS), ("dense", ("ring", "all_gather", "ulysses")))
        for method in methods
        for placement in PLACEMENTS
        for documents in (True, False)
    }
    assert len(rows) == len(wanted) == 7 * (4 + 3) * 3 * 2 == 294
    assert {(row.layout, row.model, row.method, row.placement, row.documents) for row in rows} == wanted
    check_pairs(rows, contexts.OPTIONS | {"model": ("moe", "dense")}, contexts.legal)


def check_pairs(rows: Sequence[Row], options: Mapping[str, Sequence[Any]], legal: Callable[..., bool]) -> None:
    """Every two values that can meet do."""
    met = {pair for row in rows for pair in combinations([(n, getattr(row, n)) for n in options], 2)}
    for a, b in combinations(options, 2):
        for x in options[a]:
            for y in options[b]:
                assert (((a, x), (b, y)) in met) == legal({a: x, b: y})


def test_covers_hold_every_pair_and_are_small() -> None:
    check_pairs(COVER, OPTIONS, lambda choice: True)
    assert len(COVER) <= 36  # 30 is the least: layouts times models or ZeRO stages
    check_pairs(PIPELINES, pipelines.OPTIONS, pipelines.legal)
    assert len(PIPELINES) == 80  # the least: schedules times microbatches
    check_pairs(CONTEXTS, contexts.OPTIONS, contexts.legal)
    assert len(CONTEXTS) <= 36  # 28 is the least: layouts times methods


@pytest.mark.parametrize(
    "options",
    [
        {"a": (1,), "b": (2,)},
        {"a": (1, 2), "b": (1, 2), "c": (1, 2)},
        {"a": range(4), "b": range(3), "c": range(2), "d": range(2)},
    ],
)
def test_pairwise_meets_every_pair(options: dict[str, tuple[int, ...]]) -> None:
    choices = pairwise(options)
    for a, b in combinations(options, 2):
        assert {(c[a], c[b]) for c in choices} == {(x, y) for x in options[a] for y in options[b]}
    assert all(set(c) == set(options) for c in choices)
    assert choices == pairwise(options)


def test_pairwise_leaves_out_what_is_not_legal() -> None:
    options = {"a": range(4), "b": range(4), "c": range(3)}
    choices = pairwise(options, lambda c: c.get("a", 0) <= c.get("b", 3))
    assert {(c["a"], c["b"]) for c in choices} == {(x, y) for x in range(4) for y in range(x, 4)}
    assert {(c["a"], c["c"]) for c in choices} == {(x, y) for x in range(4) for y in range(3)}


def test_pairwise_is_smaller_than_the_product() -> None:
    assert len(pairwise(dict.fromkeys("abcdefgh", (0, 1)))) <= 10
