"""The simulator and the automatic scheduler give the bubble rates that the zero-bubble paper published."""

from __future__ import annotations

import pytest

from fivefold.schedule.simulate import simulate
from fivefold.schedule.table import check
from tests.schedule.zb_table import CHUNKS, TOLERANCE, Row, rows

ROWS = list(rows())


def test_the_whole_table_is_there() -> None:
    assert len(ROWS) == 36
    assert {row.schedule for row in ROWS} == set(TOLERANCE)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model}-{row.microbatches}-{row.schedule}")
def test_bubble_rates_are_the_published_ones(row: Row) -> None:
    assert abs(row.error) < TOLERANCE[row.schedule]
    if row.limit is not None:
        assert check(row.table, pp=row.pp, microbatches=row.microbatches) == []
        assert max(row.timeline.peak) <= row.limit + 1e-9


@pytest.mark.parametrize("row", [row for row in ROWS if row.schedule == "1F1B-I"], ids=lambda row: row.model)
def test_1f1b_i_differs_by_one_message_for_each_rank(row: Row) -> None:
    """The paper's interleaved order is not told; with a layer a chunk its rates are ours less ``p`` message times."""
    span = row.timeline.span - row.pp * row.comm
    assert 1 - row.timeline.busy / span == pytest.approx(row.published, abs=1e-4)
    other = simulate(row.table, {kind: time / (CHUNKS[row.model] + 1) for kind, time in row.cost.items()}, row.comm)
    assert abs(1 - other.busy / (other.span - row.pp * row.comm) - row.published) > 1e-3
