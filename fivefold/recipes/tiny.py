"""Parity-size runs: small enough to compare any layout with one rank in seconds, and deliberately uneven."""

from __future__ import annotations

from ..config.model import (
    DecoderConfig,
    GqaConfig,
    Llama3Config,
    MlaConfig,
    MoeConfig,
    RopeConfig,
    YarnConfig,
)
from ..config.parts import DataConfig, OptimConfig, TrainConfig
from ..config.run import RunConfig


def dense_tiny() -> RunConfig:
    """Parity size: grouped-query attention, dense, on random tokens."""
    return RunConfig(
        model=DecoderConfig(
            vocab_size=37,  # odd on purpose: the vocabulary is padded under tp
            dim=16,
            n_layers=4,
            ffn_dim=32,
            attention=GqaConfig(n_heads=8, n_kv_heads=4, head_dim=4),
            rope=RopeConfig(layout="half", scaling=Llama3Config(factor=4, original_length=8)),
        ),
        data=DataConfig(files=("random",), batch_size=8, sequence_length=16),
        optim=OptimConfig(lr=1e-2, warmup_steps=2),
        train=TrainConfig(steps=20),
    )


def moe_tiny() -> RunConfig:
    """Parity size: latent attention, experts with every routing rule in use, on random tokens."""
    return RunConfig(
        model=DecoderConfig(
            vocab_size=37,
            dim=16,
            n_layers=4,
            ffn_dim=32,
            attention=MlaConfig(n_heads=4, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=4),  # values narrower than keys
            moe=MoeConfig(
                n_experts=8,
                top_k=2,
                n_shared=1,
                expert_dim=8,
                n_dense_layers=1,
                route_scale=1.5,
                n_groups=4,
                top_groups=2,
                balance_loss=0.01,
                z_loss=0.001,
            ),
            rope=RopeConfig(scaling=YarnConfig(factor=4, original_length=8, mscale=1, mscale_all_dim=1)),
        ),
        data=DataConfig(files=("random",), batch_size=8, sequence_length=16),
        optim=OptimConfig(lr=1e-2, warmup_steps=2),
        train=TrainConfig(steps=20),
    )
