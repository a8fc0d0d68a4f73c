"""One block of a decoder.

Letters: B sequences, T_tp tokens of a sequence on this rank's place of tp, D width.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from ..mesh.run import Run
from .base import inside
from .gqa import GroupedQueryAttention
from .microbatch import MicroBatch
from .mla import LatentAttention
from .moe import MoE
from .norm import RMSNorm
from .swiglu import SwiGLU


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + ffn(norm(x))``; over ``tp`` and ``cp`` tokens are S(1) throughout.

    Source: Xiong 2020, arXiv 2002.04745 (norm before each sub-layer).
    """

    def __init__(self, run: Run, dim: int, eps: float, attention: GroupedQueryAttention | LatentAttention,
                 ffn: SwiGLU | MoE) -> None:  # fmt: skip
        super().__init__()
        self.run = run
        self.attention_norm = RMSNorm(run, dim, eps)
        self.attention = attention
        self.ffn_norm = RMSNorm(run, dim, eps)
        self.ffn = ffn

    def prepare(self, mb: MicroBatch) -> None:
        """Fill ``mb.cache`` ahead of ``forward``: before a compiled graph, say."""
        self.attention.prepare(mb)

    def forward(self, x: Float[Tensor, "B T_tp D"], mb: MicroBatch) -> Float[Tensor, "B T_tp D"]:
        with inside(self.run, "attention"):
            x = x + self.attention(self.attention_norm(x), mb)
        with inside(self.run, "ffn"):
            h = self.ffn_norm(x)
            return x + (self.ffn(h, mb) if isinstance(self.ffn, MoE) else self.ffn(h))
