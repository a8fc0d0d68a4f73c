"""Run a model's parts on one process without the data engine: real parameters, microbatches, comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.layers.microbatch import MicroBatch
from fivefold.mesh.init import initial_values
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.parameter import attach, spec_of
from fivefold.mesh.run import Run


def single() -> Run:
    """A run of one rank: every collective disappears."""
    return Run(Mesh.single())


def replace_parameters(part: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give ``part`` real parameters in place of its meta ones; each keeps its spec."""
    for path, old in list(part.named_parameters()):
        place, _, name = path.rpartition(".")
        new = nn.Parameter(values[path])
        assert new.shape == old.shape, (path, new.shape, old.shape)
        part.get_submodule(place).register_parameter(name, attach(new, spec_of(old)))


def share_tied(parts: Mapping[str, nn.Module]) -> None:
    """Make parameters that are tied to one name one parameter, as the data engine does on one rank."""
    known: dict[str, nn.Parameter] = {}
    for part in parts.values():
        for path, p in list(part.named_parameters()):
            if (name := spec_of(p).init_name) is not None:
                place, _, last = path.rpartition(".")
                part.get_submodule(place).register_parameter(last, known.setdefault(name, p))


def local_slice(whole: Tensor, p: nn.Parameter) -> Tensor:
    """The part of ``whole`` that this rank's ``p`` is, with zeros where it is padded."""
    spec = spec_of(p)
    for dim, (start, size) in enumerate(zip(spec.offset, p.shape, strict=True)):
        part = whole.narrow(dim, min(start, whole.shape[dim]), max(0, min(size, whole.shape[dim] - start)))
        padding = [0] * (2 * (whole.ndim - dim) - 1) + [size - part.shape[dim]]
        whole = F.pad(part, padding)
    return whole


def materialise(parts: Mapping[str, nn.Module], run: Run, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
    """Give the parts of one rank real parameters with their initial values."""
    for part_name, part in parts.items():
        values = {}
        for path, p in part.named_parameters():
            spec = spec_of(p)
            index = torch.arange(math.prod(spec.global_shape)).view(spec.global_shape)
            whole = initial_values(spec.init, seed, spec.init_name or f"{part_name}.{path}", index)
            values[path] = local_slice(whole, p).to(dtype=dtype, device=run.mesh.device)
        replace_parameters(part, values)
    share_tied(parts)


def microbatch(
    tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None, n_sequences: int | None = None
) -> MicroBatch:
    """Whole rows as one microbatch that is the whole batch; positions restart where ``documents`` change."""
    n_rows, length = tokens.shape
    positions = torch.arange(length).expand(n_rows, length)
    if documents is not None:
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        positions = positions - (positions * starts).cummax(1).values
    n_targets = 0 if targets is None else int((targets != -100).sum())
    return MicroBatch(tokens=tokens, targets=targets, positions=positions, documents=documents, n_targets=n_targets,
                      n_sequences=n_rows if n_sequences is None else n_sequences)  # fmt: skip


def forward(parts: Iterable[nn.Module], mb: MicroBatch) -> Tensor:
    """The parts one after another: the loss, or logits without targets."""
    x = None
    for part in parts:
        x = part(x, mb)
    assert x is not None
    return x


def error(a: Tensor, b: Tensor) -> float:
    """``max|a-b| / max|b|``; where ``b`` is all zero, 0 if ``a`` is too and infinite otherwise."""
    if a.shape != b.shape:
        raise AssertionError(f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    largest = b.abs().max().item() if b.numel() else 0.0
    worst = (a - b).abs().max().item() if b.numel() else 0.0
    return worst / largest if largest else (0.0 if worst == 0 else float("inf"))
