"""Initial values that do not depend on the layout: element ``i`` of parameter ``name`` depends on (seed, name, i) only.

A counter-based generator (splitmix64: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") turns
the element's number into 64 uniform bits. A table of the cut normal's quantile function, read with linear
interpolation, turns those into a value. Integer arithmetic and single IEEE operations are the same on every device and
for every slice, so any two layouts, on any two machines, start bit-identical; each rank generates only what it stores.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

from .parameter import Init

CUT = 3.0
"""Standard deviations at which the normal is cut: 0.27 % of a normal lies beyond."""
TABLE_BITS = 16
CHUNK = 1 << 20
"""Elements generated at once: bounds the int64 temporaries to a few tens of MB."""


def _signed(x: int) -> int:
    """A 64-bit constant as torch's signed int64 holds it."""
    return x - (1 << 64) if x >= 1 << 63 else x


GOLDEN, MIX_1, MIX_2 = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Splitmix64's increment and multipliers."""


def _shift_right(x: Tensor, k: int) -> Tensor:
    """Logical shift of the 64 bits; torch's own is arithmetic."""
    return (x >> k) & ((1 << (64 - k)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def bits(seed: int, name: str, index: Tensor) -> Tensor:
    """64 uniform bits for each ``index`` (int64) of the stream of ``(seed, name)``."""
    key = _mix(torch.tensor(_signed((seed * GOLDEN + zlib.crc32(name.encode())) % (1 << 64))))
    return _mix(_mix(index * GOLDEN + key.to(index.device)))


@lru_cache(maxsize=2)
def _quantiles(device: torch.device) -> Tensor:
    """Quantiles of the normal cut at ``CUT``, at ``2**TABLE_BITS + 1`` evenly spaced probabilities. float64."""
    normal, n = NormalDist(), 1 << TABLE_BITS
    low = normal.cdf(-CUT)
    half = [normal.inv_cdf(low + (0.5 - low) * i / (n // 2)) for i in range(n // 2)]
    return torch.tensor([*half, 0.0, *(-x for x in reversed(half))], dtype=torch.float64, device=device)


def cut_normal(seed: int, name: str, index: Tensor) -> Tensor:
    """A standard normal cut at three standard deviations, for each ``index``. float64.

    Linear interpolation in a table of 65,536 steps is within 1e-3 of the exact quantile at the very ends, where the
    density is lowest, and within 1e-9 in the middle.
    """
    table = _quantiles(index.device)
    u = _shift_right(bits(seed, name, index), 64 - TABLE_BITS - 32)
    step, part = u >> 32, (u & 0xFFFFFFFF).double() * 2.0**-32
    low = table[step]
    return low + (table[step + 1] - low) * part


def initial_values(init: Init, seed: int, name: str, index: Tensor) -> Tensor:
    """Values of the elements ``index`` (their place in the whole parameter, row by row). float64.

    The normal's values are rounded to float32 first, so that a float64 run and a float32 run start from the same ones.
    """
    if init.kind == "ones":
        return torch.ones_like(index, dtype=torch.float64)
    if init.kind == "zeros":
        return torch.zeros_like(index, dtype=torch.float64)
    chunks = [cut_normal(seed, name, part) * init.std for part in index.split(CHUNK)]
    return torch.cat(chunks).float().double() if chunks else index.double()
