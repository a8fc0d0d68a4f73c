"""Initial values: the same under every slicing, distributed as they should be, independent of each other."""

from __future__ import annotations

import zlib
from itertools import pairwise
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.mesh import init as init_module
from fivefold.mesh.init import CUT, bits, cut_normal, initial_values
from fivefold.mesh.parameter import Init

N = 1 << 20
NORMAL = NormalDist()
MASS = NORMAL.cdf(CUT) - NORMAL.cdf(-CUT)
VARIANCE = 1 - 2 * CUT * NORMAL.pdf(CUT) / MASS
FOURTH = 3 * VARIANCE - 2 * CUT**3 * NORMAL.pdf(CUT) / MASS


def splitmix(seed: int, name: str, index: int) -> int:
    """The generator in Python's whole numbers."""
    size = (1 << 64) - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & size
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & size
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mix((seed * golden + zlib.crc32(name.encode())) & size)
    return mix(mix((index * golden + key) & size))


@given(st.integers(0, 2**70), st.text(max_size=20), st.integers(0, 2**50))
def test_bits_equal_whole_number_arithmetic(seed: int, name: str, index: int) -> None:
    assert bits(seed, name, torch.tensor([index])).item() % (1 << 64) == splitmix(seed, name, index)


def test_the_mixer_is_splitmix64() -> None:
    """First output of the published generator for seed 1234567: its state is one increment, then mixed."""
    state = torch.tensor(1234567) + init_module.GOLDEN
    assert init_module._mix(state).item() % (1 << 64) == 6457827717110365317


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 999), max_size=6), st.randoms())
def test_any_slicing_is_bit_equal(cuts: list[int], random: object) -> None:
    whole = initial_values(Init(), 7, "blocks.0.gate", torch.arange(1000))
    edges = [0, *sorted(cuts), 1000]
    parts = [initial_values(Init(), 7, "blocks.0.gate", torch.arange(a, b)) for a, b in pairwise(edges)]
    assert torch.equal(torch.cat(parts), whole)
    order = torch.randperm(1000)
    assert torch.equal(initial_values(Init(), 7, "blocks.0.gate", order), whole[order])


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    index = torch.arange(5000).view(50, 100)
    whole = initial_values(Init(), 0, "w", index)
    monkeypatch.setattr(init_module, "CHUNK", 7)
    assert torch.equal(initial_values(Init(), 0, "w", index), whole)
    assert whole.shape == index.shape


def test_moments_are_those_of_the_cut_normal() -> None:
    """Each within five standard errors."""
    x = cut_normal(3, "w", torch.arange(N))
    assert abs(x.mean().item()) < 5 * (VARIANCE / N) ** 0.5
    assert abs(VARIANCE**0.5 - 0.98658) < 1e-5
    assert x.square().mean().item() == pytest.approx(VARIANCE, abs=5 * ((FOURTH - VARIANCE**2) / N) ** 0.5)
    kurtosis = x.pow(4).mean().item() / x.square().mean().item() ** 2
    assert kurtosis == pytest.approx(FOURTH / VARIANCE**2, abs=0.02)
    assert x.abs().max().item() <= CUT
    assert x.abs().max().item() > CUT - 0.01


def test_distribution_is_the_cut_normals() -> None:
    """Kolmogorov and Smirnov's distance under its 0.001 bound."""
    x = cut_normal(11, "w", torch.arange(N)).sort().values
    cdf = (torch.special.ndtr(x) - NORMAL.cdf(-CUT)) / MASS
    steps = torch.arange(1, N + 1, dtype=torch.float64) / N
    distance = torch.maximum((cdf - steps).abs(), (cdf - steps + 1 / N).abs()).max().item()
    assert distance < 1.95 / N**0.5


def test_the_table_is_close_to_the_exact_quantile() -> None:
    """As the docstring says: 1e-3 at the ends, 1e-9 in the middle."""
    index = torch.arange(20_000)
    u = (bits(0, "w", index) >> 16 & (1 << 48) - 1).double() * 2.0**-48
    exact = torch.tensor([NORMAL.inv_cdf(NORMAL.cdf(-CUT) + MASS * p) for p in u.tolist()], dtype=torch.float64)
    error = (cut_normal(0, "w", index) - exact).abs()
    assert error.max().item() < 1e-3
    assert error[(u - 0.5).abs() < 0.1].max().item() < 1e-9


def test_streams_are_independent() -> None:
    """Close seeds, close names and shifted elements: correlations within five standard errors."""
    index = torch.arange(1 << 16)
    base = cut_normal(0, "blocks.1.up", index)
    streams = [(1, "blocks.1.up"), (0, "blocks.2.up"), (0, "blocks.1.gate")]
    others = [cut_normal(seed, name, index) for seed, name in streams]
    others += [cut_normal(0, "blocks.1.up", index + shift) for shift in (1, 2, 64, 4096)]
    bound = 5 / len(index) ** 0.5
    for other in others:
        for a, b in ((base, other), (base.abs(), other.abs())):
            assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < bound


def test_values_are_float32_in_every_dtype() -> None:
    x = initial_values(Init(std=0.006), 0, "w", torch.arange(1000))
    assert x.dtype == torch.float64
    assert torch.equal(x.float().double(), x)
    assert x.std().item() == pytest.approx(0.006 * VARIANCE**0.5, rel=0.1)


def test_constants() -> None:
    index = torch.arange(6).view(2, 3)
    assert torch.equal(initial_values(Init(kind="ones"), 0, "w", index), torch.ones(2, 3, dtype=torch.float64))
    assert torch.equal(initial_values(Init(kind="zeros"), 0, "w", index), torch.zeros(2, 3, dtype=torch.float64))
    assert initial_values(Init(), 0, "w", torch.arange(0)).shape == (0,)
