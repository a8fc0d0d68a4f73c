"""Attention with heads and sequence swapped: each rank gets whole rows of some of the heads.

Letters: B sequences, T tokens of a sequence on this rank, n ranks of the axis, H heads, E width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...mesh.collectives import reshard
from ...mesh.run import Run
from ...ops.attention import attention
from ..microbatch import MicroBatch
from .attend import attend
from .base import Heads, KeyValues
from .local import ALONE
from .work import prepared


class Ulysses:
    """An all-to-all before attention makes rows whole and cuts heads, one after it does the reverse.

    Needs as many query heads, and key heads, on each rank of ``tp`` as a multiple of ``cp``.

    Source: Jacobs 2023, arXiv 2309.14509.
    """

    def __init__(self, run: Run) -> None:
        self.axis = run.mesh.cp

    def prepare(self, mb: MicroBatch) -> None:
        self._order(mb)
        if mb.documents is not None:
            prepared(mb, 0, whole=True)

    def attend(self, q: Tensor, kv: KeyValues, mb: MicroBatch, scale: float) -> Tensor:
        heads = kv.expanded()
        there, back = self._order(mb)
        q, k, v = (_Ordered.apply(reshard(x, self.axis, split=2, join=1), there, back) for x in (q, heads.k, heads.v))
        if mb.documents is None:
            y = attention(q, k, v, scale=scale, causal=True)
        else:
            y = attend(q, Heads(k, v), mb, scale, ALONE, "", whole=True)
        return reshard(_Ordered.apply(y, back, there), self.axis, split=1, join=2)  # S(2) -> S(1)

    def _order(self, mb: MicroBatch) -> tuple[Tensor, Tensor]:
        """Where each column of all rows is among the ranks' tokens ``[B*n*T]``, and the reverse."""
        if "ulysses" not in mb.cache:
            columns = np.concatenate(mb.holders.columns, 1)
            row = np.arange(len(columns))[:, None] * columns.shape[1]
            both = (np.argsort(columns, 1) + row, columns + row)
            mb.cache["ulysses"] = [torch.from_numpy(x.ravel()).to(mb.tokens.device) for x in both]
        there, back = mb.cache["ulysses"]
        return there, back


class _Ordered(torch.autograd.Function):
    """Tokens ``[B, n*T, H, E]`` in another order; torch's own would keep them, and add up in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return _selected(x, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _selected(gradients[0], *ctx.saved_tensors), None, None


def _selected(x: Tensor, order: Tensor) -> Tensor:
    return x.flatten(0, 1).index_select(0, order).view(x.shape)
