"""The sampler against a naive reading of the same documents, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivefold.data.mixture import PERIOD
from fivefold.data.rows import IGNORE, Rows, Stream
from fivefold.data.sampler import SOURCE_SHIFT, Sampler
from fivefold.data.tokenfile import TokenFile

FIELDS = ("tokens", "targets", "positions", "documents")


def naive(file: TokenFile, start: int, stop: int, row: int, length: int) -> dict[str, list[int]]:
    """One row, token by token."""
    document_of = np.repeat(np.arange(file.n_documents), np.diff(file.starts))
    fields: dict[str, list[int]] = {name: [] for name in FIELDS}
    number = position = 0
    for column in range(length):
        place = start + row * length + column
        here = min(place, stop - 1)
        if column and place < stop and document_of[place] != document_of[place - 1]:
            number, position = number + 1, 0
        fields["tokens"].append(int(file.tokens[here]))
        fields["documents"].append(number)
        fields["positions"].append(position)
        follows = place + 1 < stop and document_of[place + 1] == document_of[place]
        fields["targets"].append(int(file.tokens[place + 1]) if follows else IGNORE)
        position += 1
    return fields


def equal(rows: Rows, expected: list[dict[str, list[int]]]) -> bool:
    return all(getattr(rows, name).tolist() == [row[name] for row in expected] for name in FIELDS)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    heldout=st.lists(st.integers(0, 12), max_size=6),
    length=st.integers(1, 9),
)
def test_rows_equal_the_naive_ones(build, lengths: list[int], heldout: list[int], length: int) -> None:
    file = build(lengths, heldout)
    for start, stop in ((0, file.n_training_tokens), (file.n_training_tokens, file.n_tokens)):
        if start == stop:
            continue
        n_rows = -(-(stop - start) // length) + 2  # two past the end
        rows = Stream(file, start, stop).rows(np.arange(n_rows), length)
        expected = [naive(file, start, stop, row, length) for row in range(n_rows)]
        assert equal(rows, expected)
        assert rows.single_document == (max(max(row["documents"]) for row in expected) == 0)
        assert rows.tokens.dtype == rows.targets.dtype == rows.positions.dtype == np.int64
        assert rows.documents.dtype == np.int32


def test_boundaries_by_hand(build) -> None:
    """Documents of 3, 0, 1 and 6 tokens in rows of 4: a boundary inside, at the edge, and twice in one row."""
    rows = Stream(build([3, 0, 1, 6]), 0, 10).rows(np.array([0, 1]), 4)
    assert rows.tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows.targets.tolist() == [[1, 2, -100, -100], [5, 6, 7, 8]]
    assert rows.positions.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert rows.documents.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert not rows.single_document
    assert Stream(build([3, 0, 1, 6]), 0, 10).rows(np.array([1]), 4).single_document


def test_one_epoch_trains_every_row_once(build) -> None:
    sampler = Sampler([build([50, 1, 0, 200, 7], [30])], (), 8, 4, seed=3)
    n_rows = (258 - 1) // 8
    assert sampler.n_rows == (n_rows,)
    steps = [sampler.rows(step, 0, 4) for step in range(1, n_rows // 4 + 1)]
    seen = np.concatenate([rows.tokens.ravel() for rows in steps])
    assert np.array_equal(np.sort(seen), np.arange(n_rows * 8))  # 32 rows, so 8 whole steps; nothing held out
    targets = np.concatenate([rows.targets.ravel() for rows in steps])
    first_of_document = {50, 51, 251}
    assert set(targets[targets != IGNORE]) == set(range(1, n_rows * 8 + 1)) - first_of_document


def test_epochs_are_reshuffled_and_seeds_differ(build) -> None:
    file = build([801])
    orders = {}
    for seed in (0, 1):
        sampler = Sampler([file], (), 8, 10, seed=seed)
        for epoch in range(3):
            ids = [sampler.ids(10 * epoch + step) for step in range(1, 11)]
            orders[seed, epoch] = tuple(np.concatenate(ids).tolist())
            assert sorted(orders[seed, epoch]) == list(range(100))
    assert len(set(orders.values())) == 6


def test_a_batch_may_span_epochs(build) -> None:
    sampler = Sampler([build([25])], (), 8, 16, seed=0)  # three rows
    ids = np.concatenate([sampler.ids(step) for step in range(1, 4)])
    assert [sorted(ids[i : i + 3]) for i in range(0, 48, 3)] == [[0, 1, 2]] * 16


@pytest.mark.parametrize("n_ranks", [1, 2, 4, 8])
def test_ids_and_rows_are_the_same_at_any_data_parallel_degree(build, n_ranks: int) -> None:
    files = [build([100, 3, 90], [9], name="a"), build([70] * 5, name="b")]
    arguments = (files, (2, 1), 8, 16, 5)
    whole = Sampler(*arguments)
    share = 16 // n_ranks
    for step in range(1, 7):
        batch = whole.rows(step, 0, 16)
        parts = [Sampler(*arguments).rows(step, rank * share, (rank + 1) * share) for rank in range(n_ranks)]
        for name in FIELDS:
            assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(batch, name))
        # The ids say exactly what was read.
        for row, sample in enumerate(whole.ids(step)):
            source, number = divmod(int(sample), 1 << SOURCE_SHIFT)
            expected = naive(files[source], 0, files[source].n_training_tokens, number, 8)
            assert all(getattr(batch, name)[row].tolist() == expected[name] for name in FIELDS)


def test_ids_never_change(build) -> None:
    """A run that is taken up again with a newer version reads on where it was."""
    sampler = Sampler([build([801], name="a"), build([401], name="b")], (3, 1), 8, 8, seed=1)
    ids = [[(int(i) >> SOURCE_SHIFT, int(i) % 2**SOURCE_SHIFT) for i in sampler.ids(step)] for step in (1, 1000)]
    assert ids == [
        [(0, 71), (0, 73), (1, 20), (0, 19), (0, 11), (0, 53), (1, 31), (0, 55)],
        [(0, 88), (0, 80), (1, 7), (0, 28), (0, 64), (0, 19), (1, 3), (0, 5)],
    ]


def test_weights_are_exact_and_default_to_rows(build) -> None:
    files = [build([801], name="a"), build([201], name="b")]
    for weights, expected in (((0.3, 0.7), 0.3), ((), 0.8), ((5, 5), 0.5)):
        sampler = Sampler(files, weights, 8, 1000, seed=0)
        source = np.concatenate([sampler.ids(step) for step in range(1, PERIOD // 1000 + 1)]) >> SOURCE_SHIFT
        assert (source == 0).sum() == expected * PERIOD


def test_each_source_has_its_own_epochs(build) -> None:
    sampler = Sampler([build([81], name="a"), build([161], name="b")], (1, 1), 8, 4, seed=0)
    ids = np.concatenate([sampler.ids(step) for step in range(1, 21)])
    first, second = ids[ids >> SOURCE_SHIFT == 0], ids[ids >> SOURCE_SHIFT == 1] % 2**SOURCE_SHIFT
    for epoch in range(4):
        assert sorted(first[10 * epoch : 10 * epoch + 10]) == list(range(10))
    for epoch in range(2):
        assert sorted(second[20 * epoch : 20 * epoch + 20]) == list(range(20))
