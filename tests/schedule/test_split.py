"""Every part is in exactly one stage, and no other cut has cheaper stages."""

from __future__ import annotations

import time
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.schedule.split import balanced, cut


def stage_costs(costs: list[float], counts: tuple[int, ...]) -> list[float]:
    """Of each stage, the largest first."""
    return sorted((sum(costs[a:b]) for a, b in pairwise(accumulate(counts, initial=0))), reverse=True)


def every_cut(n: int, n_stages: int) -> list[tuple[int, ...]]:
    """All ways to cut ``n`` parts, by the number of parts in each stage; fewer parts in early stages first."""
    cuts = ([0, *inside, n] for inside in combinations(range(1, n), n_stages - 1))
    return [tuple(b - a for a, b in pairwise(cut)) for cut in cuts]


@settings(deadline=None)
@given(st.lists(st.sampled_from([0, 0.25, 1, 2, 2.5, 3, 7]), min_size=1, max_size=9), st.data())
def test_no_cut_is_better(costs: list[float], data: st.DataObject) -> None:
    n_stages = data.draw(st.integers(1, len(costs)))
    counts = balanced(costs, n_stages)
    cuts = every_cut(len(costs), n_stages)
    assert counts in cuts
    assert stage_costs(costs, counts) == min(stage_costs(costs, c) for c in cuts)
    assert counts[-1] == max(c[-1] for c in cuts if stage_costs(costs, c) == stage_costs(costs, counts))


@pytest.mark.parametrize("n_layers", range(1, 19))
def test_every_part_is_in_one_stage(n_layers: int) -> None:
    names = ["embed", *(f"layers.{i}" for i in range(n_layers)), "head"]
    costs = [0.5, *(1.0 + i % 3 for i in range(n_layers)), 4.0]
    for pp in range(1, 9):
        for chunks in range(1, 5):
            if pp * chunks <= len(names):
                counts = balanced(costs, pp * chunks)
                stages = cut(names, counts)
                assert [name for stage in stages for name in stage] == names
                assert len(stages) == pp * chunks
                assert all(stages)


@pytest.mark.parametrize(
    ("costs", "counts"),
    [
        ([0.01, 1, 1, 1, 1, 1], (3, 3)),  # a cheap embedding does not cost a layer's place
        ([0.01, 1, 1, 1, 1, 4], (5, 1)),  # an expensive head stays alone
        ([1, 1, 1, 1, 1], (2, 3)),  # equal halves do not exist: the later stage, which holds less, takes more
        ([5, 1, 1, 1, 1, 1, 1], (1, 3, 3)),  # beside the largest stage the others are balanced too
    ],
)
def test_what_balance_means(costs: list[float], counts: tuple[int, ...]) -> None:
    assert balanced(costs, len(counts)) == counts


def test_costs_that_floats_do_not_add_exactly() -> None:
    """0.1 + 0.2 + 0.3 depends on the order in floats; here stages that are equal count as equal."""
    assert balanced([0.1, 0.2, 0.3] * 4, 4) == (3, 3, 3, 3)
    assert balanced([1e-30, 1e30, 1e-30], 2) == (1, 2)


def test_large_models_take_no_time() -> None:
    costs = [8e3, *(4e9 + 1e7 * (i * 7919 % 101) for i in range(128)), 6e9]
    begin = time.perf_counter()
    for n_stages in (1, 2, 8, 43, 64, 128, 130):
        assert sum(balanced(costs, n_stages)) == 130
    assert time.perf_counter() - begin < 2
