from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fivefold.ops.grouped import grouped_linear
from fivefold.ops.linear import WeightGradQueue, linear
from fivefold.ops.norm import rms_norm
from fivefold.ops.swiglu import swiglu

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def parameter(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype))


def accumulate(queue: WeightGradQueue) -> None:
    for p, gradient in queue.run():
        assert gradient.dtype == p.dtype
        assert gradient.shape == p.shape
        p.grad = gradient if p.grad is None else p.grad + gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(5,), (2, 3), (0,), (2, 0)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_deferred_equals_immediate_bit_for_bit(dtype: torch.dtype, rows: tuple[int, ...], with_bias: bool) -> None:
    x, w = parameter(*rows, 8, dtype=dtype), parameter(6, 8, dtype=dtype)
    b = parameter(6, dtype=dtype) if with_bias else None
    out = F.linear(x, w, b)
    g = torch.randn_like(out)
    out.backward(g)
    inputs = [t for t in (x, w, b) if t is not None]
    want = [t.grad for t in inputs]
    for t in inputs:
        t.grad = None
    queue = WeightGradQueue()
    ours = linear(x, w, queue, b)
    ours.backward(g)
    assert torch.equal(ours, out)
    assert w.grad is None
    assert len(queue) == 1
    accumulate(queue)
    assert len(queue) == 0
    for got, expected in zip([t.grad for t in inputs], want, strict=True):
        assert torch.equal(got, expected)


def test_gradcheck() -> None:
    x, w, b = parameter(3, 4), parameter(5, 4), parameter(5)
    torch.autograd.gradcheck(lambda x, b: linear(x, w, WeightGradQueue(), b), (x, b))
    torch.autograd.gradcheck(lambda x, w: linear(x, w), (x, w))


def test_a_weight_used_twice_gets_both_gradients_in_order() -> None:
    x, w = parameter(3, 4), parameter(4, 4)
    linear(linear(x, w), w).sum().backward()
    want = w.grad
    w.grad, queue = None, WeightGradQueue()
    linear(linear(x, w, queue), w, queue).sum().backward()
    jobs = queue.pop_all()
    assert (len(queue), len(jobs)) == (0, 2)
    accumulate(jobs)
    torch.testing.assert_close(w.grad, want, rtol=1e-14, atol=1e-14)


def test_queue_is_first_in_first_out_and_frees_what_it_ran() -> None:
    queue, a, b = WeightGradQueue(), parameter(2), parameter(3)
    order: list[str] = []

    def job(name: str, shape: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            order.append(name)
            assert not torch.is_grad_enabled()
            return torch.zeros(shape)

        return run

    queue.push(a, job("a", 2))
    first = queue.pop_all()
    queue.push(b, job("b", 3))
    first.push(a, job("c", 2))
    for p, _ in first.run():
        assert p is a
        assert len(first) == 2 - len(order)
    assert order == ["a", "c"]
    assert [p is b for p, _ in queue.run()] == [True]


@pytest.mark.parametrize("make", [lambda w: w.to(torch.float32), lambda w: w[:2], lambda w: w * 1])
def test_a_weight_that_is_not_a_leaf_is_refused(make: Callable[[Tensor], Tensor]) -> None:
    w = make(parameter(4, 4))
    x = torch.ones(2, 4, dtype=w.dtype)
    with pytest.raises(ValueError, match="Pass the parameter itself"):
        linear(x, w, WeightGradQueue())
    with torch.no_grad():
        assert linear(x, w, WeightGradQueue()).shape == (2, w.shape[0])


def test_frozen_weight_and_evaluation_leave_no_job() -> None:
    x, w = parameter(2, 4), parameter(4, 4).requires_grad_(False)
    queue = WeightGradQueue()
    linear(x, w, queue).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        linear(x, parameter(4, 4), queue)
    assert len(queue) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_deferral_under_checkpoint(dtype: torch.dtype) -> None:
    w1, w2, w3 = (parameter(8, 8, dtype=dtype, seed=s) for s in range(3))
    experts, norm = parameter(2, 8, 8, dtype=dtype), parameter(8, dtype=dtype)
    ends = torch.tensor([4, 6], dtype=torch.int32)
    x = parameter(6, 8, dtype=dtype)
    inputs = (x, w1, w2, w3, experts, norm)

    def block(x: Tensor, queue: WeightGradQueue | None) -> Tensor:
        h = rms_norm(x, norm, 1e-6)
        h = linear(swiglu(linear(h, w1, queue), linear(h, w2, queue)), w3, queue)
        return x + grouped_linear(h, experts, ends, [4, 2], queue)

    block(x, None).square().sum().backward()
    want = [p.grad for p in inputs]
    for deferred in (False, True):
        for p in inputs:
            p.grad = None
        queue = WeightGradQueue() if deferred else None
        checkpoint(block, x, queue, use_reentrant=False).square().sum().backward()
        if queue is not None:
            assert all(p.grad is None for p in (w1, w2, w3, experts))
            assert len(queue) == 4
            accumulate(queue)
        for p, expected in zip(inputs, want, strict=True):
            assert torch.equal(p.grad, expected)


def test_meta() -> None:
    w = nn.Parameter(torch.empty(6, 4, device="meta"))
    queue = WeightGradQueue()
    y = linear(torch.empty(2, 3, 4, device="meta"), w, queue)
    y.backward(torch.empty_like(y))
    (job,) = queue.run()
    assert (y.shape, job[1].shape, job[1].device.type) == ((2, 3, 6), (6, 4), "meta")
