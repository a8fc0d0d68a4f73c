"""The work that every contestant of the step benchmark does: two small models, 1,024 tokens a step, AdamW.

256 tokens in a row, 4 rows, float32, fused AdamW, clipping at 1, no recompute, no compile, one thread a rank. ``llama``
and ``dsv3`` are recipes too: ``fivefold train benchmarks/work.py:llama``.
"""

from __future__ import annotations

import numpy as np

from benchmarks import plain_dsv3, plain_llama  # absolute: also loaded by path, as a recipe
from fivefold.config.model import DecoderConfig, GqaConfig, MlaConfig, MoeConfig, RopeConfig
from fivefold.config.parts import DataConfig, OptimConfig, TrainConfig
from fivefold.config.run import RunConfig
from fivefold.data.rows import Rows

LENGTH, ROWS, IDS = 256, 4, 256
"""Tokens of a row, rows of a step, and different token ids: as the plain loop draws them."""
EPS = 2.0**-23
"""Epsilon of the norms: ``nn.RMSNorm``'s own in float32."""
LR, BETAS, WEIGHT_DECAY, MAX_NORM = 8e-4, (0.9, 0.95), 0.1, 1.0


def llama() -> RunConfig:
    """6.16 M parameters: the shape of ``plain_llama.py``."""
    m = plain_llama
    width = m.DIM // m.HEADS
    return _run(DecoderConfig(
        vocab_size=m.VOCAB, dim=m.DIM, n_layers=m.LAYERS, ffn_dim=m.FFN, norm_eps=EPS, rope=RopeConfig(theta=m.THETA),
        attention=GqaConfig(n_heads=m.HEADS, n_kv_heads=m.HEADS, head_dim=width),
    ))  # fmt: skip


def dsv3() -> RunConfig:
    """7.38 M parameters: the shape of ``plain_dsv3.py``."""
    m = plain_dsv3
    return _run(DecoderConfig(
        vocab_size=m.VOCAB, dim=m.DIM, n_layers=m.LAYERS, ffn_dim=m.FFN, norm_eps=EPS, rope=RopeConfig(theta=m.THETA),
        attention=MlaConfig(n_heads=m.HEADS, kv_rank=m.LATENT, nope_dim=m.NOPE, rope_dim=m.ROTARY, v_dim=m.VALUE,
                            latent_norm_eps=EPS),
        moe=MoeConfig(n_experts=m.EXPERTS, top_k=m.TOP_K, n_shared=1, expert_dim=m.EXPERT_FFN, bias_rate=m.BIAS_RATE,
                      n_dense_layers=m.DENSE_LAYERS, score="softmax", normalise=False),
    ))  # fmt: skip


MODELS = {"llama": llama, "dsv3": dsv3}


def _run(model: DecoderConfig) -> RunConfig:
    return RunConfig(
        model=model,
        data=DataConfig(files=("random",), batch_size=ROWS, sequence_length=LENGTH),
        optim=OptimConfig(lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, max_norm=MAX_NORM, decay="none"),
        train=TrainConfig(steps=1_000_000, dtype="float32", evaluate=False, save_final=False),
    )


def on_one_row(model: str, layout: str, method: str, length: int) -> RunConfig:
    """The model's run on one row of ``length`` tokens, with a method of context parallelism."""
    config = MODELS[model]()
    data = config.data.model_copy(update={"batch_size": 1, "sequence_length": length})
    context = config.context.model_copy(update={"method": method})
    return config.model_copy(update={"parallel": layout, "data": data, "context": context})


class UniformRows:
    """Random ids in whole rows, every token a target, as the plain loop has them; ``data.files=random`` is ragged.

    Args:
        n_rows, length: of a step.
    """

    def __init__(self, n_rows: int = ROWS, length: int = LENGTH) -> None:
        self._shape = n_rows, length

    def rows(self, step: int, start: int, stop: int) -> Rows:
        """Rows ``[start, stop)`` of a step's batch."""
        n_rows, length = self._shape
        ids = np.random.default_rng(step).integers(IDS, size=(n_rows, length + 1))[start:stop]
        at = np.broadcast_to(np.arange(length), (len(ids), length)).copy()
        return Rows(tokens=ids[:, :-1].copy(), targets=ids[:, 1:].copy(), positions=at,
                    documents=np.zeros((len(ids), length), np.int32), single_document=True)  # fmt: skip
