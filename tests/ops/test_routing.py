from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fivefold.ops import routing

F64 = torch.float64


def test_scores() -> None:
    logits = torch.randn(5, 7, dtype=F64, requires_grad=True)
    torch.testing.assert_close(routing.scores(logits, "sigmoid"), 1 / (1 + (-logits).exp()), rtol=1e-14, atol=0)
    e = logits.exp()
    torch.testing.assert_close(routing.scores(logits, "softmax"), e / e.sum(-1, keepdim=True), rtol=1e-14, atol=0)
    for kind in ("sigmoid", "softmax"):
        torch.autograd.gradcheck(lambda x, kind=kind: routing.scores(x, kind), (logits,))
        assert routing.scores(logits.bfloat16(), kind).dtype == torch.float32
        assert routing.scores(logits, kind).dtype == F64


def brute_force(
    scores: list[float], bias: list[float], k: int, n_groups: int, top_groups: int, group_score: str
) -> list[int]:
    """The best experts of the best set of groups, by trying every set; lower indices win ties."""
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(biased) // n_groups
    groups = [sorted(biased[g * size : (g + 1) * size], reverse=True) for g in range(n_groups)]
    strength = [g[0] if group_score == "max" else sum(g[:2]) for g in groups]
    kept = max(itertools.combinations(range(n_groups), top_groups), key=lambda set_: sum(strength[g] for g in set_))
    candidates = [e for g in kept for e in range(g * size, (g + 1) * size)]
    return sorted(sorted(candidates, key=lambda e: (-biased[e], e))[:k])


@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
@pytest.mark.parametrize(("n_groups", "top_groups"), [(1, 1), (4, 2), (4, 1), (2, 1), (6, 3), (12, 4)])
def test_choice_equals_brute_force(n_groups: int, top_groups: int, group_score: str) -> None:
    scores, bias = torch.rand(40, 12, dtype=F64), torch.randn(12, dtype=F64) * 3 - 2
    k = min(3, 12 // n_groups * top_groups)
    got = routing.choose(scores, bias, k, n_groups, top_groups, group_score)
    for row, chosen in zip(scores.tolist(), got.tolist(), strict=True):
        want = brute_force(row, bias.tolist(), k, n_groups, top_groups, group_score)
        assert sorted(chosen) == want


def test_group_scores_differ_and_dropped_groups_never_win() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.6]])
    assert routing.choose(scores, None, 2, 2, 1, "max").tolist() == [[0, 1]]
    assert routing.choose(scores, None, 2, 2, 1, "top2_sum").tolist() == [[2, 3]]
    # Every biased score of the kept group is negative: masked with 0, the dropped group would win.
    bias = torch.tensor([-9.0, -9.0, -2.0, -2.0])
    assert routing.choose(scores, bias, 2, 2, 1, "top2_sum").tolist() == [[2, 3]]


def test_bias_steers_the_choice_only() -> None:
    scores, bias = torch.tensor([[0.5, 0.4, 0.3]]), torch.tensor([0.0, 0.0, 1.0])
    chosen = routing.choose(scores, bias, 2)
    assert chosen.tolist() == [[2, 0]]
    torch.testing.assert_close(routing.weights(scores, chosen, False, 1.0), torch.tensor([[0.3, 0.5]]))
    torch.testing.assert_close(routing.weights(scores, chosen, True, 2.5), torch.tensor([[0.9375, 1.5625]]))
    torch.testing.assert_close(routing.weights(scores, chosen, False, 16.0), torch.tensor([[4.8, 8.0]]))


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_equal_scores_go_to_the_lower_index(dtype: torch.dtype) -> None:
    scores = torch.full((3, 64), 0.5, dtype=dtype)
    assert routing.choose(scores, None, 6).tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert routing.choose(scores, None, 6, 8, 2, "top2_sum").tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    scores[1, 40] = scores[1, 50] = 0.75
    assert routing.choose(scores, None, 4)[1].tolist() == [40, 50, 0, 1]


def test_choice_that_cannot_be_made_is_refused() -> None:
    for arguments in ((9, 1, 1), (5, 4, 2), (1, 3, 1), (1, 4, 5)):
        with pytest.raises(ValueError, match=f"top_k={arguments[0]} experts cannot be chosen"):
            routing.choose(torch.rand(2, 8), None, *arguments)


def test_weights_gradcheck_and_underflow() -> None:
    scores, chosen = torch.rand(4, 6, dtype=F64, requires_grad=True), torch.tensor([[0, 2], [5, 1], [3, 4], [1, 0]])
    for normalise, scale in ((True, 2.5), (False, 1.0), (False, 16.0)):
        torch.autograd.gradcheck(lambda s, n=normalise, c=scale: routing.weights(s, chosen, n, c), (scores,))
    zero = torch.zeros(1, 3, requires_grad=True)
    out = routing.weights(zero, torch.tensor([[0, 1]]), True, 1.0)
    out.sum().backward()
    assert out.tolist() == [[0.0, 0.0]]
    assert zero.grad.isfinite().all()


@pytest.mark.parametrize("n_tokens", [0, 1, 17])
def test_permutation(n_tokens: int) -> None:
    indices = torch.randint(0, 5, (n_tokens, 3))
    indices[indices == 3] = 4  # expert 3 gets nothing
    order, counts = routing.permutation(indices, 6)
    flat = indices.flatten().tolist()
    assert order.tolist() == sorted(range(len(flat)), key=lambda i: (flat[i], i))
    assert counts.tolist() == [flat.count(e) for e in range(6)]


def naive_balance(scores: Tensor, chosen: Tensor) -> Tensor:
    """DeepSeek-V3's equations 17 to 20 as written, one row after the other."""
    rows, length, n_experts = scores.shape
    total = scores.new_zeros(())
    for b in range(rows):
        for i in range(n_experts):
            f = n_experts / (chosen.shape[-1] * length) * sum(int(i in chosen[b, t]) for t in range(length))
            p = sum(scores[b, t, i] / scores[b, t].sum() for t in range(length)) / length
            total = total + f * p
    return total


def test_balance_loss() -> None:
    scores = torch.rand(3, 6, 8, dtype=F64, requires_grad=True)
    chosen = routing.choose(scores.flatten(0, 1), None, 2).view(3, 6, 2)
    counts = routing.choice_counts(chosen, 8)
    assert counts.tolist() == [[chosen[b].flatten().tolist().count(e) for e in range(8)] for b in range(3)]
    whole = routing.balance_loss(scores, counts, 2, 6)
    torch.testing.assert_close(whole, naive_balance(scores, chosen), rtol=1e-13, atol=0)
    torch.autograd.gradcheck(lambda s: routing.balance_loss(s, counts, 2, 6), (scores,))
    # Rows cut over ranks: the counts are summed first, the parts of the loss afterwards.
    parts = [routing.balance_loss(s, counts, 2, 6) for s in scores.split([1, 3, 2], dim=1)]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-14, atol=0)
    even = torch.full((2, 8, 4), 0.3)
    assert routing.balance_loss(even, torch.full((2, 4), 4), 2, 8) == pytest.approx(2.0)


def test_router_z_loss() -> None:
    logits = torch.randn(3, 5, dtype=F64, requires_grad=True)
    want = logits.exp().sum(-1).log().square().sum()
    torch.testing.assert_close(routing.router_z_loss(logits), want, rtol=1e-14, atol=0)
    torch.autograd.gradcheck(routing.router_z_loss, (logits,))
    assert routing.router_z_loss(logits.bfloat16()).dtype == torch.float32


def test_meta() -> None:
    scores = routing.scores(torch.empty(6, 8, device="meta", dtype=torch.bfloat16), "sigmoid")
    chosen = routing.choose(scores, torch.empty(8, device="meta"), 2, 4, 2)
    order, counts = routing.permutation(chosen, 8)
    loss = routing.balance_loss(scores.view(2, 3, 8), routing.choice_counts(chosen.view(2, 3, 2), 8), 2, 3)
    assert (chosen.shape, order.shape, counts.shape, loss.shape) == ((6, 2), (12,), (8,), ())
    assert routing.weights(scores, chosen, True, 2.0).shape == (6, 2)
