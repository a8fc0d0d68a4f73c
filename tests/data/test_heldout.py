"""Held-out evaluation: every target once, and exact bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivefold.data.heldout import Heldout
from fivefold.data.rows import IGNORE
from fivefold.data.sampler import Sampler
from fivefold.data.tokenfile import TokenFile


def expected_targets(file: TokenFile, n_documents: int | None = None) -> list[int]:
    """Every held-out token but each document's first."""
    first = file.index.n_training_documents
    last = file.n_documents if n_documents is None else first + n_documents
    return [token for i in range(first, last) for token in range(file.starts[i] + 1, file.starts[i + 1])]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(heldout=st.lists(st.integers(0, 15), max_size=8), length=st.integers(1, 9), batch=st.integers(1, 5))
def test_every_target_once(build, heldout: list[int], length: int, batch: int) -> None:
    file = build([40, 3], heldout)
    held = Heldout([file], length)
    n_batches = -(-held.n_rows // batch)
    targets = [held.rows(i * batch, (i + 1) * batch).targets for i in range(n_batches)]
    found = np.concatenate([np.empty(0, np.int64), *(part.ravel() for part in targets)])
    assert found[found != IGNORE].tolist() == expected_targets(file)
    assert held.n_bytes == 3 * sum(heldout)


def test_several_files_one_after_another(build) -> None:
    files = [build([20], [7, 6], name="a"), build([20], [], name="b"), build([20], [5], name="c")]
    held = Heldout(files, 4)
    assert held.n_rows == 3 + 0 + 1
    for cut in range(5):
        targets = np.concatenate([held.rows(0, cut).targets, held.rows(cut, 9).targets])
        assert targets[targets != IGNORE].tolist() == expected_targets(files[0]) + expected_targets(files[2])
        assert targets.shape == (9, 4)
    assert held.n_bytes == 3 * 18


def test_rows_past_the_end_ignore_everything(build) -> None:
    for heldout in ([], [6]):
        held = Heldout([build([20], heldout)], 4)
        rows = held.rows(held.n_rows, held.n_rows + 3)
        assert (rows.targets == IGNORE).all()
        assert rows.tokens.shape == (3, 4)


def test_no_heldout_token_is_trained_on(build) -> None:
    file = build([30, 30], [30])
    sampler = Sampler([file], (), 4, 7, seed=0)
    for step in range(1, 9):
        rows = sampler.rows(step, 0, 7)
        assert max(rows.tokens.max(), rows.targets.max()) < file.n_training_tokens


@pytest.mark.parametrize(
    ("limit", "n_documents"),
    [(1, 1), (2, 1), (3, 2), (4, 2), (6, 3), (100, 4)],  # the ends of documents are 10, 14, 26 and 40 tokens in
)
def test_a_limit_takes_whole_documents_and_their_bytes(build, limit: int, n_documents: int) -> None:
    file = build([30], [10, 4, 12, 14])
    heldout = Heldout([file], 4, limit)
    assert heldout.n_documents == n_documents
    assert heldout.n_bytes == 3 * sum([10, 4, 12, 14][:n_documents])
    targets = heldout.rows(0, heldout.n_rows + 1).targets
    assert targets[targets != IGNORE].tolist() == expected_targets(file, n_documents)


def test_a_limit_is_shared_between_files_by_size(build) -> None:
    files = [build([9], [10] * 30, name="a"), build([9], [10] * 10, name="b"), build([9], name="c")]
    heldout = Heldout(files, 10, limit_rows=20)
    assert heldout.n_documents == 15 + 5
    assert heldout.n_rows == 20
