"""Permutations that are never stored, and mixtures of exact proportions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.data.mixture import PERIOD, Mixture, quotas
from fivefold.data.permutation import permute, uniform


@pytest.mark.parametrize("n", [*range(1, 130), 1000, 4095, 4096, 4097, 99991])
def test_a_permutation_is_a_bijection(n: int) -> None:
    result = permute(np.arange(n), n, 7, n)
    assert np.array_equal(np.sort(result), np.arange(n))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5000), st.integers(0, 2**63), st.integers(0, 10**6))
def test_a_permutation_is_a_bijection_for_any_key(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


@pytest.mark.parametrize("n", [10**12, 2**40 - 1, 2**48 - 59])
def test_huge_permutations_stay_inside_and_do_not_collide(n: int) -> None:
    result = permute(np.arange(n - 20_000, n), n, 3)
    assert result.min() >= 0
    assert result.max() < n
    assert len(np.unique(result)) == 20_000


def test_keys_may_differ_by_element() -> None:
    index, epoch = np.array([3, 3, 5, 9]), np.array([0, 1, 1, 2])
    one_by_one = [int(permute(index[i : i + 1], 10, 5, epoch[i])[0]) for i in range(4)]
    assert permute(index, 10, 5, epoch).tolist() == one_by_one


def test_permutations_look_random() -> None:
    """The image of one index is uniform over keys, and neighbours are not sent to neighbours."""
    keys = np.arange(32_000)
    counts = np.bincount(permute(np.full_like(keys, 5), 16, keys), minlength=16)
    assert ((counts - 2000) ** 2 / 2000).sum() < 45  # chi-square, 15 degrees of freedom: p = 0.00008
    result = permute(np.arange(100_000), 100_000, 1)
    assert abs(np.corrcoef(np.arange(100_000), result)[0, 1]) < 0.02
    assert abs(np.corrcoef(result[1:], result[:-1])[0, 1]) < 0.02


def test_values_never_change() -> None:
    """Every prepared split and every run's order depends on these."""
    assert permute(np.arange(8), 8, 0).tolist() == [6, 4, 3, 0, 7, 1, 5, 2]
    assert np.allclose(uniform(0, np.arange(3), 0), [0.432642, 0.082888, 0.592246], atol=1e-6)


@pytest.mark.parametrize("weights", [(1,), (3, 1), (0.7, 0.3), (0.5, 0.3, 0.2), (1, 1e-9), (1, 1, 1), (123456, 7)])
def test_mixture_proportions_are_exact(weights: tuple[float, ...]) -> None:
    mixture = Mixture(weights)
    source, number = mixture.locate(np.arange(3 * PERIOD))
    assert mixture.quotas.sum() == PERIOD
    total = sum(map(Fraction, weights))
    for i, weight in enumerate(weights):
        exact = Fraction(weight) * PERIOD / total
        assert abs(mixture.quotas[i] - exact) < 1 or mixture.quotas[i] == 1
        # Every sample of a source comes exactly once, and in order.
        assert np.array_equal(number[source == i], np.arange(3 * mixture.quotas[i]))
        # And evenly: any stretch from the start is within two samples of its share.
        share = np.arange(1, 3 * PERIOD + 1) * (mixture.quotas[i] / PERIOD)
        assert np.abs(np.cumsum(source == i) - share).max() < 2


def test_decimal_weights_are_exact() -> None:
    assert quotas((0.7, 0.3)) == [70_000, 30_000]
    assert quotas((0.123, 0.477, 0.4)) == [12_300, 47_700, 40_000]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_quotas_share_out_everything(weights: list[float]) -> None:
    result = quotas(weights)
    assert sum(result) == PERIOD
    assert min(result) >= 1
