"""What the benchmarks of context parallelism count is right, and the bytes they count meet their goals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from benchmarks import context, context_counted
from benchmarks.live import Live
from benchmarks.work import on_one_row
from fivefold.config.context import costs
from fivefold.layers.context.attend import attend
from fivefold.layers.context.base import Heads
from fivefold.layers.context.local import ALONE
from fivefold.layers.context.work import prepared
from fivefold.layers.microbatch import MicroBatch
from fivefold.mesh.pool import Pool

Pools = Callable[[int], Pool]


def test_work_of_the_busiest_rank() -> None:
    one = np.zeros((1, 8), np.int32)
    assert context.imbalance(one, 2, "contiguous") == (26 / 18, 1.0)  # queries see 1+2+3+4 and 5+6+7+8 keys
    assert context.imbalance(one, 2, "zigzag") == (1.0, 1.0)


def test_masked_documents_compute_more_than_they_need() -> None:
    pairs = np.repeat(np.arange(4, dtype=np.int32), 2)[None]  # four documents of two tokens, masked in one call a rank
    busiest, waste = context.imbalance(pairs, 2, "contiguous")
    assert (busiest, waste) == (1.0, 2 * 16 / 12)


def test_even_placements_are_within_their_goal() -> None:
    assert context.imbalance(np.zeros((2, 4096), np.int32), 8, "zigzag")[0] <= context.GOAL
    packed = context.packed_rows(2, 4096)
    assert len(np.unique(packed[0])) > 3
    assert context.imbalance(packed, 8, "balanced")[0] <= context.GOAL < context.imbalance(packed, 8, "zigzag")[0]


def test_latent_and_ring_change_places_at_the_row_that_is_printed() -> None:
    last = context.longest_row_of_latent("cp8", 50)
    assert context.deepseek_v3("cp8", last, 50)[2]
    assert not context.deepseek_v3("cp8", last + 1024, 50)[2]


@pytest.mark.parametrize(
    ("model", "layout"), [("llama", "cp2-tp2"), ("dsv3", "cp2-tp2"), ("llama", "cp4"), ("dsv3", "cp4")]
)
def test_recorded_bytes_are_the_closed_form(pool: Pools, model: str, layout: str) -> None:
    for method in context_counted.METHODS_OF[model]:
        config = on_one_row(model, layout, method, 32)
        closed = costs(config, config.dims)[method].sent_bytes
        back = 1 if method == "ulysses" else 2  # float32 blocks a second time, and float32 gradients
        ranks = pool(config.dims.world).run(context_counted.attention_bytes, config)
        assert ranks == [(closed / (1 + back), closed * back / (1 + back))] * config.dims.world, method


@pytest.mark.parametrize(("model", "method"), [("llama", "ring"), ("llama", "ulysses"), ("dsv3", "latent")])
def test_activations_fall_with_the_ranks(pool: Pools, model: str, method: str) -> None:
    one, two = ([*pool(n).run(context_counted.peak_bytes, context_counted.counted(model, layout, method, 512))]
                for n, layout in ((1, "single"), (2, "cp2")))  # fmt: skip
    assert 0.6 * one[0] < 2 * max(two) < context_counted.GOAL * one[0]


def test_live_bytes_include_those_inside_an_operator() -> None:
    documents = torch.tensor([[0] * 100 + [1] * 156], dtype=torch.int32)
    zeros = torch.zeros(1, 256, dtype=torch.int64)
    mb = MicroBatch(tokens=zeros, targets=None, positions=zeros, documents=documents, n_targets=1, n_sequences=1)
    q = torch.randn(1, 256, 2, 8)
    prepared(mb, 0)
    with Live() as live:
        attend(q, Heads(q, q), mb, 0.3, ALONE, "")
    last = 156 * 2 * 8 * 4  # bytes: what the document attended last gives, beside the whole result
    assert live.peak >= q.nbytes + q.nbytes + last
