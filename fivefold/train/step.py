"""One optimizer step. Everything a step does is in ``train_step``, in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..mesh.collectives import sum_values
from .balance import Load, begin_counting, update_balance
from .batch import Batch
from .gradients import clip, gradient_norm, refuse_non_finite
from .optimizer import learning_rate
from .state import TrainState


@dataclass(frozen=True)
class StepStats:
    """What a step was like. Tensors are scalars on the device, I on every rank."""

    loss: Tensor
    """Mean cross-entropy over the batch's targets, in nats per token."""
    largest_rank_loss: Tensor
    """The largest of the data ranks' shares of ``loss``, times their number."""
    grad_norm: float
    """L2 norm of the whole gradient before clipping."""
    lr: float
    n_targets: Tensor
    """Targets that counted."""
    load: Load
    """What the experts saw."""


def train_step(state: TrainState, batch: Batch) -> StepStats:
    """Advance ``state`` by one step.

    Each loss term is divided by its count over the whole batch before backward, so that every sum after it, over
    microbatches and over ranks, is a plain sum, however ragged the batch and whatever the layout.

    Raises:
        NonFiniteGradient: on every rank, before anything is updated.
    """
    config, mesh = state.config, state.mesh
    step = state.step + 1
    lr = learning_rate(step, config.train.steps, config.optim)
    begin_counting(state.experts)

    share = state.executor.step(batch.microbatches)
    shares = share.new_zeros(mesh.dims.data)  # one sum that tells the data ranks apart, not a sum and a maximum
    shares[mesh.data_rank()] = share
    shares = sum_values(shares, mesh.join("pp", "ddp", "fsdp", "cp"))
    loss, largest = shares.sum(), shares.max() * mesh.dims.data

    state.run.progress.at("optimizer")
    norm = gradient_norm(state.shards, mesh).item()
    refuse_non_finite(state.shards, norm, step, lr, mesh)
    clip(state.shards, norm, config.optim.max_norm)
    if state.optimizer is not None:
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        state.optimizer.step()
    load = update_balance(state.experts, state.expert_layers, mesh)

    state.step = step
    state.targets += int(batch.n_targets)
    return StepStats(loss, largest, norm, lr, batch.n_targets, load)
