"""Where each parameter lies in a flat buffer that is cut into equal shards, so that every cut falls between rows.

A shard is then whole rows of each parameter: one box in a checkpoint, and optimizers and quantisers that work on rows
or blocks stay possible. Source of the requirement: veScale-FSDP's RaggedShard, arXiv 2602.22437.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 8
"""Elements: offsets are multiples of it where rows allow, so that kernels that need 16-byte alignment can be used."""


@dataclass(frozen=True)
class Arrangement:
    """Offsets of the parameters, in the order given, and the size of one shard. Units: elements."""

    offsets: tuple[int, ...]
    shard: int
    padding: int
    """Elements of the whole buffer that belong to no parameter."""


def arrange(sizes: Sequence[tuple[int, int]], shards: int) -> Arrangement:
    """Lay out parameters of ``(elements, elements a row)`` in ``shards`` equal intervals that never cut a row.

    A parameter that is longer than a shard meets several cuts, so the shard must be a multiple of its row; one that is
    shorter meets at most one, and shifting it by less than a row is enough. Largest rows go first, single elements
    last, where they fill the rest. The shard grows until everything fits.
    """
    total = sum(n for n, _ in sizes)
    if total == 0:
        return Arrangement(tuple(0 for _ in sizes), 0, 0)
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i][1], -sizes[i][0], i))
    shard = -(-total // shards)
    while True:
        shard = _round_up(shard, math.lcm(*(row for n, row in sizes if n > shard), ALIGN if shards > 1 else 1))
        offsets, end = _place([sizes[i] for i in order], shard, shards)
        if end <= shard * shards:
            by_index = dict(zip(order, offsets, strict=True))
            return Arrangement(tuple(by_index[i] for i in range(len(sizes))), shard, shard * shards - total)
        shard += max(1, -(-(end - shard * shards) // shards))


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def _place(sizes: Sequence[tuple[int, int]], shard: int, shards: int) -> tuple[list[int], int]:
    """Offsets of ``sizes`` one after another with the least shift that keeps every cut between rows, and the end."""
    offsets, at = [], 0
    for n, row in sizes:
        at = _shifted(at, n, row, shard) if shards > 1 else at
        offsets.append(at)
        at += n
    return offsets, at


def _shifted(at: int, n: int, row: int, shard: int) -> int:
    """The first place from ``at`` where ``n`` elements of ``row`` can start: aligned if that costs under eight rows."""
    fits = [p for p in range(at, at + ALIGN) if p % ALIGN == 0 and _legal(p, n, row, shard)]
    if fits:
        return fits[0]
    cut = _round_up(at + 1, shard)
    legal = [p for k in range(ALIGN) if _legal(p := at + (cut - at) % row + k * row, n, row, shard)]
    legal.append(cut)  # a cut is always a legal start
    return next((p for p in legal if p % ALIGN == 0), legal[0])


def _legal(at: int, n: int, row: int, shard: int) -> bool:
    """Whether every cut strictly inside ``[at, at + n)`` is between rows."""
    first = _round_up(at + 1, shard)
    inside = range(first, at + n, shard)
    return not inside or ((first - at) % row == 0 and (len(inside) == 1 or shard % row == 0))
