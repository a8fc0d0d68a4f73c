from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fivefold.ops import grouped
from fivefold.ops.grouped import grouped_linear
from fivefold.ops.linear import WeightGradQueue

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
COUNTS = {
    "ragged": [3, 5, 1, 7],
    "empty experts": [0, 9, 0, 7],
    "last empty": [16, 0, 0, 0],
    "all to the last": [0, 0, 0, 16],
    "no rows": [0, 0, 0, 0],
}


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def naive(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    return torch.cat([rows @ weight[e].t() for e, rows in enumerate(x.split(counts))])


def make(counts: list[int], k: int, f: int, dtype: torch.dtype) -> tuple[nn.Parameter, nn.Parameter, Tensor]:
    generator = torch.Generator().manual_seed(k + f)
    x, w, g = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((sum(counts), k), (len(counts), f, k), (sum(counts), f))
    )
    return nn.Parameter(x), nn.Parameter(w), g


def poison() -> None:
    """Fills memory that the allocator hands out next with NaN."""
    blocks = [torch.full((n,), torch.nan) for n in (64, 256, 1024, 4096, 16384) for _ in range(4)]
    del blocks


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "f"), [(8, 12), (5, 3)], ids=["aligned", "odd"])
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("deferred", [False, True])
def test_value_and_gradients(
    counts: list[int], dtype: torch.dtype, k: int, f: int, on_host: bool, deferred: bool
) -> None:
    x, w, g = make(counts, k, f, dtype)
    xd, wd = (t.detach().double().requires_grad_() for t in (x, w))
    want = naive(xd, wd, counts)
    want.backward(g.double())
    queue = WeightGradQueue() if deferred else None
    poison()
    out = grouped_linear(x, w, ends_of(counts), counts if on_host else None, queue)
    poison()
    out.backward(g)
    if queue is not None:
        assert w.grad is None
        ((p, w.grad),) = queue.run()
        assert p is w
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for got, expected in ((out, want), (x.grad, xd.grad), (w.grad, wd.grad)):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance * 4)
    for expert, count in enumerate(counts):
        if not count:
            assert (w.grad[expert] == 0).all()


def test_deferred_equals_immediate_bit_for_bit() -> None:
    counts = [3, 0, 13]
    for dtype in DTYPES:
        x, w, g = make(counts, 8, 12, dtype)
        grouped_linear(x, w, ends_of(counts), counts).backward(g)
        want, w.grad, queue = w.grad, None, WeightGradQueue()
        grouped_linear(x, w, ends_of(counts), counts, queue).backward(g)
        ((_, got),) = queue.run()
        assert torch.equal(got, want)


def test_gradcheck() -> None:
    counts = [2, 0, 3]
    x, w, _ = make(counts, 3, 4, torch.float64)
    torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, ends_of(counts), counts), (x, w))


def test_expanded_gradient_and_strided_or_misaligned_input() -> None:
    counts = [6, 10]
    x, w, _ = make(counts, 8, 12, torch.float32)
    want = torch.autograd.grad(naive(x, w, counts).sum(), (x, w))
    storage = torch.zeros(16 * 8 + 1)
    misaligned = storage[1:].view(16, 8).copy_(x.detach()).requires_grad_()
    strided = x.detach().t().contiguous().t().requires_grad_()
    for operand in (x, misaligned, strided):
        got = torch.autograd.grad(grouped_linear(operand, w, ends_of(counts), counts).sum(), (operand, w))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_both_paths_are_exercised() -> None:
    x, w, _ = make([4, 4], 8, 12, torch.float32)
    assert grouped._fused(x, w)
    odd = torch.randn(8, 5)
    assert not grouped._fused(odd, torch.randn(2, 12, 5))
    assert not grouped._fused(x.double(), w.double())
    assert not grouped._fused(x.bfloat16(), w.bfloat16())
    assert not grouped._fused(torch.zeros(129)[1:].view(16, 8), w)


def test_rows_that_no_expert_owns_are_refused() -> None:
    x, w, _ = make([4, 4], 8, 12, torch.float32)
    with pytest.raises(ValueError, match="counts add up to 7, but x has 8 rows"):
        grouped_linear(x, w, ends_of([4, 4]), [4, 3])
    for bad in ([4, 3], [4, 5]):
        with pytest.raises(RuntimeError, match="last end is not the number of rows"):
            grouped_linear(x, w, ends_of(bad))


def test_a_weight_that_is_not_a_leaf_is_refused() -> None:
    x, w, _ = make([4, 4], 8, 12, torch.float32)
    with pytest.raises(ValueError, match="Pass the parameter itself"):
        grouped_linear(x, w * 2, ends_of([4, 4]), None, WeightGradQueue())


def test_meta() -> None:
    for dtype in DTYPES:
        w = nn.Parameter(torch.empty(3, 12, 8, device="meta", dtype=dtype))
        x = torch.empty(10, 8, device="meta", dtype=dtype, requires_grad=True)
        y = grouped_linear(x, w, torch.empty(3, device="meta", dtype=torch.int32))
        y.sum().backward()
        assert (y.shape, y.dtype, w.grad.shape, x.grad.shape) == ((10, 12), dtype, w.shape, x.shape)
