"""Attention over a list of rectangles of queries and keys: what remains of a causal, document-masked square.

Documents lie one after another in a row, so what a run of queries sees of a block of keys is a rectangle or a triangle,
and no mask is needed but for documents too short to be worth a call of their own.

Letters: B rows of the batch, T queries, S keys, H query heads, G key and value heads, E query width, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from .partial import merge_, partial_attention, partial_attention_backward

FULL, CAUSAL, MASKED = 0, 1, 2
"""Kinds of pairs: all of a rectangle; its lower triangle; what documents and columns allow."""


class Pairs(NamedTuple):
    """Queries ``[q_start, q_stop)`` of the rows ``[first_row, last_row)``, with keys ``[k_start, k_stop)``."""

    first_row: int
    last_row: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kind: int

    @property
    def queries(self) -> tuple[slice, slice]:
        return slice(self.first_row, self.last_row), slice(self.q_start, self.q_stop)

    @property
    def keys(self) -> tuple[slice, slice]:
        return slice(self.first_row, self.last_row), slice(self.k_start, self.k_stop)

    def moved(self, by: int) -> Pairs:
        """The same pairs with keys counted from ``by``."""
        return self._replace(k_start=self.k_start - by, k_stop=self.k_stop - by)


class Places(NamedTuple):
    """Of queries and keys: document and column in the row. Shapes: [2, B, T] and [2, B, S]."""

    queries: Int[Tensor, "2 B T"]
    keys: Int[Tensor, "2 B S"]

    def mask(self, pairs: Pairs) -> Tensor | None:
        """True where a query may attend a key ``[b, t, s]``; None unless the kind is MASKED."""
        if pairs.kind != MASKED:
            return None
        (doc_q, col_q), (doc_k, col_k) = self.queries[:, *pairs.queries], self.keys[:, *pairs.keys]
        same = doc_q[:, :, None] == doc_k[:, None, :]
        return same.logical_and_(col_q[:, :, None] >= col_k[:, None, :])


class Keys(NamedTuple):
    """A block of keys and values, and which queries meet which of them."""

    k: Float[Tensor, "B S G E"]
    v: Float[Tensor, "B S G V"]
    pairs: Sequence[Pairs]
    places: Places


def attend_(
    out: Float[Tensor, "B T H V"],
    lse: Float[Tensor, "B H T"],
    q: Float[Tensor, "B T H E"],
    keys: Keys,
    *,
    scale: float,
    first: bool,
) -> None:
    """Add the attention of ``q`` over ``keys`` to ``out`` and ``lse``, in place.

    Args:
        first: whether ``out`` and ``lse`` hold nothing yet; then the pairs have every query once.
    """
    for p in keys.pairs:
        part, part_lse = partial_attention(q[p.queries], keys.k[p.keys], keys.v[p.keys], scale=scale,
                                           causal=p.kind == CAUSAL, mask=keys.places.mask(p))  # fmt: skip
        rows, queries = p.queries
        if first:
            out[p.queries], lse[rows, :, queries] = part.to(out.dtype), part_lse
        else:
            merge_(out[p.queries], lse[rows, :, queries], part, part_lse)


def attend_backward_(
    gradients: tuple[Float[Tensor, "B T H E"], Float[Tensor, "B S G E"], Float[Tensor, "B S G V"]],
    grad: Float[Tensor, "B T H V"],
    out: Float[Tensor, "B T H V"],
    lse: Float[Tensor, "B H T"],
    q: Float[Tensor, "B T H E"],
    keys: Keys,
    *,
    scale: float,
    first: bool,
) -> None:
    """Add what ``keys`` contribute to the ``gradients`` of q, k and v, in place.

    Args:
        grad, out, lse: of the attention over all keys.
        first: whether ``gradients`` hold nothing yet; then the pairs have every query and key once.
    """
    for p in keys.pairs:
        rows, queries = p.queries
        parts = partial_attention_backward(grad[p.queries], q[p.queries], keys.k[p.keys], keys.v[p.keys],
                                           out[p.queries], lse[rows, :, queries], scale=scale,
                                           causal=p.kind == CAUSAL, mask=keys.places.mask(p))  # fmt: skip
        for total, part, at in zip(gradients, parts, (p.queries, p.keys, p.keys), strict=True):
            if first:
                total[at] = part.to(total.dtype)
            else:
                total[at] += part
