"""The held-out loss by position: what a plain loop over tokens counts, under any layout."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fivefold.config.run import RunConfig
from fivefold.data.rows import IGNORE
from fivefold.data.synthetic import Synthetic
from fivefold.layers.microbatch import MicroBatch
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool import Pool
from fivefold.train.evaluate import PositionLoss
from fivefold.train.state import build_state
from tests.parity.grid import Row, row

from . import cases

Pools = Callable[[int], Pool]
ROWS = [
    row("single", "moe", 1, 2),
    row("fsdp2", "moe", 3, 2),
    row("cp2", "moe", 3, method="ring"),
    row("cp2", "moe", 1, 2, method="latent", placement="balanced"),
    row("cp4", "dense", 3, 2, method="ulysses", placement="contiguous"),
    row("fsdp2-cp2", "moe_q", 3, 1, "full"),
    row("cp2-tp2", "dense", 1),
    row("pp2-cp2", "moe", 1, 2),
    row("ddp2-tp2", "moe", 1),
]


def naive(config: RunConfig, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Row by row and token by token on one rank, from the logits of its parts."""
    state = build_state(config, Mesh.single())
    cases.train(state, 1)
    length = config.data.sequence_length
    rows = Synthetic(37, length, n_rows, config.train.seed + 1).heldout.rows(0, n_rows)
    nats, counts = np.zeros(length), np.zeros(length, np.int64)
    stage = state.stages[0]
    for r in range(n_rows):
        names = ("tokens", "positions", "documents")
        given = {name: torch.from_numpy(getattr(rows, name)[r : r + 1]) for name in names}
        mb = MicroBatch(**given, targets=None, n_targets=1, n_sequences=1)
        for part in stage.parts.values():
            part.eval()
        with torch.no_grad():
            logits = stage.forward(None, mb, backward_follows=False)[0]
        for t in range(length):
            if rows.targets[r, t] != IGNORE:
                at = rows.positions[r, t]
                nats[at] -= torch.log_softmax(logits[t], 0)[rows.targets[r, t]].item()
                counts[at] += 1
    return nats, counts


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_any_layout_counts_what_a_plain_loop_counts(pool: Pools, row: Row) -> None:
    n_rows = 9  # of batches of 8: some ranks get rows that count nothing
    alone = row.config.model_copy(update={
        "parallel": "single", "context": type(row.config.context)(), "pipeline": type(row.config.pipeline)(),
    })  # fmt: skip
    nats, counts = naive(alone, n_rows)
    assert counts[0] > counts[-1]  # of several documents a row, the last positions are rare
    ranks: list[cases.Placed] = pool(row.world).run(cases.placed, row.config, n_rows)
    for r in ranks:
        np.testing.assert_array_equal(r.found.n_targets, counts)
        np.testing.assert_allclose(r.found.nats, nats, rtol=1e-11)
        np.testing.assert_array_equal(r.found.nats, ranks[0].found.nats)
        assert r.found.mean(0, len(nats)) == pytest.approx(r.whole.loss, rel=1e-12)
        assert r.touched == [] and r.gathered_bytes == 0


def test_means() -> None:
    found = PositionLoss(np.array([1.0, 6.0, 0.0]), np.array([1, 3, 0]))
    assert found.mean(0, 1) == 1 and found.mean(0, 2) == 1.75 and found.mean(1, 3) == 2
    assert math.isnan(found.mean(2, 3))
