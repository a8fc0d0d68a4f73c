"""Whole parameters from the pieces that ranks store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from .collectives import sum_values
from .mesh import Mesh
from .pieces import Piece


def assemble(
    pieces: Iterable[Piece], shapes: Mapping[str, tuple[int, ...]], mesh: Mesh, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Each whole parameter in turn, on every rank of a replica: the sum of what its owners hold, zeros elsewhere.

    One parameter exists at a time.

    Args:
        pieces: those of which no other rank of the replica has a copy.
        dtype: of all pieces, on all ranks.
    """
    mine: dict[str, list[Piece]] = {}
    for piece in pieces:
        mine.setdefault(piece.name, []).append(piece)
    for name, shape in shapes.items():
        whole = torch.zeros(shape, dtype=dtype, device=mesh.device)
        for piece in mine.get(name, []):
            whole.view(-1)[piece.place()] = piece.data
        yield name, sum_values(whole, mesh.join("pp", "fsdp", "cp", "tp"))
