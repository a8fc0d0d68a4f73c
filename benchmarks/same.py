"""Proof that the plain loop and ours do the same work: equal weights give an equal loss and equal gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fivefold.train.batch import Batches
from fivefold.train.state import TrainState

from .plain import PlainLoop
from .work import UniformRows

TOLERANCE = 1e-4
"""Relative, in float32: the two sum in different orders."""

RENAMED = {"head.norm": "norm", "attention_norm": "norm1", "ffn_norm": "norm2"}
FUSED = ("q", "k", "v")
"""Ours that are parts of one matrix in the plain Llama, in its order."""


def _in_plain(state: TrainState, plain: PlainLoop) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Each of our parameters, the plain model's, and which of its rows are ours."""
    theirs = dict(plain.model.named_parameters())
    for shard in state.shards:
        name = shard.piece.name
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        layer, _, last = name.rpartition(".")
        if f"{layer}.qkv.weight" in theirs and last in FUSED:
            parameter, i = theirs[f"{layer}.qkv.weight"], FUSED.index(last)
            rows = len(parameter) // len(FUSED)
            yield shard.value, parameter, slice(i * rows, (i + 1) * rows)
        else:
            yield shard.value, theirs[name if name in theirs else f"{name}.weight"], slice(None)


def assert_same(state: TrainState, plain: PlainLoop) -> None:
    """Give the plain model our weights, and compare loss and gradients of one batch.

    Args:
        state: on one rank, so that it holds every parameter whole.

    Raises:
        AssertionError: if the two models are not the same function, or a parameter of one is missing in the other.
    """
    with torch.no_grad():
        for ours, theirs, rows in _in_plain(state, plain):
            theirs[rows] = ours.view_as(theirs[rows])
    n_ours, n_theirs = (sum(p.numel() for p in each) for each in
                        ((s.value for s in state.shards), plain.model.parameters()))  # fmt: skip
    assert n_ours == n_theirs, f"{n_ours} parameters, the plain model has {n_theirs}"
    batches = Batches(UniformRows(), state.config, state.mesh)
    rows = batches.rows(1)
    loss = state.executor.step(batches.batch(rows).microbatches)
    batches.close()
    ids = torch.cat([torch.from_numpy(rows.tokens), torch.from_numpy(rows.targets)[:, -1:]], 1)
    expected = plain.loss(ids)
    expected.backward()
    torch.testing.assert_close(loss.float(), expected.detach(), rtol=TOLERANCE, atol=0)
    for ours, theirs, part in _in_plain(state, plain):
        assert ours.grad is not None and theirs.grad is not None
        error = (ours.grad.view_as(theirs[part]) - theirs.grad[part]).abs().max() / theirs.grad.abs().max()
        assert error < TOLERANCE, f"a gradient of shape {tuple(theirs[part].shape)} is off by {error:.1e}"
