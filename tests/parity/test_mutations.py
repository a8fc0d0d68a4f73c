"""The proof can fail: every planted mistake is found, in the smallest row that covers it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fivefold.mesh.pool import Pool, PoolError
from fivefold.tools.verify import TOLERANCE, Report, verify_rank

from . import context_mutations, mutations, pipeline_mutations
from .grid import STEPS, Row
from .planting import MUTATIONS, planted

Pools = Callable[[int], Pool]
LIMIT = TOLERANCE["float64"]
FLAGS = ("experts", "replicas", "owners")
ROWS = sorted({m.row for m in MUTATIONS.values()}, key=lambda row: (row.world, str(row)))


def is_right(report: Report, field: str) -> bool:
    """Whether a field of the report shows no mistake."""
    value = getattr(report, field)
    return bool(value) if field in FLAGS else value <= LIMIT


@pytest.mark.parametrize("name", MUTATIONS)
def test_mistake_is_found(pool: Pools, name: str) -> None:
    m = MUTATIONS[name]
    arguments = m.plant, m.row.config, STEPS, LIMIT, m.row.documents
    if m.raises:
        with pytest.raises(PoolError, match=m.raises):
            pool(m.row.world).run(planted, *arguments)
        return
    report = pool(m.row.world).run(planted, *arguments)[0]
    assert not report.passed, report
    assert [field for field in m.wrong if is_right(report, field)] == [], report
    assert [field for field in m.right if not is_right(report, field)] == [], report
    assert m.worst in report.worst[0]
    if m.first:
        assert (report.first_difference or "none").startswith(m.first)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_row_passes_without(pool: Pools, row: Row) -> None:
    assert pool(row.world).run(verify_rank, row.config, STEPS, LIMIT, row.documents)[0].passed


def test_one_for_every_rule_and_more() -> None:
    modules = (mutations, pipeline_mutations, context_mutations)
    assert {m.plant.__module__ for m in MUTATIONS.values()} == {module.__name__ for module in modules}
    assert len(MUTATIONS) >= 95
    assert all(m.wrong or m.raises for m in MUTATIONS.values())
