"""Placements: every column on one rank, equally many on each, and how even the work is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.errors import ConfigError
from fivefold.data.placement import PLACEMENTS, check_columns, keys_seen
from fivefold.data.rows import Rows


def packed(rows: int, width: int, mean: float, seed: int = 0) -> np.ndarray:
    """Documents of log-normal length ``[rows, width]``."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(rows):
        lengths = np.maximum(1, random.lognormal(np.log(mean), 1.0, width).astype(int))
        found.append(np.repeat(np.arange(width), lengths)[:width])
    return np.array(found, np.int32)


def imbalance(documents: np.ndarray, n: int, placement: str) -> float:
    """The largest rank's work over the mean."""
    work = np.take_along_axis(keys_seen(documents)[None], PLACEMENTS[placement](documents, n), 2).sum((1, 2))
    return work.max() / work.mean()


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 40), st.sampled_from(sorted(PLACEMENTS)))
def test_every_column_is_on_one_rank(data: st.DataObject, n: int, pieces: int, name: str) -> None:
    width = 2 * n * pieces
    starts = data.draw(st.lists(st.sets(st.integers(1, width - 1), max_size=8), min_size=1, max_size=3))
    documents = np.array([np.isin(np.arange(width), list(s)).cumsum() for s in starts], np.int32)
    columns = PLACEMENTS[name](documents, n)
    assert columns.shape == (n, len(starts), width // n)
    assert (np.diff(columns, axis=2) > 0).all()
    assert (np.sort(np.concatenate(list(columns), 1), 1) == np.arange(width)).all()
    check_columns(columns, len(starts), width, n, name)


def test_keys_seen_are_counted() -> None:
    documents = packed(3, 50, 6.0)
    naive = [[sum(d == row[i] for d in row[: i + 1]) for i in range(50)] for row in documents.tolist()]
    assert keys_seen(documents).tolist() == naive


@pytest.mark.parametrize("n", [2, 4, 8])
def test_zigzag_balances_rows_of_one_document(n: int) -> None:
    documents = np.zeros((2, 1024), np.int32)
    assert imbalance(documents, n, "zigzag") == imbalance(documents, n, "balanced") == 1.0
    assert imbalance(documents, n, "contiguous") == pytest.approx(2 - 1 / n, rel=1e-2)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("mean", [50.0, 400.0])
def test_balanced_balances_rows_of_many_documents(n: int, mean: float) -> None:
    documents = packed(2, 4096, mean)
    even, zigzag = (imbalance(documents, n, name) for name in ("balanced", "zigzag"))
    assert even < 1.02 and even <= zigzag and (zigzag > 1.02 or n == 2)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (np.zeros((2, 1, 3), int), "of shape (2, 1, 3) for 1 rows of 4 tokens on 2 ranks. Return (2, 1, 2)."),
        (np.array([[[1, 0]], [[2, 3]]]), "do not ascend. Sort each rank's columns."),
        (np.array([[[0, 1]], [[1, 3]]]), "leaves out a column, or gives it twice."),
    ],
)
def test_a_placement_of_ones_own_is_checked(columns: np.ndarray, words: str) -> None:
    with pytest.raises(ConfigError) as found:
        check_columns(columns, 1, 4, 2, "own.py:place")
    assert words in str(found.value) and "context.placement=own.py:place" in str(found.value)


def rows_of(documents: list[list[int]]) -> Rows:
    zeros = np.zeros_like(documents)
    return Rows(tokens=zeros, targets=zeros, positions=zeros, documents=np.array(documents, np.int32),
                single_document=False)  # fmt: skip


def test_a_document_number_that_goes_back_is_told() -> None:
    assert rows_of([[0, 0, 1], [0, 2, 2]]).problem() == ""
    assert rows_of([[0, 0, 1], [0, 2, 1]]).problem() == (
        "documents[1, 2]=1 goes back in its row (documents[1, 1]=2). Number the documents of a row in ascending order."
    )
