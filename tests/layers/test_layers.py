"""Each dense layer on one rank: values and gradients against the naive reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fivefold.layers.head as head_module
from fivefold.config.model import GqaConfig, InitConfig, MlaConfig, RopeConfig, YarnConfig
from fivefold.layers.context import LocalAttention
from fivefold.layers.embedding import Embedding
from fivefold.layers.gqa import GroupedQueryAttention
from fivefold.layers.head import Head
from fivefold.layers.init import InitRule
from fivefold.layers.mla import LatentAttention
from fivefold.layers.norm import RMSNorm
from fivefold.layers.rope import Rope
from fivefold.layers.swiglu import SwiGLU
from fivefold.mesh.parameter import Init
from tests.helpers import error, materialise, microbatch, single
from tests.layers import reference

B, T, D, V = 2, 7, 12, 37
RULE = InitRule(config=InitConfig(), n_layers=3)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 2]], dtype=torch.int32)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def real(layer: nn.Module) -> nn.Module:
    """``layer`` with random float64 parameters."""
    materialise({"layer": layer}, single())
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    return layer


def parameters(layer: nn.Module) -> dict[str, Tensor]:
    return dict(layer.named_parameters())


def compare(
    layer: nn.Module, actual: Callable[[], Tensor], expected: Callable[[], Tensor], x: Tensor | None = None
) -> None:
    """Values, and gradients of all parameters and of ``x``, under a random incoming gradient."""
    leaves = [*layer.parameters(), *([] if x is None else [x])]
    results = []
    for fn in (actual, expected):
        y = fn()
        torch.manual_seed(1)
        results.append((y, *torch.autograd.grad(y, leaves, torch.randn_like(y))))
    for a, b in zip(*results, strict=True):
        assert error(a, b) < 1e-12


def test_norm():
    layer, x = real(RMSNorm(single(), D, 1e-3)), torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    compare(layer, lambda: layer(x), lambda: reference.rms_norm(x, layer.weight, 1e-3), x)


def test_embedding():
    layer = real(Embedding(single(), V, D, Init()))
    tokens = torch.randint(V, (B, T))
    expected = lambda: torch.stack([torch.stack([layer.weight[i] for i in row]) for row in tokens])  # noqa: E731
    compare(layer, lambda: layer(None, microbatch(tokens)), expected)


def test_swiglu():
    layer, x = real(SwiGLU(single(), D, 20, RULE)), torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    compare(layer, lambda: layer(x), lambda: reference.swiglu(x, layer.gate, layer.up, layer.down), x)


def contexts() -> list:
    return [pytest.param(None, id="whole"), pytest.param(DOCUMENTS, id="documents")]


@pytest.mark.parametrize("documents", contexts())
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_gqa(n_kv_heads, layout, documents):
    config = GqaConfig(n_heads=4, n_kv_heads=n_kv_heads, head_dim=6)
    rope = Rope(RopeConfig(theta=50.0, layout=layout), 6)
    layer = real(GroupedQueryAttention(single(), config, D, rope, LocalAttention(), RULE))
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    mb = microbatch(torch.zeros(B, T, dtype=torch.int64), documents=documents)
    numbers = torch.zeros(B, T) if documents is None else documents

    def expected() -> Tensor:
        rows = zip(x, mb.positions, numbers, strict=True)
        return torch.stack([reference.gqa(r, parameters(layer), 6, 50.0, layout, at, n) for r, at, n in rows])

    compare(layer, lambda: layer(x, mb), expected, x)


@pytest.mark.parametrize("documents", contexts())
@pytest.mark.parametrize("q_rank", [0, 5])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_mla(layout, q_rank, documents):
    c = MlaConfig(n_heads=3, q_rank=q_rank, kv_rank=7, nope_dim=4, rope_dim=2, v_dim=5)
    layer = real(
        LatentAttention(single(), c, D, Rope(RopeConfig(theta=50.0, layout=layout), 2), LocalAttention(), RULE)
    )
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    mb = microbatch(torch.zeros(B, T, dtype=torch.int64), documents=documents)
    p = parameters(layer)

    def row(x: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        down = x @ p["kv_down"].T
        key = reference.turn_all(down[:, None, 7:], positions, 50.0, layout)[:, 0]
        kv = (reference.rms_norm(down[:, :7], p["kv_norm.weight"], 1e-6) @ p["kv_up"].T).unflatten(-1, (3, 9))
        if q_rank:
            q = reference.rms_norm(x @ p["q_down"].T, p["q_norm.weight"], 1e-6) @ p["q_up"].T
        else:
            q = x @ p["q"].T
        q = q.unflatten(-1, (3, 6))
        q = torch.cat([q[..., :4], reference.turn_all(q[..., 4:], positions, 50.0, layout)], -1)
        heads = []
        for h in range(3):
            keys = torch.cat([kv[:, h, :4], key], 1)
            heads.append(reference.attend(q[:, h], keys, kv[:, h, 4:], documents, 6**-0.5))
        return torch.cat(heads, -1) @ p["out"].T

    numbers = torch.zeros(B, T) if documents is None else documents
    compare(
        layer,
        lambda: layer(x, mb),
        lambda: torch.stack([row(*r) for r in zip(x, mb.positions, numbers, strict=True)]),
        x,
    )


@pytest.mark.parametrize(("mscale", "all_dim", "softmax", "tables"), [
    (1.0, 1.0, 1.8739, 1.0), (0.707, 0.707, 1.5896, 1.0), (1.0, 0.0, 1.0, 1.3689),
])  # fmt: skip
def test_yarn_corrections_reach_attention(mscale, all_dim, softmax, tables):
    scaling = YarnConfig(factor=40, mscale=mscale, mscale_all_dim=all_dim)
    rope = Rope(RopeConfig(scaling=scaling), 2)
    c = MlaConfig(n_heads=1, kv_rank=4, nope_dim=2, rope_dim=2, v_dim=2)
    layer = LatentAttention(single(), c, D, rope, LocalAttention(), RULE)
    assert layer.scale == pytest.approx(0.5 * softmax, rel=1e-4)
    gqa = GroupedQueryAttention(
        single(), GqaConfig(n_heads=1, n_kv_heads=1, head_dim=2), D, rope, LocalAttention(), RULE
    )
    assert gqa.scale == pytest.approx(2**-0.5 * softmax, rel=1e-4)
    cos, sin = rope.tables(microbatch(torch.zeros(1, 1, dtype=torch.int64)), torch.float32)
    assert cos.item() == pytest.approx(tables, rel=1e-4)
    assert sin.item() == 0


def test_yarn_factor_1_is_plain():
    mb = microbatch(torch.zeros(1, 50, dtype=torch.int64))
    plain = Rope(RopeConfig(), 8)
    yarn = Rope(RopeConfig(scaling=YarnConfig(factor=1, mscale=0.7, mscale_all_dim=0.3)), 8)
    assert yarn.softmax_multiplier == 1
    for a, b in zip(plain.tables(mb, torch.float64), yarn.tables(mb, torch.float64), strict=True):
        assert torch.equal(a, b)


def test_tables_are_made_once_and_not_in_bfloat16():
    mb = microbatch(torch.zeros(1, 50, dtype=torch.int64))
    rope = Rope(RopeConfig(), 8)
    first = rope.tables(mb, torch.bfloat16)
    assert first[0].dtype == torch.float32
    assert Rope(RopeConfig(), 8).tables(mb, torch.bfloat16)[0] is first[0]
    assert Rope(RopeConfig(theta=7.0), 8).tables(mb, torch.bfloat16)[0] is not first[0]


# ---- head ------------------------------------------------------------------------------------------------------


def targets() -> Tensor:
    t = torch.randint(V, (B, T))
    t[0, :3] = -100
    t[1, 4] = -100
    return t


def head_logits(head: Head, x: Tensor) -> Tensor:
    return reference.rms_norm(x, head.norm.weight, 1e-5) @ head.weight.T


@pytest.mark.parametrize("chunk", [None, 3])
def test_head_loss(chunk, monkeypatch):
    if chunk:
        monkeypatch.setattr(head_module, "CHUNK_ROWS", chunk)
        monkeypatch.setattr(head_module, "CHUNK_LOGITS", 1)
    head, t = real(Head(single(), V, D, 1e-5, Init())), targets()
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    mb = microbatch(torch.zeros(B, T, dtype=torch.int64), t)
    mb.n_targets = torch.tensor(23)  # of the whole batch, of which this is a part

    def expected() -> Tensor:
        log_p = head_logits(head, x).log_softmax(-1)
        return -sum(log_p[i, j, t[i, j]] for i in range(B) for j in range(T) if t[i, j] >= 0) / 23

    compare(head, lambda: head(x, mb), expected, x)


def test_head_logits():
    head, x = real(Head(single(), V, D, 1e-5, Init())), torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    compare(head, lambda: head(x, microbatch(torch.zeros(B, T, dtype=torch.int64))), lambda: head_logits(head, x), x)


def test_known_loss():
    head = real(Head(single(), 4, 1, 0.0, Init()))
    with torch.no_grad():
        head.norm.weight.fill_(1)
        head.weight.copy_(torch.arange(4.0)[:, None])
    x = torch.tensor([[[2.0], [5.0]]], dtype=torch.float64)  # each 1 once normalised, so the logits are 0, 1, 2, 3
    mb = microbatch(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[3, -100]]))
    assert head(x, mb).item() == pytest.approx(0.4401897, abs=1e-7)


@pytest.mark.parametrize("n_targets", [0, torch.tensor(0)])
def test_no_target_at_all_is_no_nan(n_targets):
    head, x = real(Head(single(), V, D, 1e-5, Init())), torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    mb = microbatch(torch.zeros(B, T, dtype=torch.int64), torch.full((B, T), -100))
    mb.n_targets = n_targets
    loss = head(x, mb)
    loss.backward()
    assert loss.item() == 0
    assert x.grad is not None
    assert not x.grad.any()
