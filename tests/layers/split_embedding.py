"""Cases for the pool: a table split by rows among ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.layers.embedding import Embedding
from fivefold.mesh.parameter import Init
from fivefold.mesh.pool_worker import RankContext
from fivefold.mesh.run import Run
from fivefold.ops.linear import WeightGradQueue
from tests.helpers import materialise, microbatch


def rows_of_a_table(context: RankContext, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """This rank's tokens, its rows' gradient at once and deferred, and how many jobs waited."""
    run = Run(context.mesh(f"tp{context.world}" if context.world > 1 else "single"))
    layer = Embedding(run, 7, 5, Init(std=1.0))
    materialise({"embed": layer}, run)
    y = layer(None, microbatch(tokens))
    g = torch.arange(float(y.numel()), dtype=y.dtype).view_as(y) + run.mesh.tp.rank
    y.backward(g)
    assert layer.weight.grad is not None
    at_once, layer.weight.grad = layer.weight.grad, None
    queue = WeightGradQueue()
    with run.deferring(queue):
        later = layer(None, microbatch(tokens))
    later.backward(g)
    assert layer.weight.grad is None and torch.equal(later, y)
    jobs = list(queue.run())
    assert all(p is layer.weight for p, _ in jobs)
    return y, at_once, jobs[0][1], len(jobs)
