"""Context parallelism: every method under every placement is the dense definition, leaks nothing and loses no label."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config import context as names
from fivefold.config.context import costs
from fivefold.config.errors import ConfigError
from fivefold.config.run import RunConfig
from fivefold.data.placement import PLACEMENTS, balanced, contiguous, zigzag
from fivefold.data.rows import IGNORE
from fivefold.layers.context import METHODS, context_attention, work
from fivefold.layers.microbatch import Holders
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool import Pool
from fivefold.ops.blocks import CAUSAL, FULL, MASKED
from fivefold.recipes.tiny import dense_tiny, moe_tiny
from fivefold.train.batch import Cutter
from tests.helpers import error
from tests.layers import context_cases as cases
from tests.parity import own_context
from tests.parity.grid import changed, row

Pools = Callable[[int], Pool]
MASKS = f"{own_context.__file__}:masked"
"""A user's own method."""
STRIPED = f"{own_context.__file__}:striped"
"""A user's own placement, which deals out single tokens."""


# ---- which pairs -----------------------------------------------------------------------------------------------------


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
    columns = PLACEMENTS.get(name, own_context.striped)(documents, n)
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


def heads(method: str, world: int) -> tuple[int, int]:
    """Query and key heads of a case; whole rows need as many of both as ranks divide."""
    return {"ulysses": (12, 12 if world == 3 else 4), "latent": (4, 4)}.get(method, (4, 2))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("method", [*METHODS, "own"])
def test_every_method_is_the_definition(pool: Pools, method: str, world: int) -> None:
    name, shape = MASKS if method == "own" else method, heads(method, world)
    kinds = [(placement, is_packed, small) for placement in (*PLACEMENTS, STRIPED) for is_packed in (False, True)
             for small in ((None, 0, 2) if is_packed and method != "own" else (None,))]  # fmt: skip
    calls = [("attended", name, placement, *shape, is_packed, small) for placement, is_packed, small in kinds]
    expected = {is_packed: cases.dense(cases.inputs(*shape, latent=method == "latent"), is_packed)
                for is_packed in (False, True)}  # fmt: skip
    for found in pool(world).run(cases.call, calls):
        for (_, is_packed, _), tensors in zip(kinds, found, strict=True):
            assert tensors.keys() == expected[is_packed].keys()
            assert max(error(tensors[n], x) for n, x in expected[is_packed].items()) < 1e-10


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_method_passes_gradcheck(pool: Pools, world: int) -> None:
    """Finite differences of whole rows, causal and with documents of 5, 1, 9, 1 and 8 tokens."""
    calls = [("gradchecked", method, placement, *heads(method, world), is_packed)
             for method in (*METHODS, MASKS) for placement in ("zigzag", "balanced") for is_packed in (False, True)
             ]  # fmt: skip
    for found in pool(world).run(cases.call, calls):
        assert [call for call, passed in zip(calls, found, strict=True) if not passed] == []


@pytest.mark.parametrize("method", METHODS)
def test_low_precision_is_near_the_definition(pool: Pools, method: str) -> None:
    """bfloat16 over four ranks: as near as one rounding of inputs and result."""
    shape = heads(method, 4)
    rounded = {n: t.double() for n, t in cases.inputs(*shape, latent=method == "latent", dtype=torch.bfloat16).items()}
    expected = cases.dense(rounded, True)
    for found in pool(4).run(cases.attended, method, "zigzag", *shape, True, 0, torch.bfloat16):
        assert {t.dtype for t in found.values()} == {torch.bfloat16}
        assert max(error(found[n].double(), x) for n, x in expected.items()) < 2e-2


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
    """Each token of the first document is changed in turn; every document's logits are those it has alone."""
    config = long(dense_tiny() if model == "dense" else moe_tiny())
    of = cases.documents(True)[:1]
    tokens = torch.randint(0, 37, (1, 24), generator=torch.Generator().manual_seed(5))
    others = [tokens.clone() for _ in range(cases.LENGTHS[0])]
    for i, other in enumerate(others):
        other[0, i] = (other[0, i] + 1) % 37
    edges = np.concatenate([[0], np.cumsum(cases.LENGTHS)])
    alone = [pool(1).run(cases.logits, changed(config, "parallel", "single"), tokens[:, a:b], None)[0]
             for a, b in pairwise(edges.tolist())]  # fmt: skip
    methods = ("ring", "all_gather", "ulysses") if model == "dense" else METHODS
    ways = zip(methods, cycle(PLACEMENTS)) if cp > 1 else [("auto", "zigzag")]
    runs = [changed(changed(config, "context.method", a), "context.placement", b) for a, b in ways]
    runs = [changed(run, "parallel", f"cp{cp}" if cp > 1 else "single") for run in runs]
    found, *_ = pool(cp).run(cases.call, [("logits", run, x, of) for run in runs for x in (tokens, *others)])
    later = edges[1]
    for before, *after in (found[i : i + 1 + len(others)] for i in range(0, len(found), 1 + len(others))):
        assert error(before, torch.cat(alone, 1)) < 1e-12
        for i, logits in enumerate(after):
            assert not torch.equal(before[:, i:later], logits[:, i:later])
            if model == "dense":
                assert torch.equal(before[:, later:], logits[:, later:])
            else:
                assert error(logits[:, later:], before[:, later:]) < 1e-12


def test_rows_and_placements_that_cannot_be_are_refused() -> None:
    config = changed(changed(dense_tiny(), "parallel", "cp2"), "train.microbatches", 1)
    mesh = Mesh(config.dims, 0, connect=False)
    rows = cases.OneRow().rows(1, 0, 1)
    back = replace(rows, documents=np.repeat([0, 1, 0], [4, 4, 8]).astype(np.int32)[None])
    with pytest.raises(ConfigError) as found:
        Cutter(config, mesh).shares(back)
    assert found.value.problems == (
        "documents[0, 8]=0 goes back in its row (documents[0, 7]=1). Number the documents of a row in ascending order.",
    )
    config = changed(config, "context.placement", f"{cases.__file__}:only_the_first")
    with pytest.raises(ConfigError, match="only_the_first leaves out a column, or gives it twice"):
        Cutter(config, mesh).shares(rows)


# ---- how a rank runs it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "method"), [("dense", "ring"), ("dense", "ulysses"), ("moe", "latent")])
def test_recompute_changes_nothing(pool: Pools, model: str, method: str) -> None:
    config = changed(row("cp2", model, 3, 2).config, "context.method", method)
    calls = [("trained", changed(config, "train.recompute", mode)) for mode in ("none", "full", "ops")]
    for (loss, gradients), *again in pool(2).run(cases.call, calls):
        for repeated_loss, repeated in again:
            assert repeated_loss == loss
            assert all(torch.equal(repeated[n], x) for n, x in gradients.items())


def test_a_compiled_block_changes_nothing(pool: Pools) -> None:
    config = row("cp2", "dense", 3, 1, method="ring", model__n_layers=1).config
    calls = [("trained", changed(config, "train.compile", backend)) for backend in ("none", "aot_eager")]
    for (loss, gradients), (compiled_loss, compiled) in pool(2).run(cases.call, calls):
        assert compiled_loss == pytest.approx(loss, rel=1e-14)
        assert max(error(compiled[n], x) for n, x in gradients.items()) < 1e-13


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


def test_the_configuration_knows_all_names() -> None:
    """It cannot import the methods, which need torch, nor the placements, which import it."""
    assert tuple(METHODS) == names.METHODS and tuple(PLACEMENTS) == names.PLACEMENTS
