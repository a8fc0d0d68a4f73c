"""Reading rows of a table, with a gradient that can wait."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fivefold.ops.embedding import embedding
from fivefold.ops.linear import WeightGradQueue

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def table(dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.randn(7, 4, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [[3], [[0, 6, 6], [2, 0, 0]], [], [[]]])
def test_deferred_equals_direct_bit_for_bit(rows: list, dtype: torch.dtype) -> None:
    """Rows that are read several times too."""
    w, at = table(dtype), torch.tensor(rows, dtype=torch.int64)
    out = F.embedding(at, w)
    g = torch.randn_like(out)
    out.backward(g)
    want, w.grad = w.grad, None
    queue = WeightGradQueue()
    ours = embedding(at, w, queue)
    assert torch.equal(ours, out)
    ours.backward(g)
    assert w.grad is None
    ((p, gradient),) = queue.run()
    assert p is w and gradient.dtype == dtype and want is not None and torch.equal(gradient, want)


def test_gradcheck() -> None:
    at = torch.tensor([[1, 1, 0], [6, 2, 1]])
    torch.autograd.gradcheck(lambda w: embedding(at, w), (table(),))

    def deferred(x: Tensor, w: nn.Parameter) -> Tensor:
        """The waiting gradient as a function of what comes into it."""
        queue = WeightGradQueue()
        torch.autograd.backward(embedding(at, w, queue), x)
        ((_, gradient),) = queue.run()
        return gradient

    w, x = table(), torch.randn(2, 3, 4, dtype=torch.float64)
    naive = torch.stack([sum((x[i, j] for i in range(2) for j in range(3) if at[i, j] == v), torch.zeros(4))
                         for v in range(7)])  # fmt: skip
    assert torch.allclose(deferred(x, w), naive, rtol=1e-14, atol=0)


def test_under_recompute_it_waits_once() -> None:
    w, queue, at = table(), WeightGradQueue(), torch.tensor([1, 5])
    y = checkpoint(lambda at: embedding(at, w, queue).sin(), at, use_reentrant=False)
    assert isinstance(y, Tensor)
    y.sum().backward()
    assert len(queue) == 1
    ((p, gradient),) = queue.run()
    assert p is w and torch.equal(gradient[at], w.detach()[at].cos())


def test_nothing_waits_without_a_gradient() -> None:
    w, queue, at = table(), WeightGradQueue(), torch.tensor([1])
    with torch.no_grad():
        assert not embedding(at, w, queue).requires_grad
    assert not embedding(at, w.requires_grad_(False), queue).requires_grad
    assert len(queue) == 0


def test_a_weight_that_is_no_leaf_is_refused() -> None:
    w, at = table(), torch.tensor([1])
    with pytest.raises(ValueError, match=r"weight of shape \(7, 4\) is computed from another tensor"):
        embedding(at, w * 2, WeightGradQueue())
    assert embedding(at, w * 2).requires_grad  # at once it may be
