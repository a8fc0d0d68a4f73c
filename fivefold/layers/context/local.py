"""Attention where every rank holds whole sequences, so that nothing is exchanged."""

from __future__ import annotations

from torch import Tensor

from ...mesh.axis import Axis
from ...ops.attention import attention
from ..microbatch import MicroBatch
from .attend import attend
from .base import KeyValues
from .work import prepared

ALONE = Axis("cp")


class LocalAttention:
    """The plain causal kernel, and for rows of several documents one call a document."""

    def prepare(self, mb: MicroBatch) -> None:
        if mb.documents is not None:
            prepared(mb, 0)

    def attend(self, q: Tensor, kv: KeyValues, mb: MicroBatch, scale: float) -> Tensor:
        heads = kv.expanded()
        if mb.documents is None:
            return attention(q, heads.k, heads.v, scale=scale, causal=True)
        return attend(q, heads, mb, scale, ALONE, "")
