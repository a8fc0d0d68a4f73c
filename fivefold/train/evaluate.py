"""The held-out loss, in nats per token and in bits per byte: the same number under every layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..data.rows import IGNORE
from ..mesh.collectives import sum_values
from .batch import Cutter, EvaluationRows, HeldoutRows, Share, counted, microbatches
from .state import TrainState


@dataclass(frozen=True)
class Evaluation:
    """How well held-out text is predicted."""

    loss: float
    """Nats per target token."""
    bits_per_byte: float
    """Bits per byte of text."""
    n_targets: int


def evaluate(state: TrainState, heldout: HeldoutRows) -> Evaluation:
    """Evaluate held-out rows, shared among the data ranks.

    Rows come in batches and microbatches of the training run's size; ranks that have fewer get rows that count nothing,
    so that all make the same calls. Counters, biases and gradients stay as they are.
    """
    mesh = state.mesh
    n_targets = torch.zeros((), dtype=torch.int64, device=mesh.device)
    nats = torch.zeros((), dtype=torch.float64, device=mesh.device)
    one = torch.ones((), dtype=torch.int64, device=mesh.device)
    with _evaluating(state):
        for shares in _shared_out(state, heldout):
            n_targets += counted(shares)
            nats += state.executor.evaluate(list(microbatches(shares, one, 1)))
    total = int(sum_values(n_targets, mesh.join("ddp", "fsdp", "cp")))
    loss = float(sum_values(nats, mesh.join("pp", "ddp", "fsdp", "cp")))
    return Evaluation(loss / max(1, total), loss / math.log(2) / max(1, heldout.n_bytes), total)


@dataclass(frozen=True)
class PositionLoss:
    """How well targets are predicted at each place of their document's piece in a row: what rotary positions see.

    Shapes: all [T], T tokens a row; the target after the token at position i counts at i.
    """

    nats: NDArray[np.float64]
    """Summed loss."""
    n_targets: NDArray[np.int64]

    def mean(self, start: int, stop: int) -> float:
        """Nats per target at positions ``start:stop``; NaN where none counts."""
        n = int(self.n_targets[start:stop].sum())
        return float(self.nats[start:stop].sum()) / n if n else math.nan


def loss_by_position(state: TrainState, rows: EvaluationRows) -> PositionLoss:
    """Evaluate ``rows``, shared among the data ranks, by position: each rank's own targets wherever ``cp`` puts them.

    The last part returns logits, a microbatch's at a time. All ranks find the same.
    """
    mesh, length = state.mesh, state.config.data.sequence_length
    found = torch.zeros(2, length, dtype=torch.float64, device=mesh.device)  # counts up to 2**53 are exact
    with _evaluating(state):
        for shares in _shared_out(state, rows):

            def take(number: int, logits: Tensor, shares: list[Share] = shares) -> None:
                targets, positions = (shares[number].tensors[name].flatten() for name in ("targets", "positions"))
                wide = torch.promote_types(logits.dtype, torch.float32)
                nats = F.cross_entropy(logits.flatten(0, 1).to(wide), targets, ignore_index=IGNORE, reduction="none")
                found.index_add_(1, positions, torch.stack([nats, targets != IGNORE]).double())

            blind = [replace(mb, targets=None) for mb in microbatches(shares, torch.ones(()), 1)]
            state.executor.evaluate(blind, take)
    nats, n_targets = sum_values(found, mesh.join("pp", "ddp", "fsdp", "cp")).cpu().numpy()
    return PositionLoss(nats, n_targets.astype(np.int64))


@contextmanager
def _evaluating(state: TrainState) -> Iterator[None]:
    """Evaluate inside: nothing counts, and what was gathered is dropped after it."""
    modules = [m for stage in state.stages.values() for m in stage.parts.values()]
    for m in modules:
        m.eval()
    yield
    for m in modules:
        m.train()
    for stage in state.stages.values():
        stage.release()


def _shared_out(state: TrainState, rows: EvaluationRows) -> Iterator[list[Share]]:
    """This rank's microbatches of ``rows``, in rounds of a training batch; as many rounds on every rank."""
    config, mesh = state.config, state.mesh
    share = config.data.batch_size // mesh.dims.data
    cutter = Cutter(config, mesh)
    for i in range(-(-rows.n_rows // config.data.batch_size)):
        first = (i * mesh.dims.data + mesh.data_rank()) * share
        yield cutter.shares(rows.rows(first, first + share))
