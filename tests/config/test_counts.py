"""Parameters, FLOPs and cache against published totals, and against sums over every matrix written out one by one."""

from __future__ import annotations

import pytest

from fivefold.config import counts
from fivefold.config.model import DecoderConfig, ModelConfig
from fivefold.recipes import RECIPES


def layer_matrices(model: DecoderConfig, layer: int) -> list[tuple[int, int, int, int]]:
    """Every matrix of a block: rows, columns, how many there are, how many a token meets."""
    a = model.attention
    if a.kind == "gqa":
        q, kv, out = a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim, a.n_heads * a.head_dim
        found = [(q, model.dim, 1, 1), (kv, model.dim, 2, 2), (model.dim, out, 1, 1)]
    else:
        q = a.n_heads * (a.nope_dim + a.rope_dim)
        found = [(a.q_rank, model.dim, 1, 1), (q, a.q_rank, 1, 1)] if a.q_rank else [(q, model.dim, 1, 1)]
        found += [(a.kv_rank, model.dim, 1, 1), (a.rope_dim, model.dim, 1, 1)]
        found += [(a.n_heads * a.nope_dim, a.kv_rank, 1, 1), (a.n_heads * a.v_dim, a.kv_rank, 1, 1)]
        found += [(model.dim, a.n_heads * a.v_dim, 1, 1)]
    if model.is_moe(layer):
        moe = model.moe
        assert moe is not None
        found += [(moe.n_experts, model.dim, 1, 1)]
        found += [(moe.expert_dim, model.dim, 3 * moe.n_experts, 3 * moe.top_k)]
        found += [(moe.n_shared * moe.expert_dim, model.dim, 3, 3)]
    else:
        found += [(model.ffn_dim, model.dim, 3, 3)]
    return found


def matrices(model: DecoderConfig) -> list[tuple[int, int, int, int]]:
    """Every matrix of the blocks and the head."""
    layers = [row for layer in range(model.n_layers) for row in layer_matrices(model, layer)]
    return [(model.vocab_size, model.dim, 1, 1), *layers]


def norms(model: DecoderConfig) -> int:
    a = model.attention
    latent = a.q_rank + a.kv_rank if a.kind == "mla" else 0
    return (2 * model.dim + latent) * model.n_layers + model.dim


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("tied", [False, True])
def test_against_every_matrix(name, tied):
    model = RECIPES[name]().model.model_copy(update={"tied": tied})
    found = matrices(model)
    embedding = 0 if tied else model.vocab_size * model.dim
    met = sum(rows * columns * n for rows, columns, _, n in found)
    assert counts.parameters(model) == embedding + norms(model) + sum(r * c * n for r, c, n, _ in found)
    assert counts.active_parameters(model) == met + norms(model)
    for length in (1, 7, 4096):
        a = model.attention
        key, value = (a.head_dim, a.head_dim) if a.kind == "gqa" else (a.nope_dim + a.rope_dim, a.v_dim)
        pairs = length * (length + 1) // 2  # of a query and a key it may see
        sequence = 6 * met * length + 3 * 2 * (key + value) * a.n_heads * pairs * model.n_layers
        assert model.flops_per_token(length) * length == pytest.approx(sequence, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama3_8b", 8.03, None),
        ("llama3_70b", 70.55, None),
        ("llama3_405b", 405.85, None),
        ("deepseek_v2_lite", 15.71, 2.45),
        ("deepseek_v3", 671.03, 36.63),
    ],
)
def test_published_totals(name, total, active):
    model = RECIPES[name]().model
    assert round(counts.parameters(model) / 1e9, 2) == total
    if active:
        assert round(counts.active_parameters(model) / 1e9, 2) == active


def test_deepseek_v3():
    model = RECIPES["deepseek_v3"]().model
    bias = 256 * 58  # the released files hold the routing bias as well
    assert counts.parameters(model) + bias == 671_026_419_200
    assert 250.4e9 < model.flops_per_token(4096) < 250.5e9
    assert counts.kv_cache_bytes(model) == 70_272


def test_kv_cache():
    assert counts.kv_cache_bytes(RECIPES["llama3_8b"]().model) == 2 * 8 * 128 * 2 * 32
    assert counts.kv_cache_bytes(RECIPES["llama3_8b"]().model, value_bytes=1) == 2 * 8 * 128 * 32


@pytest.mark.parametrize("name", RECIPES)
def test_costs_of_the_parts(name):
    model = RECIPES[name]().model
    costs = model.part_costs(64)
    assert list(costs) == ["embed", *(f"layers.{i}" for i in range(model.n_layers)), "head"]
    a = model.attention
    key, value = (a.head_dim, a.head_dim) if a.kind == "gqa" else (a.nope_dim + a.rope_dim, a.v_dim)
    attention = 3 * 2 * (key + value) * a.n_heads * (64 + 1) / 2
    for layer in range(model.n_layers):
        met = sum(rows * columns * n for rows, columns, _, n in layer_matrices(model, layer))
        assert costs[f"layers.{layer}"] == pytest.approx(6 * met + attention, rel=1e-12)
    assert costs["head"] == 6 * model.vocab_size * model.dim
    assert sum(costs.values()) == pytest.approx(model.flops_per_token(64) + 2 * model.dim, rel=1e-12)


def test_a_model_of_ones_own_has_no_costs_until_it_gives_them():
    assert ModelConfig(builder="m:f", vocab_size=8).part_costs(64) is None
