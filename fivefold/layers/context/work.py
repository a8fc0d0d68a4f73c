"""Which queries meet which keys on a rank: the rectangles and triangles that its share of the rows leaves.

Worked out on the host from who holds which columns, before attention starts; nothing waits for a device.

Letters: n ranks of the axis, B rows, T columns of a row on one rank, P entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ops.blocks import CAUSAL, FULL, MASKED, Pairs
from ..microbatch import Holders, MicroBatch

SMALL = 64
"""Neighbouring documents of up to so many tokens together are masked in one call. Rows of 2,048 tokens of documents of
8 took 84, 53, 57, 90 and 184 ms with 0, 64, 128, 256 and 512 (CPU, 8 heads of 64, forward and backward), one masked
square 543."""
STEPS = 8
"""A rectangle with more steps than this is masked instead: placements that deal out single tokens."""

Entry = tuple[int, int, int, int, int, int]
"""Rank whose keys they are, then q_start, q_stop, k_start, k_stop and kind, as in ``Pairs``."""


def runs(values: NDArray[np.integer]) -> Iterator[tuple[int, int]]:
    """Begin and end of each stretch of equal values."""
    cuts = np.flatnonzero(np.diff(values)) + 1
    edges = [0, *cuts.tolist(), len(values)]
    yield from pairwise(edges)


def _own(rank: int, documents: NDArray[np.integer]) -> Iterator[Entry]:
    """This rank's queries with its own keys, which stand in the order of their columns: a triangle a document."""
    small: list[int] = []  # begin and end of what is gathered to be masked together, and how many documents that is
    for begin, end in runs(documents):
        if small and end - small[0] <= SMALL:
            small[1:] = [end, small[2] + 1]
            continue
        if small:
            yield rank, small[0], small[1], small[0], small[1], MASKED if small[2] > 1 else CAUSAL
        small = [begin, end, 1]
    yield rank, small[0], small[1], small[0], small[1], MASKED if small[2] > 1 else CAUSAL


def _others(place: int, q: tuple[NDArray[np.integer], NDArray[np.integer]],
            k: tuple[NDArray[np.integer], NDArray[np.integer]]) -> Iterator[Entry]:  # fmt: skip
    """This rank's queries with another's keys: in a document, each query sees the first so many of them.

    Args:
        q, k: documents and columns.
    """
    keys = {int(k[0][begin]): (begin, end) for begin, end in runs(k[0])}
    for begin, end in runs(q[0]):
        if (at := keys.get(int(q[0][begin]))) is None:
            continue
        seen = np.searchsorted(k[1][at[0] : at[1]], q[1][begin:end])  # ascends with the queries
        steps = [(a, b) for a, b in runs(seen) if seen[a]]
        if len(steps) > STEPS:
            yield place, begin + steps[0][0], end, at[0], at[0] + int(seen[-1]), MASKED
        else:
            yield from ((place, begin + a, begin + b, at[0], at[0] + int(seen[a]), FULL) for a, b in steps)


def row_work(holders: Holders, rank: int, row: int) -> tuple[Entry, ...]:
    """The entries of one row, own keys first."""
    columns = holders.columns[:, row]
    documents = np.zeros_like(columns) if holders.documents is None else holders.documents[row][columns]
    found = list(_own(rank, documents[rank]))
    for place in range(len(columns)):
        if place != rank:
            found += _others(place, (documents[rank], columns[rank]), (documents[place], columns[place]))
    return tuple(found)


def work(holders: Holders, rank: int) -> NDArray[np.int32]:
    """All entries ``[P, 8]``: rank whose keys they are, then the fields of ``Pairs``; equal rows share them."""
    known: dict[bytes, tuple[Entry, ...]] = {}
    alike: list[tuple[int, int, tuple[Entry, ...]]] = []
    for row in range(holders.columns.shape[1]):
        key = holders.columns[:, row].tobytes()
        key += b"" if holders.documents is None else holders.documents[row].tobytes()
        if key not in known:
            known[key] = row_work(holders, rank, row)
        if alike and alike[-1][2] == known[key]:
            alike[-1] = alike[-1][0], row + 1, known[key]
        else:
            alike.append((row, row + 1, known[key]))
    table = [(place, first, last, *pairs) for first, last, entries in alike for place, *pairs in entries]
    return np.array(table, np.int32).reshape(-1, 8)


def by_place(table: Tensor, n: int) -> list[list[Pairs]]:
    """The entries of each rank's keys, from ``work`` as a tensor."""
    found: list[list[Pairs]] = [[] for _ in range(n)]
    for place, *pairs in table.tolist():
        found[place].append(Pairs(*pairs))
    return found


def places(holders: Holders, device: torch.device) -> Tensor:
    """Documents and columns of what each rank holds ``[n, 2, B, T]`` int32, for masks."""
    columns = holders.columns
    if holders.documents is None:
        documents = np.zeros_like(columns)
    else:
        documents = np.take_along_axis(np.broadcast_to(holders.documents, (len(columns), *holders.documents.shape)),
                                       columns, 2)  # fmt: skip
    return torch.from_numpy(np.stack([documents, columns], 1).astype(np.int32)).to(device)


def prepared(mb: MicroBatch, rank: int, *, whole: bool = False) -> tuple[Tensor, Tensor]:
    """``work`` and ``places`` of a microbatch as tensors, the first on the host; worked out once.

    Args:
        whole: for a rank that holds whole rows for a while.
    """
    key = f"context work {whole}"
    if key not in mb.cache:
        holders = mb.holders.whole() if whole else mb.holders
        table = work(holders, rank)
        masked = bool((table[:, -1] == MASKED).any())
        at = places(holders, mb.tokens.device) if masked else torch.empty(0, dtype=torch.int32, device=mb.tokens.device)
        mb.cache[key] = torch.from_numpy(table), at
    return mb.cache[key]
