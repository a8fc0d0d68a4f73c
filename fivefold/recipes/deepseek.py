"""DeepSeek-V2-Lite and DeepSeek-V3 at their released shapes, without the multi-token prediction module.

Sources: DeepSeek-V2, arXiv 2405.04434, appendix B (Lite); DeepSeek-V3, arXiv 2412.19437, sections 4.2 and 3.2, and
the configurations released with the weights.
"""

from __future__ import annotations

from ..config.model import DecoderConfig, InitConfig, MlaConfig, MoeConfig, RopeConfig, YarnConfig
from ..config.parts import DataConfig, OptimConfig, TrainConfig
from ..config.run import RunConfig

INIT = InitConfig(std=0.006, depth_scaling=False)
"""Both papers: every learnable parameter with a standard deviation of 0.006."""


def deepseek_v2_lite() -> RunConfig:
    """DeepSeek-V2-Lite: 27 layers, 64 experts of which 6 a token.

    The paper multiplies the learning rate by 0.316 after 80 % and after 90 % of the tokens; here it falls linearly
    over the last 20 % to the same end, a tenth. Its balance loss is per expert over the batch, here per sequence,
    with the same weight.
    """
    return RunConfig(
        model=DecoderConfig(
            vocab_size=102400,
            dim=2048,
            n_layers=27,
            ffn_dim=10944,
            attention=MlaConfig(n_heads=16, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
            moe=MoeConfig(
                n_experts=64,
                top_k=6,
                n_shared=2,
                expert_dim=1408,
                n_dense_layers=1,
                score="softmax",
                normalise=False,
                group_score="max",
                bias_rate=0,
                balance_loss=0.001,
            ),
            rope=_rope(0.707),
            init=INIT,
        ),
        parallel="fsdp64",
        data=DataConfig(batch_size=4608, sequence_length=4096),
        optim=OptimConfig(lr=4.2e-4, warmup_steps=2000, decay="linear", decay_steps=60_400, floor=0.1),
        train=TrainConfig(steps=302_000, dtype="bfloat16", microbatches=9, recompute="ops"),  # 5.7 T tokens
    )


def deepseek_v3() -> RunConfig:
    """DeepSeek-V3: 61 layers, 256 experts of which 8 a token.

    The layout is 2,048 GPUs as in the paper, the batch the one it reaches after 469 B tokens; the schedule leaves
    out its last 500 B tokens at two small constant learning rates.
    """
    return RunConfig(
        model=DecoderConfig(
            vocab_size=129280,
            dim=7168,
            n_layers=61,
            ffn_dim=18432,
            attention=MlaConfig(n_heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
            moe=MoeConfig(
                n_experts=256,
                top_k=8,
                n_shared=1,
                expert_dim=2048,
                n_dense_layers=3,
                score="sigmoid",
                normalise=True,
                route_scale=2.5,
                n_groups=8,
                top_groups=4,
                group_score="top2_sum",
                bias_rate=0.001,
                balance_loss=0.0001,
            ),
            rope=_rope(1.0),
            init=INIT,
        ),
        parallel="pp16-fsdp128-ep64",
        data=DataConfig(batch_size=15360, sequence_length=4096),
        optim=OptimConfig(lr=2.2e-4, warmup_steps=2000, decay="cosine", decay_steps=68_300, floor=0.1),
        # 14.3 T tokens, of which the last 4.3 T decay
        train=TrainConfig(steps=227_300, dtype="bfloat16", microbatches=60, zero=1),
    )


def _rope(mscale: float) -> RopeConfig:
    """Positions as released: extended 40 times by YaRN, rotary values interleaved."""
    return RopeConfig(
        layout="interleaved",
        scaling=YarnConfig(factor=40, original_length=4096, mscale=mscale, mscale_all_dim=mscale),
    )
