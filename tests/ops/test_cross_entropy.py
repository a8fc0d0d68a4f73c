from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.ops.cross_entropy import IGNORE, chunked_cross_entropy
from fivefold.ops.linear import WeightGradQueue


def same(t: Tensor) -> Tensor:
    return t


def one_rank(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int, **options: object) -> Tensor:
    options = {"first_row": 0, "vocab_size": weight.shape[0], "reduce_max": same, "reduce_sum": same} | options
    return chunked_cross_entropy(hidden, weight, targets, chunk_rows=chunk_rows, **options)


class Ranks:
    """``size`` threads that stand for ranks; reductions meet at a barrier and add in rank order."""

    def __init__(self, size: int) -> None:
        self.size, self.slots = size, [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def reduce(self, rank: int, combine: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(value: Tensor) -> Tensor:
            self.slots[rank] = value
            self.barrier.wait()
            result = combine(torch.stack(self.slots))
            self.barrier.wait()
            return result

        return call

    def run(self, body: Callable[[int, Callable, Callable], Tensor]) -> list[Tensor]:
        out: list[Tensor | Exception] = [torch.empty(0)] * self.size

        def work(rank: int) -> None:
            try:
                maximum = self.reduce(rank, lambda t: t.amax(0))
                out[rank] = body(rank, maximum, self.reduce(rank, lambda t: t.sum(0)))
            except Exception as error:
                out[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for value in out:
            if isinstance(value, Exception):
                raise value
        return out


def problem(n: int, width: int, vocab: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(n, width, dtype=torch.float64), torch.randn(vocab, width, dtype=torch.float64)
    targets = torch.randint(0, vocab, (n,))
    targets[::4] = IGNORE
    return hidden.to(dtype), weight.to(dtype), targets


def reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    loss = F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    return (loss, *torch.autograd.grad(loss, (hidden, weight)))


def split(
    hidden: Tensor, weight: Tensor, targets: Tensor, size: int, chunk_rows: int, deferred: bool
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Loss of each rank, gradient of hidden summed over ranks, gradient of the padded weight."""
    vocab = weight.shape[0]
    rows = -(-vocab // size)
    padded = F.pad(weight, (0, 0, 0, rows * size - vocab))
    shards = [nn.Parameter(shard.clone()) for shard in padded.split(rows)]
    copies = [hidden.clone().requires_grad_() for _ in range(size)]

    def body(rank: int, reduce_max: Callable, reduce_sum: Callable) -> Tensor:
        queue = WeightGradQueue() if deferred else None
        loss = chunked_cross_entropy(
            copies[rank],
            shards[rank],
            targets,
            first_row=rank * rows,
            vocab_size=vocab,
            chunk_rows=chunk_rows,
            reduce_max=reduce_max,
            reduce_sum=reduce_sum,
            queue=queue,
        )
        (loss * 0.5).backward()
        if queue is not None:
            assert shards[rank].grad is None
            ((parameter, gradient),) = queue.run()
            assert parameter is shards[rank]
            parameter.grad = gradient
        return loss.detach()

    losses = Ranks(size).run(body)
    return losses, sum(c.grad for c in copies), torch.cat([shard.grad for shard in shards])


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("chunk_rows", [1, 5, 100])
@pytest.mark.parametrize("deferred", [False, True])
def test_any_split_equals_pytorch(size: int, chunk_rows: int, deferred: bool) -> None:
    hidden, weight, targets = problem(13, 6, 37)
    losses, grad_hidden, grad_weight = split(hidden, weight, targets, size, chunk_rows, deferred)
    want, want_hidden, want_weight = reference(hidden, weight, targets)
    for loss in losses:
        assert torch.equal(loss, losses[0])
    torch.testing.assert_close(losses[0], want, rtol=1e-13, atol=0)
    torch.testing.assert_close(grad_hidden, want_hidden / 2, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(grad_weight[:37], want_weight / 2, rtol=1e-12, atol=1e-13)
    assert (grad_weight[37:] == 0).all()
    assert (grad_hidden[::4] == 0).all()


@pytest.mark.parametrize("size", [4, 8])
def test_a_rank_with_nothing_but_padding(size: int) -> None:
    hidden, weight, targets = problem(7, 4, 5)  # 5 rows on 4 ranks of 2: the last is all padding; on 8: three are
    losses, grad_hidden, grad_weight = split(hidden, weight, targets, size, 3, False)
    want, want_hidden, want_weight = reference(hidden, weight, targets)
    torch.testing.assert_close(losses[0], want, rtol=1e-13, atol=0)
    torch.testing.assert_close(grad_hidden, want_hidden / 2, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(grad_weight[:5], want_weight / 2, rtol=1e-12, atol=1e-13)
    assert (grad_weight[5:] == 0).all()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_known_value(size: int) -> None:
    """The logits 0, 1, 2, 3 with label 3."""
    weight = torch.tensor([[0.0], [1.0], [2.0], [3.0]], dtype=torch.float64)
    losses, *_ = split(torch.ones(1, 1, dtype=torch.float64), weight, torch.tensor([3]), size, 1, False)
    assert [round(float(loss), 7) for loss in losses] == [0.4401897] * size


@pytest.mark.parametrize("size", [1, 2])
def test_no_targets_at_all(size: int) -> None:
    hidden, weight, targets = problem(6, 4, 7)
    losses, grad_hidden, grad_weight = split(hidden, weight, torch.full_like(targets, IGNORE), size, 4, False)
    assert all(loss == 0 for loss in losses)
    assert (grad_hidden == 0).all()
    assert (grad_weight == 0).all()
    losses, grad_hidden, grad_weight = split(hidden[:0], weight, targets[:0], size, 4, False)
    assert all(loss == 0 for loss in losses)
    assert (grad_hidden.shape, int(grad_weight.count_nonzero())) == ((0, 4), 0)


def test_gradcheck() -> None:
    hidden, weight, targets = problem(5, 3, 7)
    hidden.requires_grad_()
    weight.requires_grad_()
    torch.autograd.gradcheck(lambda h, w: one_rank(h, w, targets, 2, vocab_size=6), (hidden, weight[:6].detach()))
    targets = targets.clamp(max=5)
    torch.autograd.gradcheck(lambda h, w: one_rank(h, w, targets, 2, vocab_size=6), (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_low_precision(dtype: torch.dtype, scale: float) -> None:
    """As good as PyTorch's own float32 loss of the same rounded logits."""
    hidden, weight, targets = problem(300, 16, 101)
    hidden, weight = (hidden * scale).to(dtype).requires_grad_(), (weight / 4).to(dtype).requires_grad_()
    want = F.cross_entropy((hidden @ weight.t()).float(), targets, reduction="sum")
    want_hidden, want_weight = torch.autograd.grad(want, (hidden, weight))
    loss = one_rank(hidden, weight, targets, 32)
    loss.backward()
    assert (loss.dtype, hidden.grad.dtype, weight.grad.dtype) == (torch.float32, dtype, dtype)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    for got, expected in ((loss, want), (hidden.grad, want_hidden), (weight.grad, want_weight)):
        assert (got - expected).abs().max() < tolerance * expected.abs().max()


def test_chunks_of_a_bfloat16_weight_gradient_are_summed_in_float32() -> None:
    hidden, weight, targets = problem(600, 8, 5, torch.bfloat16)
    weight.requires_grad_()
    *_, want = reference(hidden, weight, targets)
    errors = []
    for chunk_rows in (600, 1):
        (gradient,) = torch.autograd.grad(one_rank(hidden, weight, targets, chunk_rows), weight)
        errors.append(float((gradient.double() - want).abs().max() / want.abs().max()))
    assert errors[1] < 1.5 * errors[0] < 0.02


def test_evaluation_computes_no_gradient() -> None:
    hidden, weight, targets = problem(6, 4, 7)
    weight.requires_grad_()
    want, *_ = reference(hidden, weight, targets)
    calls: list[tuple[int, ...]] = []

    def count(t: Tensor) -> Tensor:
        calls.append(tuple(t.shape))
        return t

    with torch.no_grad():
        loss = one_rank(hidden.requires_grad_(), weight, targets, 4, reduce_max=count, reduce_sum=count)
    assert not loss.requires_grad
    assert calls == [(4,), (2, 4), (2,), (2, 2)]
    torch.testing.assert_close(loss, want, rtol=1e-13, atol=0)
    only_hidden = one_rank(hidden, weight.detach(), targets, 4)
    only_hidden.backward()
    assert hidden.grad is not None


def test_backward_can_run_twice() -> None:
    hidden, weight, targets = problem(6, 4, 7)
    weight.requires_grad_()
    loss = one_rank(hidden, weight, targets, 4)
    (first,) = torch.autograd.grad(loss * 3, weight, retain_graph=True)
    (second,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(first, second * 3, rtol=1e-15, atol=0)


def test_bad_input_is_refused() -> None:
    hidden, weight, targets = problem(6, 4, 7)
    for bad in (7, -1, -99):
        with pytest.raises(RuntimeError, match="outside the vocabulary"):
            one_rank(hidden, weight, targets.clone().index_fill_(0, torch.tensor([3]), bad), 4)
    with pytest.raises(ValueError, match="Pass the parameter itself"):
        one_rank(hidden, weight.requires_grad_() * 1, targets, 4, queue=WeightGradQueue())


def test_logits_of_all_tokens_never_exist() -> None:
    hidden, weight, targets = problem(64, 4, 50)
    seen: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                seen.append(out.numel())
            return out

    with Sizes():
        one_rank(hidden.requires_grad_(), weight.requires_grad_(), targets, 8).backward()
    assert max(seen) == 8 * 50


def test_meta() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        hidden, weight = torch.empty(6, 4, device="meta", dtype=dtype), torch.empty(8, 4, device="meta", dtype=dtype)
        hidden.requires_grad_()
        weight.requires_grad_()
        loss = one_rank(hidden, weight, torch.empty(6, device="meta", dtype=torch.int64), 4, vocab_size=7)
        loss.backward()
        assert (loss.shape, hidden.grad.shape, weight.grad.shape) == ((), (6, 4), (8, 4))
