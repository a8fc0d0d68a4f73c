"""Layouts against one rank: every two option values of the grid meet in a row here; ``make parity`` runs all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from fivefold.config.check import check
from fivefold.mesh.pool import Pool
from fivefold.tools.verify import TOLERANCE, Report, verify_rank

from .grid import EXTRAS, LAYOUTS, OPTIONS, STEPS, Row, cover, full, pairwise

Pools = Callable[[int], Pool]
COVER = cover()
ROWS = sorted([*COVER, *EXTRAS], key=lambda row: (row.world, row.model))
"""Each pool's rows together, and in them those of each oracle."""


def verified(pool: Pools, row: Row) -> Report:
    """The report of one row."""
    return pool(row.world).run(verify_rank, row.config, STEPS, TOLERANCE["float64"])[0]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_equals_one_rank(pool: Pools, row: Row) -> None:
    report = verified(pool, row)
    assert max(report.loss, report.grad_norm, report.gradient, report.parameter) < 1e-10, report
    assert report.experts and report.replicas and report.owners, report
    assert report.passed and report.first_difference is None, report


def test_rows_are_legal_and_distinct() -> None:
    rows = [*full(), *ROWS]
    assert [problem for row in rows for problem in check(row.config)] == []
    assert len({str(row) for row in ROWS}) == len(ROWS)


def test_full_grid_is_every_combination() -> None:
    rows = list(full())
    assert len(rows) == len(set(rows)) == 10 * 3 * 3 * 2 * 2
    assert {row.layout for row in rows} == set(LAYOUTS)


def test_cover_holds_every_pair_and_is_small() -> None:
    met = {pair for row in COVER for pair in combinations([(n, getattr(row, n)) for n in OPTIONS], 2)}
    for a, b in combinations(OPTIONS, 2):
        for x in OPTIONS[a]:
            for y in OPTIONS[b]:
                assert ((a, x), (b, y)) in met
    assert len(COVER) <= 36  # 30 is the least: layouts times models or ZeRO stages


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


def test_pairwise_is_smaller_than_the_product() -> None:
    assert len(pairwise(dict.fromkeys("abcdefgh", (0, 1)))) <= 10
