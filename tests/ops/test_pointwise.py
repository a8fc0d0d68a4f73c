"""RMSNorm, SwiGLU and rotary positions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.ops.norm import rms_norm
from fivefold.ops.rope import (
    apply_rope,
    inverse_frequencies,
    llama3_frequencies,
    rope_tables,
    yarn_corrections,
    yarn_frequencies,
    yarn_mscale,
)
from fivefold.ops.swiglu import swiglu

F64 = torch.float64


def naive_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (0, 6), (6,)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, w = torch.randn(shape, dtype=F64, requires_grad=True), torch.randn(6, dtype=F64, requires_grad=True)
    out, want = rms_norm(x, w, 1e-5), naive_norm(x, w, 1e-5)
    g = torch.randn_like(out)
    torch.testing.assert_close(out, want, rtol=1e-14, atol=1e-14)
    for a, b in zip(torch.autograd.grad(out, (x, w), g), torch.autograd.grad(want, (x, w), g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, w))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_as_accurate_as_its_dtype_allows(dtype: torch.dtype, scale: float) -> None:
    x = (torch.randn(64, 96) * scale).to(dtype).requires_grad_()
    w, g = torch.randn(96).to(dtype).requires_grad_(), torch.randn(64, 96).to(dtype)
    xd, wd = (t.detach().double().requires_grad_() for t in (x, w))
    out, want = rms_norm(x, w, 1e-6), naive_norm(xd, wd, 1e-6)
    out.backward(g)
    want.backward(g.double())
    for got, expected in ((out, want), (x.grad, xd.grad), (w.grad, wd.grad)):
        assert got.dtype == dtype
        error = (got.double() - expected).abs().max() / expected.abs().max()
        assert error < 2 * torch.finfo(dtype).eps


def test_rms_norm_with_a_weight_of_another_dtype_and_of_zeros() -> None:
    x, w = torch.randn(3, 8).bfloat16().requires_grad_(), torch.randn(8, requires_grad=True)
    rms_norm(x, w, 1e-6).sum().backward()
    assert (x.grad.dtype, w.grad.dtype) == (torch.bfloat16, torch.float32)
    zero = torch.zeros(2, 8, requires_grad=True)
    out = rms_norm(zero, w, 1e-6)
    out.sum().backward()
    assert (out == 0).all()
    assert zero.grad.isfinite().all()


def test_swiglu() -> None:
    a, b = (torch.randn(4, 6, dtype=F64, requires_grad=True) for _ in range(2))
    torch.testing.assert_close(swiglu(a, b), a * a.sigmoid() * b, rtol=1e-14, atol=1e-14)
    torch.autograd.gradcheck(swiglu, (a, b))
    for dtype in (torch.float32, torch.bfloat16):
        x, y = (t.detach().to(dtype).requires_grad_() for t in (a, b))
        ours = torch.autograd.grad(swiglu(x, y).sum(), (x, y))
        plain = torch.autograd.grad((F.silu(x) * y).sum(), (x, y))
        for got, want in zip(ours, plain, strict=True):
            torch.testing.assert_close(got, want)


def naive_rope(x: Tensor, positions: Tensor, frequency: Tensor, layout: str) -> Tensor:
    out = torch.empty_like(x)
    r = x.shape[-1]
    for i in range(r // 2):
        a, b = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + r // 2)
        angle = (positions.double() * frequency[i])[:, :, None]
        out[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
        out[..., b] = x[..., a] * angle.sin() + x[..., b] * angle.cos()
    return out


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("heads", [1, 3])
def test_rope(layout: str, heads: int) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [3, 9, 100_000, 7, 0]])
    frequency = inverse_frequencies(6, 100.0)
    x = torch.randn(2, 5, heads, 6, dtype=F64, requires_grad=True)
    cos, sin = rope_tables(positions, frequency, 1.0, F64)
    want = naive_rope(x.detach(), positions, frequency, layout)
    torch.testing.assert_close(apply_rope(x, cos, sin, layout), want, rtol=1e-13, atol=1e-13)
    torch.autograd.gradcheck(lambda x: apply_rope(x, cos, sin, layout), (x,))
    for dtype in (torch.float32, torch.bfloat16):
        cos, sin = rope_tables(positions, frequency, 1.0, dtype)
        assert cos.dtype == sin.dtype == torch.float32
        out = apply_rope(x.detach().to(dtype), cos, sin, layout)
        want = naive_rope(x.detach().to(dtype).double(), positions, frequency, layout)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), want, rtol=torch.finfo(dtype).eps, atol=2e-6)


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_rope_of_a_slice_at_any_offset(start: int) -> None:
    whole = torch.randn(1, 4, 2, 4 + start + 1, dtype=F64, requires_grad=True)
    cos, sin = rope_tables(torch.arange(4)[None], inverse_frequencies(4, 10.0), 1.0, F64)
    part = whole[..., start : start + 4]
    for layout in ("interleaved", "half"):
        want = apply_rope(part.contiguous(), cos, sin, layout)
        assert torch.equal(apply_rope(part, cos, sin, layout), want)
        torch.autograd.gradcheck(lambda w, n=layout: apply_rope(w[..., start : start + 4], cos, sin, n), (whole,))


def test_rope_layouts_are_permutations_of_one_another() -> None:
    x = torch.randn(2, 5, 3, 8, dtype=F64)
    cos, sin = rope_tables(torch.arange(5).expand(2, 5), inverse_frequencies(8, 100.0), 1.3, F64)
    to_half = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    half = apply_rope(x[..., to_half], cos, sin, "half")
    torch.testing.assert_close(half, apply_rope(x, cos, sin, "interleaved")[..., to_half], rtol=0, atol=1e-15)
    assert not torch.allclose(apply_rope(x, cos, sin, "half"), apply_rope(x, cos, sin, "interleaved"))


def test_float32_tables_stay_accurate_far_out() -> None:
    positions = torch.tensor([[131_071, 1_000_003]])
    frequency = inverse_frequencies(64, 500_000.0)
    exact, _ = rope_tables(positions, frequency, 1.0, F64)
    for dtype in (torch.float32, torch.bfloat16):
        cos, _ = rope_tables(positions, frequency, 1.0, dtype)
        assert (cos.double() - exact).abs().max() < 1e-6


def test_yarn_corrections() -> None:
    cos_sin, softmax = yarn_corrections(40.0, 1.0, 1.0)
    assert (cos_sin, round(softmax, 4)) == (1.0, 1.8739)
    cos_sin, softmax = yarn_corrections(40.0, 0.707, 0.707)
    assert (cos_sin, round(softmax, 4)) == (1.0, 1.5896)
    cos_sin, softmax = yarn_corrections(40.0, 1.0, 0.0)
    assert (round(cos_sin, 4), softmax) == (1.3689, 1.0)
    assert yarn_corrections(1.0, 1.0, 0.3) == (1.0, 1.0)
    assert yarn_mscale(0.5, 1.0) == 1.0
    tables = rope_tables(torch.arange(3)[None], inverse_frequencies(4, 10.0), yarn_corrections(40.0, 1.0, 0.0)[0], F64)
    assert round(float(tables[0][0, 0, 0]), 4) == 1.3689
    assert round(float((tables[0].square() + tables[1].square()).sqrt()[0, 2, 1]), 4) == 1.3689


def test_factor_one_is_plain_rope() -> None:
    plain = inverse_frequencies(64, 10_000.0)
    assert torch.equal(yarn_frequencies(64, 10_000.0, 1.0, 4096, 32.0, 1.0), plain)
    torch.testing.assert_close(llama3_frequencies(64, 10_000.0, 1.0, 1.0, 4.0, 8192), plain, rtol=1e-15, atol=0)
    assert plain.dtype == F64


def test_frequencies_equal_those_of_transformers() -> None:
    """Values of Hugging Face transformers 5.24, computed in float64."""
    want = [1.0, 0.5623413251903491, 0.2687936011143123, 0.12447955870272459]
    want += [0.05500000000000001, 0.02249365300761396, 0.007905694150420948, 0.004445698525097307]
    assert yarn_frequencies(16, 100.0, 4.0, 32, 2.0, 0.25).tolist() == pytest.approx(want, rel=1e-15)
    want = [1.0, 0.05694100347337417, 0.011180339887498949, 0.0023643540225079395]
    assert llama3_frequencies(8, 500.0, 4.0, 1.0, 4.0, 32).tolist() == pytest.approx(want, rel=1e-15)


def naive_yarn(
    dim: int, theta: float, factor: float, length: int, fast: float, slow: float, truncate: bool
) -> list[float]:
    """YaRN's definition, pair by pair."""
    low, high = (dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    out = []
    for i in range(dim // 2):
        plain = theta ** (-2 * i / dim)
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        out.append(plain / factor * ramp + plain * (1 - ramp))
    return out


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("case", [(16, 100.0, 4.0, 32, 2.0, 0.25), (64, 10_000.0, 40.0, 4096, 32.0, 1.0)])
def test_yarn_frequencies(case: tuple[int, float, float, int, float, float], truncate: bool) -> None:
    got = yarn_frequencies(*case, truncate=truncate)
    torch.testing.assert_close(got, torch.tensor(naive_yarn(*case, truncate), dtype=F64), rtol=1e-14, atol=0)


def test_yarn_ends_are_plain_and_stretched() -> None:
    got, plain = yarn_frequencies(64, 10_000.0, 40.0, 4096, 32.0, 1.0), inverse_frequencies(64, 10_000.0)
    assert torch.equal(got[:10], plain[:10])
    torch.testing.assert_close(got[24:], plain[24:] / 40, rtol=1e-14, atol=0)
    assert yarn_frequencies(2, 10_000.0, 2.0, 4, 32.0, 1.0).isfinite().all()  # both ends of the ramp fall on pair 0


def test_llama3_frequencies() -> None:
    dim, theta, factor, low, high, length = 128, 500_000.0, 8.0, 1.0, 4.0, 8192
    got = llama3_frequencies(dim, theta, factor, low, high, length)
    for i, value in enumerate(got.tolist()):
        plain = theta ** (-2 * i / dim)
        wavelength = 2 * math.pi / plain
        if wavelength < length / high:
            want = plain
        elif wavelength > length / low:
            want = plain / factor
        else:
            smooth = (length / wavelength - low) / (high - low)
            want = (1 - smooth) * plain / factor + smooth * plain
        assert value == pytest.approx(want, rel=1e-14)


def test_meta() -> None:
    for dtype in (F64, torch.float32, torch.bfloat16):
        x = torch.empty(2, 3, 4, 8, device="meta", dtype=dtype, requires_grad=True)
        assert rms_norm(x, torch.empty(8, device="meta", dtype=dtype), 1e-6).shape == x.shape
        assert swiglu(x, x).dtype == dtype
        cos, sin = rope_tables(
            torch.empty(2, 3, device="meta", dtype=torch.int64), inverse_frequencies(8, 10.0).to("meta"), 1.0, dtype
        )
        for layout in ("interleaved", "half"):
            y = apply_rope(x, cos, sin, layout)
            assert (y.shape, y.dtype, y.device.type) == (x.shape, dtype, "meta")
