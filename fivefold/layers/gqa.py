"""Grouped-query attention.

Letters: B sequences, T tokens of a sequence, T_tp those of this rank's place of tp, D width, H query heads, G key and
value heads, E width of a head.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from ..config.model import GqaConfig
from ..mesh.collectives import all_gather, reduce_scatter
from ..mesh.run import Run
from ..ops.linear import linear
from .base import Layer
from .context.base import ContextAttention, Heads
from .init import InitRule
from .microbatch import MicroBatch
from .rope import Rope


class GroupedQueryAttention(Layer):
    """Attention in which H/G query heads share a key and value head; heads are split over ``tp``.

    Source: Ainslie 2023, arXiv 2305.13245; Korthikanti 2022, arXiv 2205.05198 (the two collectives).
    """

    SHARDING = {"q": ("tp", None), "k": ("tp", None), "v": ("tp", None), "out": (None, "tp")}
    q: nn.Parameter
    k: nn.Parameter
    v: nn.Parameter
    out: nn.Parameter

    def __init__(
        self, run: Run, config: GqaConfig, dim: int, rope: Rope, context: ContextAttention, init: InitRule
    ) -> None:
        super().__init__(run)
        self.width, self.rope, self.context = config.head_dim, rope, context
        self.scale = config.head_dim**-0.5 * rope.softmax_multiplier
        self.declare("q", (config.n_heads * self.width, dim), init.matrix(dim))
        self.declare("k", (config.n_kv_heads * self.width, dim), init.matrix(dim))
        self.declare("v", (config.n_kv_heads * self.width, dim), init.matrix(dim))
        self.declare("out", (dim, config.n_heads * self.width), init.residual(config.n_heads * self.width))

    def prepare(self, mb: MicroBatch) -> None:
        """Fill ``mb.cache`` ahead of ``forward``: before a compiled graph, say."""
        self.rope.tables(mb, self.q.dtype)
        self.context.prepare(mb)

    def forward(self, x: Float[Tensor, "B T_tp D"], mb: MicroBatch) -> Float[Tensor, "B T_tp D"]:
        queue, heads = self.queue, (-1, self.width)
        x = all_gather(x, self.tp, dim=1)  # S(1) -> R     [B, T, D]
        tables = self.rope.tables(mb, x.dtype)  # I             [B, T, E/2]
        q = self.rope.turn(linear(x, self.q, queue).unflatten(-1, heads), tables)  # S(2)  [B, T, H/tp, E]
        k = self.rope.turn(linear(x, self.k, queue).unflatten(-1, heads), tables)  # S(2)  [B, T, G/tp, E]
        v = linear(x, self.v, queue).unflatten(-1, heads)  # S(2)          [B, T, G/tp, E]
        y = self.context.attend(q, Heads(k, v), mb, self.scale)  # S(2)  [B, T, H/tp, E]
        y = linear(y.flatten(2), self.out, queue)  # P             [B, T, D]
        return reduce_scatter(y, self.tp, dim=1)  # P -> S(1)     [B, T/tp, D]
