"""Multi-head latent attention, with and without query compression.

Letters: B sequences, T tokens of a sequence, T_tp those of this rank's place of tp, D width, H heads, L latent width, N
width of a head's key without position, R rotary width, V width of a head's value, Q width of the compressed query.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..config.model import MlaConfig
from ..mesh.axis import Axis
from ..mesh.collectives import all_gather, reduce_scatter
from ..mesh.run import Run
from ..ops.linear import linear
from .base import Layer
from .context.base import ContextAttention, Latent
from .init import InitRule
from .microbatch import MicroBatch
from .norm import RMSNorm
from .rope import Rope, shard_tables


def gather_together(tensors: Sequence[Tensor], axis: Axis) -> Sequence[Tensor]:
    """Token shards ``[B, T_tp, *]``, S(1) -> R, in one all-gather: for small tensors the call is what costs."""
    if axis.size == 1:
        return tensors
    whole = all_gather(torch.cat(list(tensors), -1), axis, dim=1)
    return whole.split([t.shape[-1] for t in tensors], -1)


class LatentAttention(Layer):
    """Attention whose keys and values are expanded from one latent vector per token; heads are split over ``tp``.

    The down-projections run on token shards, and what is gathered is the latent and the shared rotary key, already
    turned (with query compression the query's latent too), not the hidden state: for DeepSeek-V3 2,112 values a token
    instead of 7,168. So over ``tp`` they see S(1), and their gradients are summed like a norm's.

    Source: DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.
    """

    SHARDING = {"q": ("tp", None), "q_down": (None, None), "q_up": ("tp", None), "kv_down": (None, None),
                "kv_up": ("tp", None), "out": (None, "tp")}  # fmt: skip
    kv_down: nn.Parameter
    kv_up: nn.Parameter
    out: nn.Parameter

    def __init__(
        self, run: Run, config: MlaConfig, dim: int, rope: Rope, context: ContextAttention, init: InitRule
    ) -> None:
        super().__init__(run)
        c = self.config = config
        self.rope, self.context = rope, context
        self.scale = (c.nope_dim + c.rope_dim) ** -0.5 * rope.softmax_multiplier
        width = c.n_heads * (c.nope_dim + c.rope_dim)
        if c.q_rank:
            self.declare("q_down", (c.q_rank, dim), init.matrix(dim))
            self.q_norm = RMSNorm(run, c.q_rank, c.latent_norm_eps)
            self.declare("q_up", (width, c.q_rank), init.matrix(c.q_rank))
        else:
            self.declare("q", (width, dim), init.matrix(dim))
        self.declare("kv_down", (c.kv_rank + c.rope_dim, dim), init.matrix(dim))
        self.kv_norm = RMSNorm(run, c.kv_rank, c.latent_norm_eps)
        self.declare("kv_up", (c.n_heads * (c.nope_dim + c.v_dim), c.kv_rank), init.matrix(c.kv_rank))
        self.declare("out", (dim, c.n_heads * c.v_dim), init.residual(c.n_heads * c.v_dim))

    def prepare(self, mb: MicroBatch) -> None:
        """Fill ``mb.cache`` ahead of ``forward``: before a compiled graph, say."""
        self.rope.tables(mb, self.out.dtype)
        self.context.prepare(mb)

    def forward(self, x: Float[Tensor, "B T_tp D"], mb: MicroBatch) -> Float[Tensor, "B T_tp D"]:
        c, queue = self.config, self.queue
        tables = self.rope.tables(mb, x.dtype)  # I     [B, T, R/2]
        latent, key = linear(x, self.kv_down, queue).split([c.kv_rank, c.rope_dim], -1)  # S(1)  [B, T/tp, L], [.., R]
        latent = self.kv_norm(latent)
        key = self.rope.turn(key[:, :, None], shard_tables(tables, self.tp))[:, :, 0]
        source, q_matrix = x, self.get_parameter("q_up" if c.q_rank else "q")
        if c.q_rank:
            source = self.q_norm(linear(x, self.get_parameter("q_down"), queue))  # S(1)  [B, T/tp, Q]
        source, latent, key = gather_together((source, latent, key), self.tp)  # S(1) -> R  [B, T, .]

        q = linear(source, q_matrix, queue).unflatten(-1, (-1, c.nope_dim + c.rope_dim))  # S(2)  [B, T, H/tp, N+R]
        q_nope, q_rope = q.split([c.nope_dim, c.rope_dim], -1)
        q = torch.cat([q_nope, self.rope.turn(q_rope, tables)], -1)
        kv = Latent(latent, key, self.kv_up, c.nope_dim, c.v_dim, queue)  # of which heads are expanded: S(2)
        y = self.context.attend(q, kv, mb, self.scale)  # S(2)  [B, T, H/tp, V]
        y = linear(y.flatten(2), self.out, queue)  # P     [B, T, D]
        return reduce_scatter(y, self.tp, dim=1)  # P -> S(1)  [B, T/tp, D]
