"""Which columns of a row each rank of ``cp`` holds.

A query works as many times as it has keys, so in a causal row late columns cost more than early ones. A placement gives
every rank equally many columns, and if it can equal work.

Letters: N rows, T columns, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..config.errors import ConfigError

Columns = NDArray[np.int64]
"""Columns of each row on each rank ``[n, N, T/n]``, ascending; together every column once."""
Placement = Callable[[NDArray[np.int32], int], Columns]
"""``placement(documents, n)``: from the documents of each column ``[N, T]``."""

GOOD_ENOUGH = 1.01
"""Largest work of a rank over the mean at which ``balanced`` cuts no finer: fine pieces make small kernel calls."""
FINEST = 16
"""Columns of the smallest piece that ``balanced`` deals out, but for rows too short for that."""


def contiguous(documents: NDArray[np.int32], n: int) -> Columns:
    """Rank i holds the i-th of n equal pieces."""
    rows, width = documents.shape
    return np.broadcast_to(np.arange(width).reshape(n, 1, -1), (n, rows, width // n))


def zigzag(documents: NDArray[np.int32], n: int) -> Columns:
    """Rank i holds pieces i and 2n-1-i of 2n: in a row of one document every rank has the same work.

    Source: Brandon 2023, arXiv 2311.09431, in another order of tokens; Llama team 2024, arXiv 2407.21783, 3.3.2.
    """
    rows, width = documents.shape
    pieces = np.arange(width).reshape(2 * n, -1)
    pairs = np.concatenate([pieces[:n], pieces[: n - 1 : -1]], 1)
    return np.broadcast_to(pairs[:, None], (n, rows, width // n))


def balanced(documents: NDArray[np.int32], n: int) -> Columns:
    """Pieces are dealt out by their work, the most expensive first, each to the rank that has least so far.

    Every rank gets equally many pieces. They are the longest that balance the microbatch, rows making up for each
    other.
    """
    rows, width = documents.shape
    work = keys_seen(documents)
    pieces, best, best_share = 2 * n, zigzag(documents, n), np.inf
    while width % pieces == 0 and (pieces == 2 * n or width // pieces >= FINEST):
        dealt, share = _deal(work.reshape(rows, pieces, -1).sum(2), n)
        if share < best_share:
            length = width // pieces
            columns = (dealt[..., None] * length + np.arange(length)).reshape(n, rows, -1)
            best, best_share = columns, share
        if share <= GOOD_ENOUGH:
            break
        pieces *= 2
    return best


def _deal(work: NDArray[np.int64], n: int) -> tuple[NDArray[np.int64], float]:
    """Pieces of each rank and row ``[n, N, P/n]`` by the work of each ``[N, P]``; the largest rank over the mean."""
    rows, pieces = work.shape
    total = np.zeros(n, np.int64)
    dealt = np.empty((n, rows, pieces // n), np.int64)
    for row in range(rows):
        held: list[list[int]] = [[] for _ in range(n)]
        for piece in np.argsort(-work[row], kind="stable").tolist():
            rank = min((r for r in range(n) if len(held[r]) < pieces // n), key=lambda r: (total[r], r))
            held[rank].append(piece)
            total[rank] += work[row, piece]
        dealt[:, row] = np.sort(held, 1)
    return dealt, float(total.max() * n / total.sum())


def keys_seen(documents: NDArray[np.int32]) -> NDArray[np.int64]:
    """How many keys each column's query sees ``[N, T]``: those of its document up to itself."""
    column = np.arange(documents.shape[1])
    first = np.diff(documents, axis=1, prepend=documents[:, :1] - 1) != 0
    return column - np.maximum.accumulate(np.where(first, column, 0), axis=1) + 1


PLACEMENTS: dict[str, Placement] = {"zigzag": zigzag, "contiguous": contiguous, "balanced": balanced}


def check_columns(columns: Columns, rows: int, width: int, n: int, name: str) -> None:
    """Refuse a placement that does not give every column to one rank, equally many to each.

    Raises:
        ConfigError: naming what ``name`` returned.
    """
    if columns.shape != (n, rows, width // n):
        raise ConfigError([f"context.placement={name} returns columns of shape {columns.shape} for {rows} rows of "
                           f"{width} tokens on {n} ranks. Return {(n, rows, width // n)}."])  # fmt: skip
    if (np.diff(columns, axis=2) <= 0).any():
        raise ConfigError([f"context.placement={name} returns columns that do not ascend. Sort each rank's columns."])
    every = np.sort(np.concatenate(list(columns), 1), 1)
    if (every != np.arange(width)).any():
        raise ConfigError([f"context.placement={name} leaves out a column, or gives it twice. Give every column of a "
                           "row to one rank."])  # fmt: skip
