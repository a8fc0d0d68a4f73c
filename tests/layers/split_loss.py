"""Cases for the pool: the loss over a split vocabulary."""

from __future__ import annotations

import torch

from fivefold.mesh.collectives import max_values, sum_values
from fivefold.mesh.pool_worker import RankContext
from fivefold.ops.cross_entropy import chunked_cross_entropy


def loss_of_four_logits(context: RankContext) -> tuple[float, list[float]]:
    """Cross-entropy of logits 0, 1, 2, 3 with label 3, each rank holding its rows; and this rank's weight gradient."""
    tp = context.mesh(f"tp{context.world}" if context.world > 1 else "single").tp
    weight = torch.arange(4.0, dtype=torch.float64)[:, None].chunk(tp.size)[tp.rank].clone().requires_grad_()
    loss = chunked_cross_entropy(
        torch.ones(1, 1, dtype=torch.float64),
        weight,
        torch.tensor([3]),
        first_row=tp.rank * weight.shape[0],
        vocab_size=4,
        chunk_rows=1,
        reduce_max=lambda x: max_values(x, tp),
        reduce_sum=lambda x: sum_values(x, tp),
    )
    loss.backward()
    assert weight.grad is not None
    return loss.item(), weight.grad[:, 0].tolist()
