"""Cuts of a flat buffer never split a row, whatever the parameters."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.dims import ParallelDims
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.run import Run
from fivefold.models.builder import build_parts
from fivefold.recipes import load
from fivefold.wrap.arrange import ALIGN, Arrangement, arrange
from fivefold.wrap.buffer import sizes_of
from fivefold.wrap.entries import collect

Sizes = list[tuple[int, int]]
SIZES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 48)).map(lambda x: (x[0] * x[1], x[1])), max_size=12)
"""Parameters as (elements, elements a row): whole rows of any width."""
WIDTHS = st.sampled_from([1, 8, 16, 24, 48])
MODEL = st.lists(st.tuples(st.integers(1, 40), WIDTHS).map(lambda x: (x[0] * x[1], x[1])), min_size=1, max_size=12)
"""Parameters as a model has them: a few widths that share factors."""
SHARDS = st.integers(1, 9)


def spans(sizes: Sizes, found: Arrangement) -> list[tuple[int, int, int]]:
    """Start, stop and row of each parameter, in the order of the buffer; without the empty ones."""
    both = zip(found.offsets, sizes, strict=True)
    return sorted((at, at + n, row) for at, (n, row) in both if n)


@settings(max_examples=400, deadline=None)
@given(SIZES, SHARDS)
def test_no_cut_splits_a_row_and_nothing_overlaps(sizes: Sizes, shards: int) -> None:
    found = arrange(sizes, shards)
    placed = spans(sizes, found)
    assert all(stop <= start for (_, stop, _), (start, _, _) in pairwise(placed))
    assert all(start >= 0 and stop <= found.shard * shards for start, stop, _ in placed)
    assert found.padding == found.shard * shards - sum(n for n, _ in sizes)
    for start, stop, row in placed:
        for cut in range(found.shard, found.shard * shards, found.shard):
            assert not start < cut < stop or (cut - start) % row == 0


@settings(max_examples=300, deadline=None)
@given(MODEL, SHARDS)
def test_padding_is_bounded(sizes: Sizes, shards: int) -> None:
    """Each shard is rounded up to common multiples of rows, and each parameter moves by a few rows at most."""
    found = arrange(sizes, shards)
    common = math.lcm(ALIGN, *(row for _, row in sizes))
    assert found.padding <= shards * 2 * common + 2 * sum(row + ALIGN for _, row in sizes)
    if shards == 1:
        assert found.padding <= ALIGN * len(sizes)


@settings(max_examples=200, deadline=None)
@given(SIZES, SHARDS, st.randoms())
def test_the_order_given_does_not_matter(sizes: Sizes, shards: int, random: object) -> None:
    shuffled = list(sizes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    a, b = arrange(sizes, shards), arrange(shuffled, shards)
    assert (a.shard, a.padding) == (b.shard, b.padding)
    assert spans(sizes, a) == spans(shuffled, b)


def test_one_shard_has_no_padding_where_sizes_are_aligned() -> None:
    assert arrange([(64, 8), (8, 1), (120, 24)], 1) == Arrangement((120, 184, 0), 192, 0)


def test_nothing_to_store() -> None:
    assert arrange([], 4) == Arrangement((), 0, 0)
    assert arrange([(0, 7)], 2) == Arrangement((0,), 0, 0)


def test_more_shards_than_rows() -> None:
    found = arrange([(16, 16)], 4)
    assert found.shard == 16 and found.padding == 48  # one rank stores the row, three store nothing


MODELS = {
    "deepseek_v3": {"embed": 1, "layers.0": 3, "layers.10": 58, "head": 1},
    "llama3_405b": {"embed": 1, "layers.0": 126, "head": 1},
}
"""Parts of real models, each with the number of parts of its shape."""


@pytest.mark.parametrize("layout", ["fsdp8-tp8", "fsdp64", "fsdp128-tp8"])
@pytest.mark.parametrize(("recipe", "share"), [("deepseek_v3", 0.01), ("llama3_405b", 0.03)])
def test_padding_of_real_models_is_small(recipe: str, share: float, layout: str) -> None:
    run = Run(Mesh(ParallelDims.parse(layout), connect=False))
    stored = padding = 0
    parts = build_parts(run, load(recipe).config.model, tuple(MODELS[recipe]))
    for name, groups in collect(parts, run).groups.items():
        for key, entries in groups.items():
            plan = arrange(sizes_of(entries), key[0].size)
            stored += plan.shard * key[0].size * MODELS[recipe][name]
            padding += plan.padding * MODELS[recipe][name]
    assert stored > 0 and padding < share * stored
