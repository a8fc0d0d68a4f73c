"""The demo: a small model of DeepSeek-V3's kind, trained on a laptop's CPU in minutes."""

from __future__ import annotations

from ..config.model import DecoderConfig, MlaConfig, MoeConfig
from ..config.parts import DataConfig, OptimConfig, TrainConfig
from ..config.run import RunConfig


def moe_demo() -> RunConfig:
    """Demo: latent attention and experts, on the source code of Python's standard library."""
    return RunConfig(
        model=DecoderConfig(
            vocab_size=4096,
            dim=128,
            n_layers=4,
            ffn_dim=384,
            attention=MlaConfig(n_heads=4, kv_rank=48, nope_dim=32, rope_dim=16, v_dim=32),
            moe=MoeConfig(n_experts=8, top_k=2, n_shared=1, expert_dim=96, balance_loss=1e-4),
        ),
        parallel="fsdp2-tp2",
        data=DataConfig(files=("stdlib",), batch_size=16, sequence_length=256, eval_rows=0),
        optim=OptimConfig(lr=8e-3, warmup_steps=20, decay="1-sqrt", decay_steps=120, floor=0.05),
        train=TrainConfig(steps=300),
    )
