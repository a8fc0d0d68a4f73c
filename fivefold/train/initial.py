"""Initial values from saved weights: each rank reads what it stores of them, whatever the layout that saved them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..config import weights
from ..config.errors import ConfigError
from ..config.run import RunConfig
from ..layers.moe import MoE
from ..mesh.mesh import Mesh
from ..mesh.pieces import Piece
from ..mesh.run import Run
from ..models.builder import build_parts
from ..wrap.entries import collect
from .balance import expert_layers


def check_initial(config: RunConfig) -> None:
    """Compare the weights that ``config.train.init_from`` names with the model, without memory and before any process.

    A model that cannot be built so is left to the ranks, which compare again.

    Raises:
        ConfigError: if a tensor is missing, unknown or of another shape.
    """
    if not config.train.init_from:
        return
    run = Run(Mesh.single("meta"))
    try:
        with torch.device("meta"):
            parts = build_parts(run, config.model)
    except Exception:
        return
    shapes = {e.name: e.spec.global_shape for groups in collect(parts, run).groups.values()
              for group in groups.values() for e in group}  # fmt: skip
    layers = {name: moe.config.n_experts for name, moe in expert_layers(parts).items()}
    _saved(config.train.init_from, shapes, layers)


def load_initial(path: str, pieces: Iterable[Piece], experts: Mapping[str, MoE],
                 shapes: Mapping[str, tuple[int, ...]], layers: Mapping[str, int]) -> None:  # fmt: skip
    """Fill this rank's ``pieces`` and the routing biases of its ``experts`` with the weights saved in ``path``.

    Args:
        shapes: whole shape of every parameter of the model.
        layers: experts of every expert layer of the model.

    Raises:
        ConfigError: if there are no weights, or a tensor is missing, unknown or of another shape.
    """
    found = _saved(path, shapes, layers)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def file_of(name: str) -> Any:
            file = found.files[name]
            if file not in opened:
                opened[file] = stack.enter_context(safe_open(file, framework="pt"))
            return opened[file]

        for piece in pieces:
            _read(file_of(piece.name), piece)
        for name, moe in experts.items():
            moe.bias.copy_(file_of(_bias(name)).get_tensor(_bias(name)))


def boxes(size: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Elements ``start:stop``, row-major, of a block of ``size``, as boxes in that order: at most two for each dim."""
    if start >= stop:
        return
    if not size:
        yield ()
        return
    row = math.prod(size[1:])
    first, last = -(-start // row), stop // row  # the rows that are whole
    if first > last:
        yield from _inside(size, last, start - last * row, stop - last * row)
        return
    yield from _inside(size, first - 1, start - (first - 1) * row, row if start < first * row else 0)
    if first < last:
        yield slice(first, last), *(slice(0, n) for n in size[1:])
    yield from _inside(size, last, 0, stop - last * row)


def _inside(size: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    for box in boxes(size[1:], start, stop):
        yield slice(row, row + 1), *box


def _read(file: Any, piece: Piece) -> None:
    """Fill ``piece`` with what it is of its tensor in ``file``, and read no more than that."""
    at = 0
    for box in boxes(piece.block_size, piece.start, piece.stop):
        place = tuple(slice(o + s.start, o + s.stop) for o, s in zip(piece.block_offset, box, strict=True))
        values: Tensor = file.get_slice(piece.name)[place] if place else file.get_tensor(piece.name)
        piece.data[at : at + values.numel()].copy_(values.reshape(-1))
        at += values.numel()


def _saved(path: str, shapes: Mapping[str, tuple[int, ...]], layers: Mapping[str, int]) -> weights.SavedWeights:
    """What is saved in ``path``, of which all fits the model."""
    found = weights.saved(path)
    wanted = {**shapes, **{_bias(name): (n,) for name, n in layers.items()}}
    if problems := weights.misfits(path, found, wanted):
        raise ConfigError(problems)
    return found


def _bias(name: str) -> str:
    """What the routing bias of the expert layer ``name`` is saved as."""
    return f"{name}.bias"
