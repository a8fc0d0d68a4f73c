"""A piece: the part of a parameter that one rank stores. Engine, optimizer, verify and checkpoints all speak it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .parameter import ParamSpec


@dataclass(frozen=True)
class Piece:
    """Elements ``start:stop`` of a block, in row-major order; the block is a box of the whole parameter.

    A rank's tensor-parallel or expert slice of a parameter is the block; data-parallel storage cuts the block's rows.
    The block is clipped to the whole parameter, so padding is never inside.
    """

    name: str
    global_shape: tuple[int, ...]
    block_offset: tuple[int, ...]
    """Where the block starts in the whole parameter."""
    block_size: tuple[int, ...]
    start: int
    stop: int
    data: Tensor
    """The elements, flat: ``stop - start`` of them, a view of the rank's storage."""

    def place(self) -> Tensor:
        """Index of each element in the whole parameter, row-major. int64 ``[stop - start]``."""
        return flat_index(self.global_shape, self.block_offset, self.block_size,
                          torch.arange(self.start, self.stop, device=self.data.device))  # fmt: skip


def flat_index(global_shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...], local: Tensor) -> Tensor:
    """Index in the whole parameter of the elements ``local`` (row-major) of the box at ``offset`` of ``size``."""
    index, stride = torch.zeros_like(local), 1
    for n, o, s in zip(reversed(global_shape), reversed(offset), reversed(size), strict=True):
        index += (local % s + o) * stride
        local, stride = local // s, stride * n
    return index


def clipped(spec: ParamSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The local ``shape`` without the padding that lies past the whole parameter's end; only dim 0 may be padded."""
    size = tuple(max(0, min(n, g - o)) for n, g, o in zip(shape, spec.global_shape, spec.offset, strict=True))
    assert size[1:] == tuple(shape[1:]) or not math.prod(size), f"padding of {spec} is not in dim 0"
    return size
