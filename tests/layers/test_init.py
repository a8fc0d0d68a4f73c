"""Initial weights: the standard deviation of every kind of matrix, and what depth scaling does to activations."""

from __future__ import annotations

import pytest
import torch

from fivefold.config.model import DecoderConfig, GqaConfig, InitConfig, MlaConfig, MoeConfig
from fivefold.mesh.init import CUT
from fivefold.models.decoder import build
from tests.helpers import materialise, microbatch, single

CUT_STD = 0.98658
"""Standard deviation of a standard normal cut at three standard deviations."""


def decoder(**changes) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=512,
        dim=128,
        n_layers=4,
        ffn_dim=256,
        attention=MlaConfig(n_heads=4, q_rank=96, kv_rank=64, nope_dim=32, rope_dim=16, v_dim=32),
        moe=MoeConfig(n_experts=8, top_k=2, expert_dim=64),
    ).model_copy(update=changes)


FAN_IN = {
    "embed.weight": 1,
    "head.weight": 128,
    "layers.0.attention.q_down": 128,
    "layers.0.attention.q_up": 96,
    "layers.0.attention.kv_down": 128,
    "layers.0.attention.kv_up": 64,
    "layers.0.attention.out": 128,
    "layers.0.ffn.gate": 128,
    "layers.0.ffn.up": 128,
    "layers.0.ffn.down": 256,
    "layers.1.ffn.router": 128,
    "layers.1.ffn.gate": 128,
    "layers.1.ffn.up": 128,
    "layers.1.ffn.down": 64,
    "layers.1.ffn.shared.gate": 128,
    "layers.1.ffn.shared.up": 128,
    "layers.1.ffn.shared.down": 64,
}
RESIDUAL = ("attention.out", "ffn.down", "shared.down")


def weights(config: DecoderConfig) -> dict[str, torch.Tensor]:
    parts = build(single(), config)
    materialise(parts, single(), seed=1)
    return {f"{n}.{path}": p.detach() for n, part in parts.items() for path, p in part.named_parameters()}


@pytest.mark.parametrize("std", [None, 0.006])
@pytest.mark.parametrize("depth_scaling", [True, False])
def test_standard_deviations(std, depth_scaling):
    values = weights(decoder(init=InitConfig(std=std, depth_scaling=depth_scaling)))
    for name, fan_in in FAN_IN.items():
        expected = (std or fan_in**-0.5) / (8**0.5 if depth_scaling and name.endswith(RESIDUAL) else 1)
        w = values[name]
        tolerance = 5 / (2 * w.numel()) ** 0.5  # five standard errors
        assert w.std().item() == pytest.approx(CUT_STD * expected, rel=tolerance), name
        assert abs(w.mean().item()) < 5 * expected / w.numel() ** 0.5, name
        assert w.abs().max() <= CUT * expected * 1.0001
    first_two = {
        n for n, w in values.items() if w.ndim > 1 and not n.startswith(("layers.2", "layers.3", "layers.1.attention"))
    }
    assert first_two == set(FAN_IN)
    assert all(torch.equal(w, torch.ones_like(w)) for w in values.values() if w.ndim == 1)


def test_a_tied_embedding_starts_as_the_head():
    values = weights(decoder(tied=True))
    assert torch.equal(values["head.weight"], values["embed.weight"])
    assert values["embed.weight"].std().item() == pytest.approx(CUT_STD * 128**-0.5, rel=0.02)


@pytest.mark.parametrize("n_layers", [2, 16])
def test_the_residual_stream_stays_of_order_one(n_layers):
    """What depth scaling is for: with it the blocks together write about as much at 16 layers as at 2."""

    def written(depth_scaling: bool) -> float:
        config = decoder(n_layers=n_layers, moe=None, attention=GqaConfig(n_heads=4, n_kv_heads=4, head_dim=32),
                         init=InitConfig(depth_scaling=depth_scaling))  # fmt: skip
        parts = build(single(), config, ["embed", *(f"layers.{i}" for i in range(n_layers))])
        materialise(parts, single(), dtype=torch.float32)
        mb = microbatch(torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(0)))
        start = x = parts["embed"](None, mb)
        for i in range(n_layers):
            x = parts[f"layers.{i}"](x, mb)
        return (x - start).var().item()

    assert 0.05 < written(True) < 1
    if n_layers == 16:
        assert written(False) > 3
