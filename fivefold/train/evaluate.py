"""The held-out loss, in nats per token and in bits per byte: the same number under every layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..mesh.collectives import sum_values
from .batch import Cutter, HeldoutRows, counted, microbatches
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
    config, mesh = state.config, state.mesh
    share = config.data.batch_size // mesh.dims.data
    cutter = Cutter(config, mesh)
    rounds = -(-heldout.n_rows // config.data.batch_size)
    n_targets = torch.zeros((), dtype=torch.int64, device=mesh.device)
    nats = torch.zeros((), dtype=torch.float64, device=mesh.device)
    modules = [m for stage in state.stages.values() for m in stage.parts.values()]
    for m in modules:
        m.eval()
    one = torch.ones((), dtype=torch.int64, device=mesh.device)
    for i in range(rounds):
        first = (i * mesh.dims.data + mesh.data_rank()) * share
        shares = cutter.shares(heldout.rows(first, first + share))
        n_targets += counted(shares)
        nats += state.executor.evaluate(list(microbatches(shares, one, 1)))
    for m in modules:
        m.train()
    for stage in state.stages.values():
        stage.release()
    total = int(sum_values(n_targets, mesh.join("ddp", "fsdp", "cp")))
    loss = float(sum_values(nats, mesh.join("pp", "ddp", "fsdp", "cp")))
    return Evaluation(loss / max(1, total), loss / math.log(2) / max(1, heldout.n_bytes), total)
