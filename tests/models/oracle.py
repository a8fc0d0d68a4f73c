"""Models written by another library, each with the values its code computes, as parts of ours.

Each folder of ``hf/`` holds ``config.json`` and ``model.safetensors`` as transformers 5.24 saves them, and
``oracle.safetensors`` with its logits, gradients and routes in float64, its hard-coded float32 casts lifted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fivefold.config.model import (
    DecoderConfig,
    GqaConfig,
    Llama3Config,
    MlaConfig,
    MoeConfig,
    RopeConfig,
    YarnConfig,
)
from fivefold.layers.microbatch import MicroBatch
from fivefold.layers.moe import MoE
from fivefold.mesh.parameter import spec_of
from fivefold.models.builder import build_parts
from tests.helpers import microbatch, replace_parameters, share_tied, single

HF = Path(__file__).parent / "hf"
CASES = tuple(sorted(p.name for p in HF.iterdir()))

NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attention.q": "self_attn.q_proj.weight",
    "attention.k": "self_attn.k_proj.weight",
    "attention.v": "self_attn.v_proj.weight",
    "attention.out": "self_attn.o_proj.weight",
    "attention.q_down": "self_attn.q_a_proj.weight",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.q_up": "self_attn.q_b_proj.weight",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.kv_up": "self_attn.kv_b_proj.weight",
    "ffn.gate": "mlp.gate_proj.weight",
    "ffn.up": "mlp.up_proj.weight",
    "ffn.down": "mlp.down_proj.weight",
    "ffn.router": "mlp.gate.weight",
    "ffn.bias": "mlp.gate.e_score_correction_bias",
    "ffn.shared.gate": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared.up": "mlp.shared_experts.up_proj.weight",
    "ffn.shared.down": "mlp.shared_experts.down_proj.weight",
}
"""Our names and theirs; inside a layer without ``layers.N.`` and ``model.layers.N.``."""


def their_name(ours: str) -> str:
    """Their name of our parameter; of one expert's if ours holds all."""
    if not ours.startswith("layers."):
        return NAMES[ours]
    _, layer, rest = ours.split(".", 2)
    return f"model.layers.{layer}.{NAMES[rest]}"


def config_of(hf: dict[str, Any]) -> DecoderConfig:
    """Our configuration of a ``config.json``."""
    family, rope = hf["model_type"], hf["rope_parameters"]
    original = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "llama3":
        factors = {k: rope[k] for k in ("factor", "low_freq_factor", "high_freq_factor")}
        scaling = Llama3Config(original_length=original, **factors)
    else:
        factors = {k: rope[k] for k in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")}
        scaling = YarnConfig(original_length=original, **factors)
    half = not hf.get("rope_interleave", family != "llama")
    return DecoderConfig(
        vocab_size=hf["vocab_size"],
        dim=hf["hidden_size"],
        n_layers=hf["num_hidden_layers"],
        ffn_dim=hf["intermediate_size"],
        attention=_attention(hf),
        moe=None if family == "llama" else _moe(hf, family),
        rope=RopeConfig(theta=rope["rope_theta"], layout="half" if half else "interleaved", scaling=scaling),
        norm_eps=hf["rms_norm_eps"],
        tied=hf["tie_word_embeddings"],
    )


def _attention(hf: dict[str, Any]) -> GqaConfig | MlaConfig:
    n_heads = hf["num_attention_heads"]
    if hf["model_type"] == "llama":
        return GqaConfig(n_heads=n_heads, n_kv_heads=hf["num_key_value_heads"], head_dim=hf["head_dim"])
    return MlaConfig(
        n_heads=n_heads,
        q_rank=hf["q_lora_rank"] or 0,
        kv_rank=hf["kv_lora_rank"],
        nope_dim=hf["qk_nope_head_dim"],
        rope_dim=hf["qk_rope_head_dim"],
        v_dim=hf["v_head_dim"],
    )


def _moe(hf: dict[str, Any], family: str) -> MoeConfig:
    third = family == "deepseek_v3"
    return MoeConfig(n_experts=hf["n_routed_experts"], top_k=hf["num_experts_per_tok"], n_shared=hf["n_shared_experts"],
                     expert_dim=hf["moe_intermediate_size"], n_dense_layers=hf["first_k_dense_replace"],
                     score="sigmoid" if third else "softmax", normalise=hf["norm_topk_prob"],
                     route_scale=hf["routed_scaling_factor"], n_groups=hf["n_group"], top_groups=hf["topk_group"],
                     group_score="top2_sum" if third else "max", bias_rate=0.0)  # fmt: skip


class Oracle:
    """One case: our parts with its weights, and the values they should give."""

    def __init__(self, case: str, dtype: torch.dtype) -> None:
        folder = HF / case
        self.config = config_of(json.loads((folder / "config.json").read_text()))
        self.values = load_file(folder / "oracle.safetensors")
        theirs = load_file(folder / "model.safetensors")
        self.parts = build_parts(single(), self.config)
        for name, part in self.parts.items():
            values = {
                path: self._value(theirs, spec_of(p).init_name or f"{name}.{path}").to(dtype)
                for path, p in part.named_parameters()
            }
            replace_parameters(part, values)
            for path, buffer in part.named_buffers():
                if path == "ffn.bias":
                    buffer.copy_(theirs.get(their_name(f"{name}.{path}"), torch.zeros_like(buffer)))
        share_tied(self.parts)

    def _value(self, theirs: dict[str, Tensor], ours: str) -> Tensor:
        if self.is_stack(ours):
            stem, _, kind = their_name(ours).rpartition("mlp.")
            return torch.stack([theirs[f"{stem}mlp.experts.{e}.{kind}"] for e in range(self._moe.n_experts)])
        return theirs[their_name(ours)]

    @property
    def _moe(self) -> MoeConfig:
        assert self.config.moe is not None
        return self.config.moe

    def is_stack(self, ours: str) -> bool:
        """Whether our parameter holds one matrix per expert."""
        stem, _, kind = ours.rpartition(".")
        return stem.endswith(".ffn") and kind in ("gate", "up", "down") and self.config.is_moe(int(ours.split(".")[1]))

    def batch(self, which: str = "input_ids") -> MicroBatch:
        """The tokens without targets."""
        return microbatch(self.values[which].long())

    def training_batch(self) -> MicroBatch:
        """The tokens with the targets of their labels, which stand one place later."""
        labels = self.values["labels"].long()
        targets = torch.full_like(labels, -100)
        targets[:, :-1] = labels[:, 1:]
        return microbatch(self.values["input_ids"].long(), targets)

    def gradients(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Ours and theirs, under their names, of every gradient the oracle holds."""
        ours = {}
        for name, part in self.parts.items():
            for path, p in part.named_parameters():
                assert p.grad is not None, f"{name}.{path}"
                if self.is_stack(f"{name}.{path}"):
                    stem, _, kind = their_name(f"{name}.{path}").rpartition("mlp.")
                    ours |= {f"{stem}mlp.experts.{e}.{kind}": g for e, g in enumerate(p.grad)}
                else:
                    ours[their_name(spec_of(p).init_name or f"{name}.{path}")] = p.grad
        return {
            name: (ours[name], value)
            for key, value in self.values.items()
            if key.startswith("grad.") and (name := key.removeprefix("grad."))
        }

    def layers(self) -> dict[int, nn.Module]:
        """The mixture-of-experts layers by number."""
        found = ((int(n.split(".")[1]), m) for n, p in self.parts.items() for m in p.modules() if isinstance(m, MoE))
        return dict(found)
