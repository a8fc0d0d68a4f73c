"""Learning rates of every step, and which parameters decay."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.config.parts import OptimConfig
from fivefold.mesh.mesh import Mesh
from fivefold.train.optimizer import build_optimizer, learning_rate
from fivefold.train.state import build_state
from tests.parity.grid import changed, row

DECAYS = ("linear", "cosine", "1-sqrt")


def rates(steps: int, **fields: Any) -> list[float]:
    config = OptimConfig(**{"lr": 2.0, "floor": 0.25, **fields})
    return [learning_rate(step, steps, config) for step in range(1, steps + 1)]


@pytest.mark.parametrize("decay", DECAYS)
def test_warm_up_and_both_ends(decay: str) -> None:
    found = rates(20, warmup_steps=5, decay=decay)
    assert found[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert found[-1] == pytest.approx(0.5)
    assert found[5] < 2.0 and all(a > b for a, b in pairwise(found[4:]))


def test_shapes_half_way() -> None:
    """Of a decay over 10 steps, 5 are done at step 10 of 15."""
    half = {decay: rates(15, warmup_steps=5, decay=decay)[9] for decay in DECAYS}
    assert half["linear"] == pytest.approx(2 * (0.25 + 0.75 * 0.5))
    assert half["cosine"] == pytest.approx(2 * (0.25 + 0.75 * 0.5))
    assert half["1-sqrt"] == pytest.approx(2 * (0.25 + 0.75 * (1 - math.sqrt(0.5))))
    quarter = rates(9, warmup_steps=1, decay="cosine")[2]
    assert quarter == pytest.approx(2 * (0.25 + 0.75 * (1 + math.cos(math.pi / 4)) / 2))


@pytest.mark.parametrize("decay", DECAYS)
def test_stable_phase(decay: str) -> None:
    found = rates(20, warmup_steps=4, decay=decay, decay_steps=6)
    assert found[3:14] == [2.0] * 11  # steps 4 to 14
    assert found[14] < 2.0 and found[-1] == pytest.approx(0.5)


def test_no_decay_and_no_warm_up() -> None:
    assert rates(5, decay="none", warmup_steps=2) == [1.0, 2.0, 2.0, 2.0, 2.0]
    assert rates(3, decay="linear", decay_steps=0) == [2.0] * 3
    assert rates(4, decay="linear", floor=0.0) == pytest.approx([1.5, 1.0, 0.5, 0.0])
    assert rates(4, decay="linear", warmup_steps=4) == [0.5, 1.0, 1.5, 2.0]  # nothing is left to decay


@given(st.integers(1, 60), st.data(), st.sampled_from(DECAYS))
def test_between_floor_and_peak_and_never_rising_after_warm_up(steps: int, data: st.DataObject, decay: str) -> None:
    warmup = data.draw(st.integers(0, steps))
    length = data.draw(st.none() | st.integers(0, steps - warmup))
    found = rates(steps, warmup_steps=warmup, decay=decay, decay_steps=length)
    assert found[:warmup] == pytest.approx([2.0 * (i + 1) / max(1, warmup) for i in range(warmup)])
    after = found[max(0, warmup - 1) :]
    assert all(a >= b for a, b in pairwise(after))
    assert all(0.5 - 1e-12 <= rate <= 2.0 for rate in found[warmup:])
    if steps - warmup and length != 0:
        assert found[-1] == pytest.approx(0.5)


def groups(**changes: Any) -> dict[str, float]:
    """Weight decay of every parameter of the tiny model, by name."""
    config = row("single", "moe_q", **changes).config
    state = build_state(config, Mesh.single())
    assert state.optimizer is not None
    by_id = {id(s.value): s.piece.name for s in state.shards}
    return {by_id[id(p)]: group["weight_decay"] for group in state.optimizer.param_groups for p in group["params"]}


def test_norms_do_not_decay_and_embeddings_if_asked() -> None:
    for asked in (True, False):
        found = groups(optim__weight_decay=0.3, optim__decay_embeddings=asked)
        assert len(found) == len(build_state(row("single", "moe_q").config, Mesh.single()).shapes)
        for name, decay in found.items():
            embedding = name in ("embed.weight", "head.weight")
            expected = 0.0 if "norm" in name or (embedding and not asked) else 0.3
            assert decay == expected, name
        assert found["layers.1.ffn.router"] == 0.3


@pytest.mark.parametrize("implementation", ["fused", "foreach", "loop"])
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_optimizer_that_was_asked_for(name: str, implementation: str) -> None:
    changes = {"optim__name": name, "optim__implementation": implementation, "optim__betas": (0.7, 0.8)}
    config = row("single", "dense", **changes).config
    optimizer = build_state(config, Mesh.single()).optimizer
    assert type(optimizer) is {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    for group in optimizer.param_groups:
        assert [i for i in ("fused", "foreach") if group[i]] == [i for i in ("fused", "foreach") if i == implementation]
        assert group["betas"] == (0.7, 0.8) and group["eps"] == config.optim.eps


def test_frozen_parameters_have_no_optimizer_and_a_rank_may_store_nothing() -> None:
    config = changed(row("single").config, "model.builder", "tests.parity.frozen:build")
    state = build_state(config, Mesh.single())
    assert state.optimizer is not None
    optimised = {id(p) for group in state.optimizer.param_groups for p in group["params"]}
    frozen = {s.piece.name for s in state.shards if id(s.value) not in optimised}
    assert "embed.weight" in frozen and "layers.1.attention_norm.weight" in frozen and "head.weight" not in frozen
    assert build_optimizer([], config.optim) is None
