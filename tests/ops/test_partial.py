"""Attention in parts: parts add up to the whole, forward and backward, in every kernel there is on this machine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.ops import partial
from fivefold.ops.partial import merge_, partial_attention, partial_attention_backward, wide
from tests.helpers import error
from tests.ops.reference import naive_attention

SCALE = 0.4


def inputs(heads: int, groups: int, e: int, v: int, dtype: torch.dtype = torch.float64, tokens: int = 7
           ) -> tuple[Tensor, ...]:  # fmt: skip
    """q, k, v and a gradient of the result, as views of wider tensors."""
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, e), (groups, e), (groups, v), (heads, v)
    return tuple(torch.randn(2, tokens, h, 2 * w, generator=generator, dtype=torch.float64).to(dtype)[..., :w]
                 for h, w in shapes)  # fmt: skip


def reference(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Result, lse and gradients."""
    leaves = q, k, v = tuple(x.detach().clone().requires_grad_() for x in (q, k, v))
    y, lse = naive_attention(q, k, v, SCALE, mask)
    return (y.detach(), lse.detach(), *torch.autograd.grad(y, leaves, grad))


@pytest.fixture(params=["cpu", "math"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "math":
        monkeypatch.setattr(partial, "_kernel", lambda *_: (partial._math_forward, partial._math_backward))
    return request.param


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("e", "v"), [(5, 5), (6, 3), (3, 8)])
def test_parts_add_up(kernel: str, heads: int, groups: int, e: int, v: int) -> None:
    q, k, value, grad = inputs(heads, groups, e, v)
    causal = torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 7, 7)
    expected = reference(q, k, value, grad, causal)
    out, lse = torch.empty(2, 7, heads, v, dtype=q.dtype), torch.empty(2, heads, 7, dtype=q.dtype)
    # its own first three keys as a triangle and a rectangle, then the rest of the queries with the other four
    parts = [(slice(0, 3), slice(0, 3), True), (slice(3, 7), slice(0, 3), False), (slice(3, 7), slice(3, 7), True)]
    for i, (a, b, triangle) in enumerate(parts):
        part, part_lse = partial_attention(q[:, a], k[:, b], value[:, b], scale=SCALE, causal=triangle)
        if i < 2:
            out[:, a], lse[:, :, a] = part, part_lse
        else:
            merge_(out[:, a], lse[:, :, a], part, part_lse)
    gradients = [torch.zeros_like(x) for x in (q, k, value)]
    for a, b, triangle in parts:
        found = partial_attention_backward(grad[:, a], q[:, a], k[:, b], value[:, b], out[:, a], lse[:, :, a],
                                           scale=SCALE, causal=triangle)  # fmt: skip
        for total, x, at in zip(gradients, found, (a, b, b), strict=True):
            total[:, at] += x
    assert max(error(x, y) for x, y in zip((out, lse, *gradients), expected, strict=True)) < 1e-12


def test_a_mask(kernel: str) -> None:
    q, k, v, grad = inputs(4, 2, 6, 4)
    mask = torch.rand(2, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.5
    mask |= torch.eye(7, dtype=torch.bool)
    out, lse = partial_attention(q, k, v, scale=SCALE, mask=mask)
    found = partial_attention_backward(grad, q, k, v, out, lse, scale=SCALE, mask=mask)
    expected = reference(q, k, v, grad, mask)
    assert max(error(x, y) for x, y in zip((out, lse, *found), expected, strict=True)) < 1e-12


def test_low_precision_adds_up_in_float32() -> None:
    q, k, v, _ = inputs(4, 2, 8, 8, torch.bfloat16, tokens=64)
    exact, _ = partial_attention(q.double(), k.double(), v.double(), scale=SCALE)
    assert wide(torch.bfloat16) == torch.float32 and wide(torch.float64) == torch.float64
    out, lse = partial_attention(q, k[:, :1], v[:, :1], scale=SCALE)
    out = out.float()
    for i in range(1, 64):
        merge_(out, lse, *partial_attention(q, k[:, i : i + 1], v[:, i : i + 1], scale=SCALE))
    assert lse.dtype == torch.float32 and error(out.double(), exact) < 1e-2


def test_no_exponential_overflows() -> None:
    out, lse = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), 1e4)
    merge_(out, lse, torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), -1e4))
    assert out.item() == 1.0 and lse.item() == 1e4
