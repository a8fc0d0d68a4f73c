"""What a decoder's sizes must satisfy, alone and under a layout. One small function a topic; each returns messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .dims import ParallelDims
from .errors import divisors, not_multiple

if TYPE_CHECKING:
    from .model import DecoderConfig, GqaConfig, MlaConfig, MoeConfig


def problems(model: DecoderConfig, dims: ParallelDims, sequence_length: int) -> list[str]:
    """Every rule that ``model`` breaks under the layout ``dims``, one message each."""
    found = not_multiple("data.sequence_length", sequence_length, {"tp": dims.tp}) if dims.cp == 1 else []
    found += not_multiple("model.ffn_dim", model.ffn_dim, {"tp": dims.tp}) if _has_dense_layer(model) else []
    found += _attention(model.attention, dims)
    if model.moe is not None:
        found += _experts(model.moe, dims) + _groups(model.moe) + _layers(model.moe, model.n_layers)
    return found


def _has_dense_layer(model: DecoderConfig) -> bool:
    return model.moe is None or model.moe.n_dense_layers > 0


def _attention(attention: GqaConfig | MlaConfig, dims: ParallelDims) -> list[str]:
    key = "model.attention"
    found = not_multiple(f"{key}.n_heads", attention.n_heads, {"tp": dims.tp})
    name, rotary = ("head_dim", attention.head_dim) if attention.kind == "gqa" else ("rope_dim", attention.rope_dim)
    if rotary % 2:
        found.append(
            f"{key}.{name}={rotary} is odd, but rotary positions turn pairs of values. "
            f"Use {key}.{name}={max(rotary - 1, 2)} or {rotary + 1}."
        )
    if attention.kind == "gqa":
        if attention.n_heads % attention.n_kv_heads:
            found.append(
                f"{key}.n_kv_heads={attention.n_kv_heads} does not divide {key}.n_heads={attention.n_heads}. "
                f"Use {key}.n_kv_heads in {divisors(attention.n_heads)}."
            )
        found += not_multiple(f"{key}.n_kv_heads", attention.n_kv_heads, {"tp": dims.tp})
    return found


def _experts(moe: MoeConfig, dims: ParallelDims) -> list[str]:
    found = not_multiple("model.moe.n_experts", moe.n_experts, {"ep": dims.ep})
    found += not_multiple("model.moe.expert_dim", moe.expert_dim, {"etp": dims.etp})
    shared = moe.n_shared * moe.expert_dim
    if shared % dims.tp:
        found.append(
            f"model.moe.n_shared*expert_dim={shared}, the width of the shared experts, is not a multiple of "
            f"tp={dims.tp} (n_shared={moe.n_shared}, expert_dim={moe.expert_dim}). "
            f"Use tp in {divisors(shared)}, or change n_shared or expert_dim."
        )
    return found


def _groups(moe: MoeConfig) -> list[str]:
    if moe.n_experts % moe.n_groups:
        return [
            f"model.moe.n_groups={moe.n_groups} does not divide model.moe.n_experts={moe.n_experts}. "
            f"Use model.moe.n_groups in {divisors(moe.n_experts)}."
        ]
    found: list[str] = []
    if moe.top_groups > moe.n_groups:
        found.append(
            f"model.moe.top_groups={moe.top_groups} is above model.moe.n_groups={moe.n_groups}. "
            f"Use model.moe.top_groups from 1 to {moe.n_groups}."
        )
    size = moe.n_experts // moe.n_groups
    allowed = min(moe.top_groups, moe.n_groups) * size
    if moe.top_k > moe.n_experts:
        found.append(
            f"model.moe.top_k={moe.top_k} is above model.moe.n_experts={moe.n_experts}. "
            f"Use model.moe.top_k from 1 to {allowed}."
        )
    elif moe.top_k > allowed:
        found.append(
            f"model.moe.top_k={moe.top_k} is above the {allowed} experts of the groups a token may choose from "
            f"(n_experts={moe.n_experts}, n_groups={moe.n_groups}, top_groups={moe.top_groups}). "
            f"Use model.moe.top_k from 1 to {allowed}, or model.moe.top_groups from {-(-moe.top_k // size)}."
        )
    if moe.n_groups > 1 and moe.group_score == "top2_sum" and size < 2:
        found.append(
            f"model.moe.n_groups={moe.n_groups} leaves {size} expert a group, and group_score=top2_sum adds up two "
            f"(n_experts={moe.n_experts}). Use model.moe.n_groups up to {moe.n_experts // 2}, or group_score=max."
        )
    return found


def _layers(moe: MoeConfig, n_layers: int) -> list[str]:
    found: list[str] = []
    if moe.n_dense_layers > n_layers:
        found.append(
            f"model.moe.n_dense_layers={moe.n_dense_layers} is above model.n_layers={n_layers}. "
            f"Use model.moe.n_dense_layers from 0 to {n_layers}."
        )
    without = [layer for layer in moe.bias_off_layers if not moe.n_dense_layers <= layer < n_layers]
    if without and moe.n_dense_layers < n_layers:
        found.append(
            f"model.moe.bias_off_layers={','.join(map(str, moe.bias_off_layers))} names layers without experts: "
            f"{', '.join(map(str, without))} (n_dense_layers={moe.n_dense_layers}, n_layers={n_layers}). "
            f"Use layers from {moe.n_dense_layers} to {n_layers - 1}."
        )
    return found
