"""A decoder, Llama's or DeepSeek's, as an ordered dictionary of named parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..config.model import DecoderConfig, GqaConfig
from ..layers.block import Block
from ..layers.context import ContextAttention, context_attention
from ..layers.dispatch import LocalDispatcher
from ..layers.embedding import Embedding
from ..layers.gqa import GroupedQueryAttention
from ..layers.head import Head
from ..layers.init import InitRule
from ..layers.mla import LatentAttention
from ..layers.moe import MoE
from ..layers.rope import Rope
from ..layers.swiglu import SwiGLU
from ..mesh.parameter import tie
from ..mesh.run import Run


def part_names(config: DecoderConfig) -> list[str]:
    """Names of the parts, first to last."""
    return ["embed", *(f"layers.{i}" for i in range(config.n_layers)), "head"]


def build(run: Run, config: DecoderConfig, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The parts by name, in order, their parameters on ``meta``.

    A part is ``forward(x, mb)``: the first gets ``x=None``, the last returns the loss, or logits without targets.

    Args:
        names: the parts of this rank's stages; None builds all.

    Raises:
        KeyError: if ``names`` has one that ``part_names`` does not.
    """
    every = part_names(config)
    if unknown := set(names or ()) - set(every):
        raise KeyError(f"no part is called {', '.join(sorted(unknown))}. Parts: {', '.join(every)}.")
    init = InitRule(config=config.init, n_layers=config.n_layers)
    attention, context = config.attention, context_attention(run)
    rope = Rope(config.rope, attention.head_dim if isinstance(attention, GqaConfig) else attention.rope_dim)
    parts: dict[str, nn.Module] = {}
    for name in every if names is None else names:
        if name == "embed":
            parts[name] = Embedding(run, config.vocab_size, config.dim, init.embedding(config.dim, config.tied))
        elif name == "head":
            first = init.embedding(config.dim, True) if config.tied else init.matrix(config.dim)
            parts[name] = Head(run, config.vocab_size, config.dim, config.norm_eps, first)
        else:
            parts[name] = _block(run, config, init, rope, context, name)
    if config.tied:
        for name in {"embed", "head"} & parts.keys():
            tie(parts[name].get_parameter("weight"), "embed.weight")
    return parts


def _block(run: Run, config: DecoderConfig, init: InitRule, rope: Rope, context: ContextAttention,
           name: str) -> Block:  # fmt: skip
    layer = int(name.removeprefix("layers."))
    if isinstance(config.attention, GqaConfig):
        attention = GroupedQueryAttention(run, config.attention, config.dim, rope, context, init)
    else:
        attention = LatentAttention(run, config.attention, config.dim, rope, context, init)
    moe = config.moe
    if moe is not None and config.is_moe(layer):
        rate = 0.0 if layer in moe.bias_off_layers else moe.bias_rate
        ffn = MoE(run, moe, config.dim, LocalDispatcher(moe.n_experts), init, rate)
    else:
        ffn = SwiGLU(run, config.dim, config.ffn_dim, init)
    return Block(run, config.dim, config.norm_eps, attention, ffn)
