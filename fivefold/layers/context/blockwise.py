"""Attention in blocks of keys: those methods that bring keys, or what they are made of, to the queries."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ...mesh.run import Run
from ..microbatch import MicroBatch
from .attend import attend
from .base import KeyValues
from .work import prepared


class RingAttention:
    """Keys and values go around the ring of ranks; each step's are on their way while the last's are used.

    Source: Liu 2023, arXiv 2310.01889.
    """

    how: ClassVar[str] = "ring"

    def __init__(self, run: Run) -> None:
        self.axis = run.mesh.cp

    def prepare(self, mb: MicroBatch) -> None:
        prepared(mb, self.axis.rank)

    def attend(self, q: Tensor, kv: KeyValues, mb: MicroBatch, scale: float) -> Tensor:
        return attend(q, kv.expanded(), mb, scale, self.axis, self.how)


class AllGatherAttention(RingAttention):
    """All keys and values are gathered first: fewer, larger messages, and all keys of a layer in memory at once.

    Source: Llama team 2024, arXiv 2407.21783, section 3.3.2.
    """

    how = "all_gather"


class LatentRing(RingAttention):
    """MLA's latent and shared rotary key go around, and every rank expands what it needs of each block.

    The expanded keys of one block at a time are in memory. In backward each rank sums the weight's gradient over the
    blocks at once and not in the queue of the split backward, which would have to keep every block's.
    """

    def attend(self, q: Tensor, kv: KeyValues, mb: MicroBatch, scale: float) -> Tensor:
        return attend(q, kv, mb, scale, self.axis, self.how)
