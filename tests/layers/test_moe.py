"""Mixture of experts on one rank: every routing rule, its losses, its counters and its bias."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fivefold.config.model import InitConfig, MoeConfig
from fivefold.layers.dispatch import LocalDispatcher
from fivefold.layers.init import InitRule
from fivefold.layers.moe import MoE, attach
from fivefold.mesh.run import Run
from tests.helpers import error, materialise, microbatch, single
from tests.layers import reference

B, T, D = 3, 8, 12
BASE = MoeConfig(n_experts=8, top_k=3, n_shared=1, expert_dim=4, n_dense_layers=0)
OPTIONS = {
    "top_k": {"top_k": 2},
    "score": {"score": "softmax"},
    "normalise": {"normalise": False},
    "route_scale": {"route_scale": 2.5},
    "score_before": {"score_before": True},
    "groups": {"n_groups": 4, "top_groups": 2},
    "group_max": {"n_groups": 4, "top_groups": 2, "group_score": "max"},
    "one_group": {"n_groups": 2, "top_groups": 1},
    "shared": {"n_shared": 2},
    "no_shared": {"n_shared": 0},
}


def config(**changes) -> MoeConfig:
    return MoeConfig.model_validate({**BASE.model_dump(), **changes})


def build(c: MoeConfig, run: Run | None = None, rate: float = 0.01, bias: bool = True) -> MoE:
    """A layer with random parameters, and a random bias strong enough to change choices."""
    run = run or single()
    moe = MoE(run, c, D, LocalDispatcher(c.n_experts), InitRule(config=InitConfig(std=0.6), n_layers=1), rate)
    materialise({"moe": moe}, run)
    if bias:
        moe.bias.copy_(torch.randn(c.n_experts, generator=torch.Generator().manual_seed(3)) * 0.3)
    return moe


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def batch():
    return microbatch(torch.zeros(B, T, dtype=torch.int64))


def loads(chosen: list[list[int]], n: int = 8) -> list[int]:
    return [sum(e in experts for experts in chosen) for e in range(n)]


@pytest.mark.parametrize("name", ["base", *OPTIONS])
def test_values_gradients_and_counts(name):
    c = config(**OPTIONS.get(name, {}))
    moe, x = build(c), tokens()
    y = moe(x, batch())
    expected, chosen, _ = reference.moe(x.flatten(0, 1), dict(moe.named_parameters()), moe.bias.double(), c)
    leaves = [x, *moe.parameters()]
    g = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad(y, leaves, g)
    theirs = torch.autograd.grad(expected, leaves, g.flatten(0, 1))
    assert max(error(a, b) for a, b in zip((y.flatten(0, 1), *ours), (expected, *theirs), strict=True)) < 1e-12
    assert moe.load.tolist() == loads(chosen)
    assert moe.load.sum() == B * T * c.top_k


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_is_ignored(name):
    """Each option's reference differs from the base's, so that the comparison above would catch it missing."""
    moe, x = build(BASE), tokens().flatten(0, 1)
    p = {n: v.detach() for n, v in moe.named_parameters()}
    if name == "shared":
        p |= {f"shared.{n}": v.detach() for n, v in build(config(n_shared=2)).shared.named_parameters()}
    base, _, _ = reference.moe(x, dict(moe.named_parameters()), moe.bias.double(), BASE)
    changed, _, _ = reference.moe(x, p, moe.bias.double(), config(**OPTIONS[name]))
    assert error(changed, base) > 1e-3


def test_bias_steers_choice_but_not_weights():
    moe, plain, x = build(config(normalise=False)), build(config(normalise=False), bias=False), tokens()
    moe(x, batch())
    plain(x, batch())
    assert moe.load.tolist() != plain.load.tolist()
    with torch.no_grad():  # a bias equal for all experts changes nothing
        moe.bias.fill_(0.7)
        assert torch.equal(moe(x, batch()), plain(x, batch()))


@pytest.mark.parametrize("choice", ["one", "dead"])
def test_empty_experts(choice):
    """All tokens to the same experts, or one expert that nobody chooses: exact zeros where nothing arrives."""
    moe, x = build(config(top_k=1)), tokens()
    with torch.no_grad():
        moe.bias.fill_(0)
        moe.bias[3] = 100 if choice == "one" else -100
    y = moe(x, batch())
    y.sum().backward()
    expected, chosen, _ = reference.moe(x.flatten(0, 1), dict(moe.named_parameters()), moe.bias.double(), moe.config)
    assert error(y.flatten(0, 1), expected) < 1e-12
    assert moe.load.tolist() == loads(chosen)
    for p in (moe.gate, moe.up, moe.down):
        used = p.grad.flatten(1).abs().amax(1) > 0
        assert torch.equal(used, moe.load > 0)
        assert p.grad.isfinite().all()


# ---- losses -----------------------------------------------------------------------------------------------------


def balance_reference(chosen: list[list[int]], logits: Tensor, c: MoeConfig) -> Tensor:
    """Equations 17 to 20 of DeepSeek-V3, summed over the rows."""
    total = logits.new_zeros(())
    scores = logits.sigmoid() if c.score == "sigmoid" else logits.softmax(-1)
    for b in range(B):
        of_row = range(b * T, (b + 1) * T)
        for i in range(c.n_experts):
            f = c.n_experts / (c.top_k * T) * sum(i in chosen[t] for t in of_row)
            p = sum(scores[t, i] / scores[t].sum() for t in of_row) / T
            total = total + f * p
    return total


@pytest.mark.parametrize("losses", [{"balance_loss": 0.3}, {"z_loss": 0.2}, {"balance_loss": 0.3, "z_loss": 0.2}])
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_losses_reach_the_router(losses, score):
    c = config(score=score, **losses)
    moe, x = build(c), tokens()
    mb = microbatch(torch.zeros(B, T, dtype=torch.int64), n_sequences=10)
    y = moe(x, mb)
    g = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = [x, *moe.parameters()]
    ours = torch.autograd.grad((y * g).sum(), leaves)
    expected, chosen, logits = reference.moe(x.flatten(0, 1), dict(moe.named_parameters()), moe.bias.double(), c)
    balance = balance_reference(chosen, logits, c) / 10
    z = logits.exp().sum(-1).log().pow(2).sum() / (10 * T)
    total = (expected * g.flatten(0, 1)).sum() + c.balance_loss * balance + c.z_loss * z
    theirs = torch.autograd.grad(total, leaves)
    assert max(error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-12
    assert error(y.flatten(0, 1), expected) < 1e-12  # the activation itself is unchanged
    assert moe.balance_loss.item() == pytest.approx(balance.item() if c.balance_loss else 0, rel=1e-6)
    assert moe.z_loss.item() == pytest.approx(z.item() if c.z_loss else 0, rel=1e-6)


def test_even_choice_and_scores_have_balance_1():
    moe = build(config(balance_loss=0.1, top_k=8, n_groups=1))
    with torch.no_grad():
        moe.router.zero_()
    moe(tokens(), batch())
    assert moe.balance_loss.item() == pytest.approx(1)


def test_attach_seeds_one_whatever_the_loss():
    x, aux = torch.randn(4, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    y = attach(x, aux)
    assert torch.equal(y, x)
    (y * 5).sum().backward()
    assert aux.grad.item() == 1
    assert torch.equal(x.grad, torch.full((4,), 5.0))


# ---- counters, bias, recompute ----------------------------------------------------------------------------------


def test_evaluation_counts_nothing():
    moe = build(config(balance_loss=0.1, z_loss=0.1))
    moe.eval()
    moe(tokens(), batch())
    assert moe.load.sum() == 0
    assert moe.balance_loss == 0
    assert moe.z_loss == 0


def test_counts_add_up_over_microbatches_and_reset():
    moe = build(config(balance_loss=0.1))
    x, x2 = tokens(0), tokens(1)
    moe(x, batch())
    first = moe.load.clone()
    moe(x2, batch())
    _, chosen, _ = reference.moe(x2.flatten(0, 1), dict(moe.named_parameters()), moe.bias.double(), moe.config)
    assert (moe.load - first).tolist() == loads(chosen)
    assert moe.load.dtype == torch.int64
    moe.reset()
    assert moe.load.sum() == 0
    assert moe.balance_loss == 0


def test_bias_moves_by_its_rate_exactly():
    moe = build(BASE, rate=0.001, bias=False)
    load = torch.tensor([9, 7, 8, 8, 0, 16, 8, 8])  # mean 8
    moe.update_bias(load)
    rate = torch.tensor(0.001, dtype=torch.float32)
    assert torch.equal(moe.bias, rate * torch.tensor([-1.0, 1, 0, 0, 1, -1, 0, 0]))
    moe.update_bias(load)
    assert torch.equal(moe.bias, (rate + rate) * torch.tensor([-1.0, 1, 0, 0, 1, -1, 0, 0]))
    assert moe.bias.dtype == torch.float32


def test_bias_compares_whole_numbers():
    """A mean that is no whole number, with loads one apart far above float32's exact range."""
    moe = build(BASE, rate=0.5, bias=False)
    moe.update_bias(torch.tensor([2**40 + 1, *[2**40] * 7]))
    assert moe.bias.tolist() == [-0.5, *[0.5] * 7]


def test_rate_0_leaves_the_bias():
    moe = build(BASE, rate=0.0)
    before = moe.bias.clone()
    moe.update_bias(torch.arange(8))
    assert torch.equal(moe.bias, before)


def test_bfloat16_routes_in_float32():
    moe = build(BASE)
    materialise({"moe": moe}, single(), dtype=torch.bfloat16)
    seen = []
    route = moe.dispatcher.route
    moe.dispatcher.route = lambda experts: seen.append(experts) or route(experts)
    x = tokens().detach().bfloat16().requires_grad_()
    y = moe(x, batch())
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert moe.bias.dtype == torch.float32
    assert moe.router.grad.dtype == torch.bfloat16
    exact = x.float().flatten(0, 1) @ moe.router.float().T
    chosen = [reference.choose(row.sigmoid(), moe.bias, BASE) for row in exact]
    assert seen[0].tolist() == chosen


def recomputed(run: Run, moe: MoE, x: Tensor, freeze: bool = True) -> Tensor:
    store: list = []
    contexts = lambda: (run.freeze(store, replay=False), run.freeze(store, replay=True))  # noqa: E731
    return checkpoint(moe, x, batch(), use_reentrant=False, **({"context_fn": contexts} if freeze else {}))


def test_recompute_counts_once_and_routes_alike():
    run = single()
    c = config(balance_loss=0.3, z_loss=0.2)
    moe, x = build(c, run), tokens()
    moe(x, batch()).square().sum().backward()
    plain = [p.grad.clone() for p in moe.parameters()]
    counters = [t.clone() for t in (moe.load, moe.balance_loss, moe.z_loss)]
    moe.zero_grad()
    moe.reset()
    y = recomputed(run, moe, x)
    moe.bias.copy_(moe.bias.flip(0) * 5)  # were the route chosen again, it would be another one
    y.square().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(moe.parameters(), plain, strict=True))
    assert all(torch.equal(t, e) for t, e in zip((moe.load, moe.balance_loss, moe.z_loss), counters, strict=True))


def test_recompute_without_freezing_would_count_twice():
    run = single()
    moe, x = build(BASE, run), tokens()
    recomputed(run, moe, x, freeze=False).sum().backward()
    assert moe.load.sum() == 2 * B * T * BASE.top_k
