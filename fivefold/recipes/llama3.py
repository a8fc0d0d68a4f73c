"""Llama 3 at its released shapes. Source: The Llama 3 herd of models, arXiv 2407.21783, tables 3 and 4, section 3.4.

The paper states batch, steps and layout of the 405B run; for the smaller two it gives shape and peak learning rate,
and they take the batch the 405B run starts with (4 Mi tokens). Its betas are not published: (0.9, 0.95) is usual.
"""

from __future__ import annotations

from ..config.model import DecoderConfig, GqaConfig, Llama3Config, RopeConfig
from ..config.parts import DataConfig, OptimConfig, TrainConfig
from ..config.run import RunConfig


def llama3_8b() -> RunConfig:
    """Llama 3 8B: 32 layers, 32 heads over 8 key-value heads."""
    return RunConfig(
        model=_decoder(dim=4096, n_layers=32, n_heads=32, ffn_dim=14336, rope=_rope()),
        parallel="fsdp64",
        data=DataConfig(batch_size=512, sequence_length=8192),
        optim=_optim(3e-4),
        train=TrainConfig(steps=3_576_279, dtype="bfloat16", microbatches=8, recompute="ops"),  # 15 T tokens
    )


def llama3_70b() -> RunConfig:
    """Llama 3 70B: 80 layers, 64 heads over 8 key-value heads."""
    return RunConfig(
        model=_decoder(dim=8192, n_layers=80, n_heads=64, ffn_dim=28672, rope=_rope()),
        parallel="fsdp128-tp8",
        data=DataConfig(batch_size=512, sequence_length=8192),
        optim=_optim(1.5e-4),
        train=TrainConfig(steps=3_576_279, dtype="bfloat16", microbatches=4, recompute="ops"),  # 15 T tokens
    )


def llama3_405b() -> RunConfig:
    """Llama 3.1 405B: 126 layers, 128 heads over 8 key-value heads."""
    return RunConfig(
        model=_decoder(dim=16384, n_layers=126, n_heads=128, ffn_dim=53248, rope=_rope(Llama3Config())),
        parallel="pp16-fsdp128-tp8",
        data=DataConfig(batch_size=2048, sequence_length=8192),
        optim=_optim(8e-5),
        train=TrainConfig(steps=1_200_000, dtype="bfloat16", microbatches=16, zero=1),
    )


def _decoder(*, dim: int, n_layers: int, n_heads: int, ffn_dim: int, rope: RopeConfig) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=128256,
        dim=dim,
        n_layers=n_layers,
        ffn_dim=ffn_dim,
        attention=GqaConfig(n_heads=n_heads, n_kv_heads=8, head_dim=128),
        rope=rope,
        norm_eps=1e-5,
    )


def _rope(scaling: Llama3Config | None = None) -> RopeConfig:
    return RopeConfig(theta=500_000, layout="half", scaling=scaling)


def _optim(lr: float) -> OptimConfig:
    return OptimConfig(lr=lr, warmup_steps=8000, decay="cosine", floor=0.01, betas=(0.9, 0.95), weight_decay=0.1)
