"""The gradient norm and clipping against torch's own, and gradients that are not finite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fivefold.config.parts import PipelineConfig
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool import Pool
from fivefold.train.gradients import clip, gradient_norm
from fivefold.train.state import build_state
from tests.parity.grid import FROZEN, row

from . import cases

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("max_norm", [0.0, 0.3, 1e9])
def test_clipping_is_torchs(max_norm: float) -> None:
    state = build_state(row("single", "moe").config, Mesh.single())
    plain = []
    for s in state.shards:
        s.value.grad = torch.randn_like(s.value)
        plain.append(nn.Parameter(s.value.detach().clone()))
        plain[-1].grad = s.value.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(plain, max_norm or float("inf"))
    norm = gradient_norm(state.shards, state.mesh)
    assert (
        norm.dtype == torch.float64 == gradient_norm([], state.mesh).dtype and abs(norm - expected) < 1e-12 * expected
    )
    clip(state.shards, norm.item(), max_norm)
    for s, p in zip(state.shards, plain, strict=True):
        assert s.value.grad is not None and p.grad is not None
        assert torch.allclose(s.value.grad, p.grad, rtol=1e-5 if max_norm == 0.3 else 0, atol=0)  # torch adds 1e-6


def test_a_rank_without_gradients_clips_nothing() -> None:
    assert gradient_norm([], Mesh.single()).item() == 0.0
    clip([], 2.0, 1.0)


def test_a_norm_of_half_precision_gradients_is_summed_in_float32() -> None:
    config = row("single", "dense", train__dtype="bfloat16", train__master_dtype="bfloat16").config
    state = build_state(config, Mesh.single())
    for s in state.shards:
        s.value.grad = torch.full_like(s.value, 0.5)
    total = sum(s.value.numel() for s in state.shards)
    assert gradient_norm(state.shards, state.mesh).item() == pytest.approx(0.5 * total**0.5, rel=1e-5)


def test_a_stage_without_gradients_adds_to_the_others_norm(pool: Pools) -> None:
    """Its parameters are frozen, so it does not know what dtype theirs have."""
    frozen = row("pp2", "moe", 1, 2, "none", "1f1b", pipeline__stages=(2, 5), **FROZEN)
    one = pool(1).run(cases.clipped, frozen.config.model_copy(
        update={"parallel": "single", "pipeline": PipelineConfig()}))[0]  # fmt: skip
    for found in pool(2).run(cases.clipped, frozen.config):
        assert found["norm"] == pytest.approx(one["norm"], rel=1e-12)


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2", "tp2", "pp2"])
def test_clipped_gradients_are_one_ranks(pool: Pools, layout: str) -> None:
    one = pool(1).run(cases.clipped, row("single", "moe", optim__max_norm=0.1).config)[0]
    for found in pool(2).run(cases.clipped, row(layout, "moe", optim__max_norm=0.1).config):
        assert found["norm"] == pytest.approx(one["norm"], rel=1e-12) and one["norm"] > 0.1
        total = torch.stack([g.square().sum() for g in found["gradients"].values()]).sum().sqrt()
        assert total.item() == pytest.approx(0.1, rel=1e-10)


PARAMETER = "layers.2.ffn.up"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("layout", "rank"), [("fsdp2", 1), ("fsdp2", 0), ("tp2", 1), ("pp2", 1)])
def test_one_ranks_bad_gradient_stops_all(pool: Pools, layout: str, rank: int, value: float) -> None:
    stopped: list[cases.Stopped] = pool(2).run(cases.not_finite, row(layout, "moe").config, rank, value, PARAMETER)
    assert stopped[0].message == stopped[1].message
    assert f"at step 2 (rank {rank}, parameter {PARAMETER}); nothing was updated" in stopped[0].message
    assert f"the gradient norm is {value}" in stopped[0].message and "optim.lr (now 0.01)" in stopped[0].message
    for s in stopped:
        assert s.changed == [] and s.step == 1 and s.targets == 0


def test_replicas_name_the_first_rank(pool: Pools) -> None:
    stopped = pool(2).run(cases.not_finite, row("ddp2", "dense").config, -1, float("nan"), PARAMETER)
    assert all("(rank 0, parameter layers.2.ffn.up)" in s.message and s.changed == [] for s in stopped)


def test_a_sum_that_overflows(pool: Pools) -> None:
    """Every gradient is finite, their squares are not."""
    config = row("fsdp2", "dense", train__dtype="float32").config
    for s in pool(2).run(cases.not_finite, config, -1, 3e38, PARAMETER):
        assert "the sum of finite gradients overflows" in s.message and s.changed == []


def test_a_good_step_is_not_stopped(pool: Pools) -> None:
    for s in pool(2).run(cases.not_finite, row("fsdp2", "dense").config, 1, 1.0, PARAMETER):
        assert s.message == "" and s.step == 2 and s.changed
