"""A user's own way to reach keys on other ranks, and a user's own placement."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fivefold.layers.context.base import KeyValues
from fivefold.layers.microbatch import MicroBatch
from fivefold.mesh.collectives import all_gather, gather_values
from fivefold.mesh.run import Run
from fivefold.ops.attention import attention, document_mask


class Masked:
    """Gathers all keys and values with their positions, and masks."""

    def __init__(self, run: Run) -> None:
        self.cp = run.mesh.cp

    def prepare(self, mb: MicroBatch) -> None:
        pass

    def attend(self, q: Tensor, kv: KeyValues, mb: MicroBatch, scale: float) -> Tensor:
        heads = kv.expanded()
        k, v = (all_gather(x, self.cp, dim=1) for x in (heads.k, heads.v))
        documents = torch.zeros_like(mb.positions) if mb.documents is None else mb.documents
        positions, of = (torch.cat(list(gather_values(x, self.cp)), 1) for x in (mb.positions, documents))
        return attention(q, k, v, scale=scale, mask=document_mask(mb.positions, documents, positions, of))


def masked(run: Run) -> Masked:
    return Masked(run)


def striped(documents: NDArray[np.int32], n: int) -> NDArray[np.int64]:
    """Rank i holds every n-th column from the i-th on. Source: Brandon 2023, arXiv 2311.09431."""
    rows, width = documents.shape
    return np.broadcast_to(np.arange(width).reshape(-1, n).T[:, None], (n, rows, width // n))
