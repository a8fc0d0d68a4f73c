"""Attention over rectangles, triangles and masked squares of two blocks of keys is that over all, with gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.ops.blocks import CAUSAL, FULL, MASKED, Keys, Pairs, Places, attend_, attend_backward_
from fivefold.ops.partial import wide
from tests.helpers import error
from tests.ops.reference import naive_attention

SCALE = 0.4
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2], [0] * 12, [0] * 12])
"""Of the rows' 12 columns; this rank has the last 8 as queries and own keys, another the first 4."""
OWN = [
    Pairs(0, 1, 0, 5, 0, 5, MASKED),  # the end of document 0 and document 1
    Pairs(0, 1, 5, 8, 5, 8, CAUSAL),
    Pairs(1, 3, 0, 8, 0, 8, CAUSAL),  # two rows that are alike
]
OTHERS = [Pairs(0, 1, 0, 1, 0, 4, FULL), Pairs(1, 3, 0, 8, 0, 4, FULL)]


def inputs(heads: int, groups: int) -> list[Tensor]:
    """q, k, v and a gradient; E = 6, V = 4."""
    generator = torch.Generator().manual_seed(3)
    shapes = (3, 8, heads, 6), (3, 12, groups, 6), (3, 12, groups, 4), (3, 8, heads, 4)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def places(first_key: int, last_key: int) -> Places:
    columns = torch.arange(12).expand(3, -1)
    both = torch.stack([DOCUMENTS, columns])
    return Places(both[..., 4:], both[..., first_key:last_key])


def by_blocks(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Result and gradients, one block after the other, summed up in float32 at least."""
    dtype = wide(q.dtype)
    out, lse = torch.empty(grad.shape, dtype=dtype), torch.empty(3, q.shape[2], 8, dtype=dtype)
    blocks = [(slice(4, 12), OWN, places(4, 12)), (slice(0, 4), OTHERS, places(0, 4))]
    for i, (at, pairs, where) in enumerate(blocks):
        attend_(out, lse, q, Keys(k[:, at], v[:, at], pairs, where), scale=SCALE, first=i == 0)
    result = out.to(q.dtype)
    dq, dk, dv = torch.empty(q.shape, dtype=dtype), torch.zeros(k.shape, dtype=dtype), torch.zeros(v.shape, dtype=dtype)
    for i, (at, pairs, where) in enumerate(blocks):
        attend_backward_((dq, dk[:, at], dv[:, at]), grad, result, lse, q, Keys(k[:, at], v[:, at], pairs, where),
                         scale=SCALE, first=i == 0)  # fmt: skip
    return result, dq, dk, dv


def whole(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """The same from the definition."""
    causal = torch.arange(4, 12)[:, None] >= torch.arange(12)
    mask = (DOCUMENTS[:, 4:, None] == DOCUMENTS[:, None, :]) & causal
    leaves = q, k, v = tuple(x.detach().clone().requires_grad_() for x in (q, k, v))
    y, _ = naive_attention(q, k, v, SCALE, mask)
    return (y.detach(), *torch.autograd.grad(y, leaves, grad))


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_blocks_add_up(heads: int, groups: int) -> None:
    x = inputs(heads, groups)
    assert max(error(a, b) for a, b in zip(by_blocks(*x), whole(*x), strict=True)) < 1e-12


def test_low_precision_is_rounded_once() -> None:
    """Against the definition on the same rounded inputs: no error of a sum of parts on top of that of the parts."""
    x = [t.bfloat16() for t in inputs(4, 2)]
    found = by_blocks(*x)
    assert [t.dtype for t in found] == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
    expected = whole(*(t.double() for t in x))
    assert max(error(a.double(), b) for a, b in zip(found, expected, strict=True)) < 2e-2


def test_only_masked_pairs_have_a_mask() -> None:
    own = places(4, 12)
    assert [own.mask(p) is None for p in OWN] == [False, True, True]
    assert own.mask(OWN[0])[0].int().tolist() == [  # type: ignore[index]
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 1, 1, 1, 1],
    ]


def test_pairs_count_keys_from_where_a_block_is_cut() -> None:
    moved = Pairs(1, 3, 0, 8, 2, 4, FULL).moved(2)
    assert moved == Pairs(1, 3, 0, 8, 0, 2, FULL)
    assert (moved.queries, moved.keys) == ((slice(1, 3), slice(0, 8)), (slice(1, 3), slice(0, 2)))
