"""Rotary positions: frequencies (plain, YaRN, Llama 3), tables, and the rotation in both layouts.

Letters: B rows of the batch, T positions, H heads, R rotary width, P = R/2 pairs.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

Layout = Literal["interleaved", "half"]


def inverse_frequencies(dim: int, theta: float) -> Float64[Tensor, " P"]:
    """Radians per position of each pair: ``theta ** (-2i / dim)``.

    Source: Su 2021, arXiv 2104.09864, section 3.2.2.
    """
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def yarn_frequencies(
    dim: int,
    theta: float,
    factor: float,
    original_length: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool = True,
) -> Float64[Tensor, " P"]:
    """Frequencies for a context ``factor`` times longer than ``original_length``: fast pairs stay, slow ones stretch.

    A pair that turns more than ``beta_fast`` times within the original length keeps its frequency, one that turns
    less than ``beta_slow`` times has it divided by ``factor``, and a linear ramp over the pair index joins them.

    Args:
        truncate: Rounds the ramp's ends outward to whole pairs, as DeepSeek's released code does.

    Source: Peng 2023, arXiv 2309.00071, section 3.2.
    """

    def pair_that_turns(turns: float) -> float:
        return dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp; the released code's guard against 0/0
    stretched = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return inverse_frequencies(dim, theta) * (1 - stretched * (1 - 1 / factor))


def llama3_frequencies(
    dim: int,
    theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_length: int,
) -> Float64[Tensor, " P"]:
    """Llama 3.1's frequencies: those turning less than ``low_freq_factor`` times are divided by ``factor``.

    Those turning more than ``high_freq_factor`` times within ``original_length`` stay; between, linear in the turns.

    Source: Llama team 2024, arXiv 2407.21783, section 3.4.2, and its released ``apply_scaling``.
    """
    plain = inverse_frequencies(dim, theta)
    turns = original_length * plain / (2 * math.pi)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return plain * (kept + (1 - kept) / factor)


def yarn_mscale(factor: float, mscale: float) -> float:
    """``0.1 * mscale * ln(factor) + 1``, and 1 where the context is not stretched.

    Source: Peng 2023, arXiv 2309.00071, equation 22, with DeepSeek's weight ``mscale``.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_corrections(factor: float, mscale: float, mscale_all_dim: float) -> tuple[float, float]:
    """YaRN's two separate corrections: the multiplier of cos and sin, and that of the softmax scale.

    The first touches only the rotary part of queries and keys, the second all of it. As in DeepSeek's released
    modelling code, with m the ``yarn_mscale``: ``m(mscale) / m(mscale_all_dim)`` and ``m(mscale_all_dim) ** 2``, where
    m(0) is 1. ``(1, 0)`` is YaRN as published.
    """
    every_dim = yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, mscale) / every_dim, every_dim**2


def rope_tables(
    positions: Int[Tensor, "B T"],
    inverse_frequency: Float64[Tensor, " P"],
    multiplier: float,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "B T P"], Float[Tensor, "B T P"]]:
    """Cosines and sines of ``position * inverse_frequency``, times ``multiplier``.

    Angles are float64, reduced to one turn before they are rounded: float32 angles are 0.004 radians off at position
    100,000, bfloat16 ones useless from position 256 on. The tables are float64 if ``dtype``, the dtype computed in,
    is, else float32.
    """
    angles = positions[:, :, None].double() * inverse_frequency
    if dtype != torch.float64:
        angles = angles.remainder_(2 * math.pi).float()
    return angles.cos().mul_(multiplier), angles.sin().mul_(multiplier)


def apply_rope(
    x: Float[Tensor, "B T H R"],
    cos: Float[Tensor, "B T P"],
    sin: Float[Tensor, "B T P"],
    layout: Layout,
) -> Float[Tensor, "B T H R"]:
    """Each pair ``(a, b)`` of ``x`` turned by its angle: ``(a cos - b sin, a sin + b cos)``, in the tables' dtype.

    Args:
        layout: Pair i is ``(x[2i], x[2i+1])`` if "interleaved" (Meta's Llama, DeepSeek), ``(x[i], x[i+R/2])`` if
            "half" (Hugging Face's Llama).

    Returns:
        The result in the dtype of ``x``.
    """
    cos, sin = cos[:, :, None], sin[:, :, None]
    wide = x.to(cos.dtype)
    if layout == "interleaved":
        pairs = wide.reshape(*x.shape[:-1], -1, 2)
        if torch.compiler.is_compiling():  # complex numbers are not compiled
            a, b = pairs.unbind(-1)
            return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)
        if pairs.storage_offset() % 2 or any(stride % 2 for stride in pairs.stride()[:-1]) or pairs.stride(-1) != 1:
            pairs = pairs.contiguous()  # a complex number starts at an even offset
        # One pass over x; on CPU 4 times faster than strided halves.
        turned = torch.view_as_complex(pairs) * torch.complex(cos, sin)
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)
    a, b = wide.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)
