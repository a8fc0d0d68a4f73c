"""Rotary positions as layers use them: frequencies once, tables once a microbatch.

Letters: B sequences, T tokens of a sequence, H heads, R rotary width, P = R/2 pairs.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ..config.model import Llama3Config, RopeConfig, YarnConfig
from ..mesh.axis import Axis
from ..ops.rope import (
    Layout,
    apply_rope,
    inverse_frequencies,
    llama3_frequencies,
    rope_tables,
    yarn_corrections,
    yarn_frequencies,
)
from .microbatch import MicroBatch

Tables = tuple[Tensor, Tensor]
"""Cosines and sines ``[B, T, P]``."""


def frequencies(config: RopeConfig, dim: int) -> Tensor:
    """Radians per position of each pair ``[P]``, float64, on the CPU."""
    scaling = config.scaling
    if isinstance(scaling, YarnConfig):
        return yarn_frequencies(dim, config.theta, scaling.factor, scaling.original_length, scaling.beta_fast,
                                scaling.beta_slow)  # fmt: skip
    if isinstance(scaling, Llama3Config):
        return llama3_frequencies(dim, config.theta, scaling.factor, scaling.low_freq_factor,
                                  scaling.high_freq_factor, scaling.original_length)  # fmt: skip
    return inverse_frequencies(dim, config.theta)


class Rope:
    """Turns queries and keys by their positions. One is shared by all layers of a model.

    Args:
        dim: rotary width of a head.
    """

    def __init__(self, config: RopeConfig, dim: int) -> None:
        self.layout: Layout = config.layout
        self.inverse_frequency = frequencies(config, dim)
        self.multiplier, self.softmax_multiplier = 1.0, 1.0
        if isinstance(config.scaling, YarnConfig):
            s = config.scaling
            self.multiplier, self.softmax_multiplier = yarn_corrections(s.factor, s.mscale, s.mscale_all_dim)
        self.key = f"rope {dim} {config!r}"
        """Names these tables in a microbatch's cache: equal for equal positions."""

    def tables(self, mb: MicroBatch, dtype: torch.dtype) -> Tables:
        """The tables of this rank's tokens, in float32 at least; I over ``tp``."""
        key = f"{self.key} {dtype}"
        if key not in mb.cache:
            frequency = self.inverse_frequency.to(mb.positions.device)
            mb.cache[key] = rope_tables(mb.positions, frequency, self.multiplier, dtype)
        return mb.cache[key]

    def turn(self, x: Float[Tensor, "B T H R"], tables: Tables) -> Float[Tensor, "B T H R"]:
        """``x`` turned by the angles of ``tables``."""
        return apply_rope(x, *tables, self.layout)


def shard_tables(tables: Tables, axis: Axis) -> Tables:
    """The rows of this rank's place of ``axis``, which cuts the tokens."""
    if axis.size == 1:
        return tables
    cos, sin = (t.chunk(axis.size, 1)[axis.rank] for t in tables)
    return cos, sin
