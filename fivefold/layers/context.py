"""The seam between attention and what holds a sequence: who has which positions, and how queries meet all keys.

Letters: B sequences, T tokens of a sequence on this rank, H query heads, G key and value heads, E query width, V value
width.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from ..ops.attention import attention, document_mask
from .microbatch import MicroBatch


@runtime_checkable
class ContextAttention(Protocol):
    """Attention of this rank's queries over the whole of their sequences."""

    def prepare(self, mb: MicroBatch) -> None:
        """Derive what ``attend`` needs of ``mb`` and keep it in ``mb.cache``; ``attend`` does it if nobody has."""
        ...

    def attend(
        self,
        q: Float[Tensor, "B T H E"],
        k: Float[Tensor, "B T G E"],
        v: Float[Tensor, "B T G V"],
        mb: MicroBatch,
        scale: float,
    ) -> Float[Tensor, "B T H V"]:
        """Causal attention inside each document; heads S(2) over ``tp``."""
        ...


class LocalAttention:
    """Every rank holds whole sequences, so nothing is exchanged."""

    def prepare(self, mb: MicroBatch) -> None:
        if mb.documents is not None and "mask" not in mb.cache:
            mb.cache["mask"] = document_mask(mb.positions, mb.documents, mb.positions, mb.documents)

    def attend(
        self,
        q: Float[Tensor, "B T H E"],
        k: Float[Tensor, "B T G E"],
        v: Float[Tensor, "B T G V"],
        mb: MicroBatch,
        scale: float,
    ) -> Float[Tensor, "B T H V"]:
        if mb.documents is None:
            return attention(q, k, v, scale=scale, causal=True)
        self.prepare(mb)
        return attention(q, k, v, scale=scale, mask=mb.cache["mask"])
