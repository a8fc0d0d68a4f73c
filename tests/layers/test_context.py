"""Context parallelism: every method under every placement is the dense definition, leaks nothing and loses no label."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.context import costs
from fivefold.config.run import RunConfig
from fivefold.data.placement import PLACEMENTS, balanced, contiguous, zigzag
from fivefold.data.rows import IGNORE
from fivefold.layers.context import METHODS, context_attention, work
from fivefold.layers.microbatch import Holders
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool import Pool
from fivefold.ops.blocks import CAUSAL, FULL, MASKED
from fivefold.recipes.tiny import dense_tiny, moe_tiny
from tests.helpers import error
from tests.layers import context_cases as cases
from tests.parity.grid import changed

Pools = Callable[[int], Pool]


# ---- which pairs -----------------------------------------------------------------------------------------------------


def striped(documents: np.ndarray, n: int) -> np.ndarray:
    """A placement that deals out single tokens."""
    rows, width = documents.shape
    return np.broadcast_to(np.arange(width).reshape(-1, n).T[:, None], (n, rows, width // n))


@st.composite
def packed(draw: st.DrawFn) -> tuple[np.ndarray, int, str]:
    """Documents of some rows, a number of ranks, and how they share columns."""
    n = draw(st.integers(1, 4))
    width = 2 * n * draw(st.integers(1, 6))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        starts = draw(st.sets(st.integers(1, max(1, width - 1)), max_size=6))
        rows.append(np.isin(np.arange(width), list(starts)).cumsum())
    return np.array(rows, np.int32), n, draw(st.sampled_from([*PLACEMENTS, "striped"]))


@settings(max_examples=150, deadline=None)
@given(packed(), st.sampled_from([0, 3, 100]), st.sampled_from([0, 2, 100]))
def test_all_pairs_that_may_meet_do_and_once(rows: tuple[np.ndarray, int, str], small: int, steps: int) -> None:
    documents, n, name = rows
    columns = PLACEMENTS.get(name, striped)(documents, n)
    n_rows, width = documents.shape
    met = np.zeros((n_rows, width, width), int)
    with patch.object(work, "SMALL", small), patch.object(work, "STEPS", steps):
        for rank in range(n):
            seen = np.zeros((n_rows, width // n), bool)
            for place, first, last, q0, q1, k0, k1, kind in work.work(Holders(columns, documents), rank).tolist():
                for row in range(first, last):
                    q, k = columns[rank, row, q0:q1], columns[place, row, k0:k1]
                    mask = np.ones((len(q), len(k)), bool)
                    if kind == CAUSAL:
                        assert len(q) == len(k)
                        mask = np.tril(mask)
                    elif kind == MASKED:
                        mask = (documents[row, q][:, None] == documents[row, k]) & (q[:, None] >= k)
                        assert mask.any(1).all()  # kernels have no answer for a query without a key
                    met[row][np.ix_(q, k)] += mask
                    if place == rank:
                        assert not seen[row, q0:q1].any()  # what first fills a result must fill it once
                        seen[row, q0:q1] = True
            assert seen.all()
    causal = np.tril(np.ones((width, width), int))
    assert np.array_equal(met, (documents[:, :, None] == documents[:, None, :]) * causal)


def test_a_row_of_one_document_is_one_call_a_block() -> None:
    """Whatever other rows of its microbatch hold, and rows that are alike share it."""
    documents = np.zeros((3, 32), np.int32)
    documents[2, 20:] = 1
    for rank, halves in ((0, [(1, (4, 8), (0, 8))]), (1, [(0, (0, 8), (0, 4))])):
        table = work.work(Holders(zigzag(documents[:, :16], 2), None), rank).tolist()
        (q, k), place = halves[0][1:], halves[0][0]
        assert table == [[rank, 0, 3, 0, 8, 0, 8, CAUSAL], [place, 0, 3, *q, *k, FULL]]
        mixed = work.work(Holders(zigzag(documents, 2), documents), rank).tolist()
        assert [r for r in mixed if r[1] == 0] == [
            [rank, 0, 2, 0, 16, 0, 16, CAUSAL], [place, 0, 2, *(2 * x for x in q), *(2 * x for x in k), FULL]
        ]  # fmt: skip


# ---- what is computed ------------------------------------------------------------------------------------------------

HEADS = {"ring": (4, 2), "all_gather": (4, 2), "ulysses": (12, 12), "latent": (4, 4)}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_the_definition(pool: Pools, method: str, world: int) -> None:
    heads, groups = HEADS[method]
    kinds = [(name, is_packed, small) for name in PLACEMENTS for is_packed in (False, True)
             for small in ((None, 0, 2) if is_packed else (None,))]  # fmt: skip
    calls = [("attended", method, name, heads, groups, is_packed, small) for name, is_packed, small in kinds]
    expected = {is_packed: cases.dense(cases.inputs(heads, groups, latent=method == "latent"), is_packed)
                for is_packed in (False, True)}  # fmt: skip
    for found in pool(world).run(cases.call, calls):
        for (_, is_packed, _), tensors in zip(kinds, found, strict=True):
            assert tensors.keys() == expected[is_packed].keys()
            assert max(error(tensors[n], x) for n, x in expected[is_packed].items()) < 1e-10


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_those_of_finite_differences(method: str) -> None:
    """What the definition above is held against: its own gradients, by differences of its result."""
    heads, groups = HEADS[method]
    x = cases.inputs(heads, groups, latent=method == "latent")
    found, step = cases.dense(x, True), 1e-6
    generator = torch.Generator().manual_seed(0)
    for name in set(x) - {"grad"}:
        along = torch.randn(x[name].shape, generator=generator, dtype=torch.float64)
        ends = [cases.dense({**x, name: x[name] + sign * step * along}, True)["y"] for sign in (1, -1)]
        slope = ((ends[0] - ends[1]) * x["grad"]).sum() / (2 * step)
        assert slope.item() == pytest.approx((found[name] * along).sum().item(), rel=1e-6)


def test_a_method_is_only_needed_where_rows_are_cut() -> None:
    run = cases.Run(Mesh.single(), context="no such method")
    assert type(context_attention(run)).__name__ == "LocalAttention"


# ---- labels and leaks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("cp", [2, 4])
def test_labels_are_the_next_tokens(pool: Pools, cp: int, placement: str) -> None:
    config = changed(dense_tiny(), "context.placement", placement)
    config = changed(changed(config, "parallel", f"cp{cp}"), "train.microbatches", 1)
    for tokens, targets in pool(cp).run(cases.labels, config):
        assert tokens == list(range(1, 17))
        assert targets == [*range(2, 17), IGNORE]


def long(config: RunConfig) -> RunConfig:
    return changed(config, "data.sequence_length", 24)


@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_documents_do_not_see_each_other(pool: Pools, cp: int, model: str) -> None:
    config = long(dense_tiny() if model == "dense" else moe_tiny())
    methods = ("ring", "all_gather") if model == "dense" else ("ring", "latent")
    of = cases.documents(True)[:1]
    tokens = torch.randint(0, 37, (1, 24), generator=torch.Generator().manual_seed(5))
    other = tokens.clone()
    other[0, :5] = (other[0, :5] + 1) % 37
    edges = np.concatenate([[0], np.cumsum(cases.LENGTHS)])
    alone = [pool(1).run(cases.logits, changed(config, "parallel", "single"), tokens[:, a:b], None)[0]
             for a, b in pairwise(edges.tolist())]  # fmt: skip
    for method in methods if cp > 1 else methods[:1]:
        run = changed(changed(config, "context.method", method), "parallel", f"cp{cp}" if cp > 1 else "single")
        (before, after), *_ = pool(cp).run(cases.call, [("logits", run, x, of) for x in (tokens, other)])
        assert error(before, torch.cat(alone, 1)) < 1e-12
        assert not torch.equal(before[:, :5], after[:, :5])
        if model == "dense":
            assert torch.equal(before[:, 5:], after[:, 5:])
        else:
            assert error(after[:, 5:], before[:, 5:]) < 1e-12


# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "model", "dtype"),
    [
        ("cp2", "moe", "bfloat16"),
        ("cp2", "dense", "float64"),
        ("cp2-tp2", "moe", "float32"),
        ("cp4", "dense", "float32"),
        ("cp4", "moe", "float64"),
    ],
)
def test_bytes_are_the_closed_form(pool: Pools, layout: str, model: str, dtype: str) -> None:
    config = long(dense_tiny() if model == "dense" else moe_tiny())
    config = changed(changed(changed(config, "parallel", layout), "train.dtype", dtype), "train.microbatches", 2)
    closed = costs(config, config.dims)
    assert {"ring", "all_gather"} <= closed.keys()
    for method, cost in closed.items():
        found = pool(config.dims.world).run(cases.attention_bytes, changed(config, "context.method", method))
        assert found == [cost.sent_bytes] * config.dims.world, method


# ---- placements ------------------------------------------------------------------------------------------------------


def test_balanced_pieces_are_no_finer_than_they_must_be() -> None:
    one = np.zeros((2, 64), np.int32)
    assert {tuple(x) for x in balanced(one, 2)[:, 0]} == {tuple(x) for x in zigzag(one, 2)[:, 0]}
    assert np.array_equal(contiguous(one, 4)[1, 0], np.arange(16, 32))
