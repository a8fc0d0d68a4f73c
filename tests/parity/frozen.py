"""The tiny decoders with some parameters frozen: whole modules, and single matrices of a part that also trains."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fivefold.config.model import DecoderConfig
from fivefold.mesh.run import Run
from fivefold.models import decoder

FROZEN = ("embed.weight", "layers.0.", "layers.1.attention_norm", "layers.2.ffn.router", "layers.2.ffn.up")


def build(run: Run, config: DecoderConfig, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The decoder's parts, those of ``FROZEN`` without a gradient."""
    parts = decoder.build(run, config, names)
    for part, module in parts.items():
        for name, p in module.named_parameters():
            if f"{part}.{name}".startswith(FROZEN):
                p.requires_grad_(False)
    return parts
