"""Longer contexts: a small model trained on rows of 512 tokens, and its extension to rows of 2,048.

Source: Peng et al. 2023, arXiv 2309.00071 (YaRN): new frequencies, then a short training at the new length.
"""

from __future__ import annotations

from ..config.model import DecoderConfig, GqaConfig, RopeConfig, YarnConfig
from ..config.parts import DataConfig, OptimConfig, TrainConfig
from ..config.run import RunConfig

TRAINED, EXTENDED = 512, 2048
"""Tokens of a row before and after."""


def long_demo() -> RunConfig:
    """Demo of longer contexts, first part: a small dense model at 512 tokens, on Python's standard library."""
    return RunConfig(
        model=_decoder(RopeConfig()),
        parallel="fsdp2",
        data=DataConfig(files=("stdlib",), batch_size=8, sequence_length=TRAINED, eval_rows=64),
        optim=OptimConfig(lr=8e-3, warmup_steps=20, decay="1-sqrt", decay_steps=130, floor=0.05),
        train=TrainConfig(steps=320),
    )


def long_demo_2048() -> RunConfig:
    """Demo of longer contexts, second part: give it long_demo's weights by --init-from, and it reads 2,048 tokens."""
    return RunConfig(
        model=_decoder(RopeConfig(scaling=YarnConfig(factor=EXTENDED / TRAINED, original_length=TRAINED))),
        parallel="cp4",
        data=DataConfig(files=("stdlib",), batch_size=4, sequence_length=EXTENDED, eval_rows=16),
        optim=OptimConfig(lr=3e-3, warmup_steps=5, decay="linear", floor=0.02),
        train=TrainConfig(steps=40),
    )


def _decoder(rope: RopeConfig) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=4096,
        dim=128,
        n_layers=4,
        ffn_dim=384,
        attention=GqaConfig(n_heads=4, n_kv_heads=2, head_dim=32),
        rope=rope,
    )
