from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.ops import attention as module
from fivefold.ops.attention import attention, document_mask

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def naive(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    """Head by head; a row with no key gives 0."""
    queries, keys, heads = q.shape[1], k.shape[1], q.shape[2]
    allowed = torch.ones(q.shape[0], queries, keys, dtype=torch.bool) if mask is None else mask
    if causal:
        allowed = allowed.tril()
    out = []
    for h in range(heads):
        g = h // (heads // k.shape[2])
        s = (scale * q[:, :, h] @ k[:, :, g].transpose(1, 2)).masked_fill(~allowed, -1e300)
        e = (s - s.amax(-1, keepdim=True)).exp() * allowed
        out.append((e / e.sum(-1, keepdim=True).clamp_min(1e-300)) @ v[:, :, g])
    return torch.stack(out, 2)


def make(t: int, s: int, h: int, g: int, e: int, v: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    shapes = ((2, t, h, e), (2, s, g, e), (2, s, g, v))
    return tuple(torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)


CASES = {
    "causal": (6, 6, 4, 4, 8, 8, "causal"),
    "grouped": (6, 6, 4, 2, 8, 8, "causal"),
    "one key head, masked": (6, 6, 4, 1, 8, 8, "mask"),
    "narrow values": (6, 6, 4, 4, 12, 8, "causal"),
    "wide values, grouped, masked": (6, 6, 4, 2, 5, 7, "mask"),
    "more keys than queries": (3, 7, 2, 2, 6, 4, "mask"),
    "no mask": (3, 7, 2, 2, 6, 6, "none"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", DTYPES)
def test_value_and_gradients(case: tuple[int, int, int, int, int, int, str], dtype: torch.dtype) -> None:
    *shape, kind = case
    inputs = make(*shape, dtype=dtype)
    exact = tuple(t.detach().double().requires_grad_() for t in inputs)
    mask = torch.rand(2, shape[0], shape[1]) < 0.6 if kind == "mask" else None
    if mask is not None:
        mask[0, 1] = False  # a query with no key at all
    out = attention(*inputs, scale=0.3, mask=mask, causal=kind == "causal")
    want = naive(*exact, 0.3, mask, kind == "causal")
    g = torch.randn_like(want)
    got = (out, *torch.autograd.grad(out, inputs, g.to(dtype)))
    expected = (want, *torch.autograd.grad(want, exact, g))
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    if mask is not None:
        assert (out[0, 1] == 0).all()


def test_gradcheck() -> None:
    mask = torch.tensor([[1, 0, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.bool).expand(2, 3, 3)
    torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, scale=0.5, mask=mask), make(3, 3, 2, 1, 4, 3))
    torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, scale=0.5, causal=True), make(3, 3, 2, 2, 3, 4))


def test_a_query_without_keys_on_a_device_whose_kernel_gives_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, is_causal: bool, scale: float, enable_gqa: bool
    ) -> Tensor:
        scores = (scale * q @ k.transpose(2, 3)).masked_fill(~attn_mask, -torch.inf)
        return scores.softmax(-1) @ v

    monkeypatch.setattr(module, "_KEYLESS_IS_ZERO", ())
    monkeypatch.setattr(module.F, "scaled_dot_product_attention", kernel)
    mask = torch.tensor([[1, 0, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.bool).expand(2, 3, 3)
    inputs = make(3, 3, 2, 1, 4, 3)
    out, want = attention(*inputs, scale=0.5, mask=mask), naive(*inputs, 0.5, mask, False)
    assert (out[:, 1] == 0).all()
    torch.testing.assert_close(out, want, rtol=1e-13, atol=1e-14)
    g = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, inputs, g), torch.autograd.grad(want, inputs, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = make(4, 4, 1, 1, 4, 4)
    out = attention(q * 1e3, k * 1e3, v, scale=1.0, causal=True)
    torch.testing.assert_close(out, naive(q * 1e3, k * 1e3, v, 1.0, None, True), rtol=0, atol=1e-9)


def test_document_mask() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]])
    mask = document_mask(positions, documents, positions, documents)
    for b in range(2):
        for t in range(6):
            for s in range(6):
                want = documents[b, t] == documents[b, s] and s <= t
                assert mask[b, t, s] == want
    part = document_mask(positions[:, 2:4], documents[:, 2:4], positions, documents)
    assert torch.equal(part, mask[:, 2:4])


def test_packed_documents_equal_separate_ones() -> None:
    q, k, v = make(6, 6, 2, 1, 4, 4)
    documents = torch.tensor([[0, 0, 1, 1, 1, 1]]).expand(2, 6)
    positions = torch.tensor([[0, 1, 0, 1, 2, 3]]).expand(2, 6)
    packed = attention(q, k, v, scale=0.5, mask=document_mask(positions, documents, positions, documents))
    for rows in (slice(0, 2), slice(2, 6)):
        alone = attention(q[:, rows], k[:, rows], v[:, rows], scale=0.5, causal=True)
        torch.testing.assert_close(packed[:, rows], alone, rtol=1e-13, atol=1e-14)


def test_causal_with_a_mask_or_more_keys_is_refused() -> None:
    q, k, v = make(3, 4, 1, 1, 4, 4)
    with pytest.raises(ValueError, match=r"as many queries as keys \(T=3, S=4\)"):
        attention(q, k, v, scale=1.0, causal=True)
    with pytest.raises(ValueError, match="no mask"):
        attention(q, k[:, :3], v[:, :3], scale=1.0, causal=True, mask=torch.ones(2, 3, 3, dtype=torch.bool))


def test_meta() -> None:
    for dtype in DTYPES:
        q, k, v = (t.to("meta") for t in make(6, 6, 4, 2, 8, 5, dtype))
        out = attention(q, k, v, scale=1.0, causal=True)
        assert (out.shape, out.dtype, out.device.type) == ((2, 6, 4, 5), dtype, "meta")
