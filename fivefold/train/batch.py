"""From rows of the sampler to the microbatches of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..config.errors import ConfigError, not_multiple
from ..config.run import RunConfig
from ..data.rows import IGNORE, Rows
from ..layers.microbatch import MicroBatch
from ..mesh.collectives import sum_values
from ..mesh.mesh import Mesh


class Source(Protocol):
    """What gives rows: a sampler over token files, or a synthetic one."""

    def rows(self, step: int, start: int, stop: int) -> Rows: ...


class HeldoutRows(Protocol):
    """Rows kept for evaluation, those past the end counting nothing, and the bytes of text their targets stand for."""

    n_rows: int
    n_bytes: int

    def rows(self, start: int, stop: int) -> Rows: ...


@dataclass(frozen=True)
class Batch:
    """One step's share of this rank."""

    microbatches: list[MicroBatch]
    n_targets: Tensor
    """Targets that count in the whole batch. Scalar, I."""


class Batches:
    """This rank's batch of every step: rows are built one step ahead on a thread, while the step before runs.

    Raises:
        ConfigError: if the batch does not divide: rows left over would be trained on by nobody.
    """

    def __init__(self, source: Source, config: RunConfig, mesh: Mesh) -> None:
        factors = {"ddp*fsdp": mesh.dims.data, "train.microbatches": config.train.microbatches}
        if problems := not_multiple("data.batch_size", config.data.batch_size, factors):
            raise ConfigError(problems)
        self._source, self._mesh = source, mesh
        share = config.data.batch_size // mesh.dims.data
        self._start = mesh.data_rank() * share
        self._stop = self._start + share
        self._parts = config.train.microbatches
        self._total = config.data.batch_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._ahead: tuple[int, Future[Rows]] | None = None

    def rows(self, step: int) -> Rows:
        """This rank's rows of ``step``, counted from 1; starts on the next step's."""
        ready = self._ahead[1] if self._ahead and self._ahead[0] == step else self._submit(step)
        rows = ready.result()
        self._ahead = step + 1, self._submit(step + 1)
        return rows

    def _submit(self, step: int) -> Future[Rows]:
        return self._thread.submit(self._source.rows, step, self._start, self._stop)

    def batch(self, rows: Rows) -> Batch:
        """The rows on the device, cut into microbatches, each with the whole batch's counts: the one loss rule."""
        tensors = to_device(rows, self._mesh.device)
        local = (tensors["targets"] != IGNORE).sum()
        n_targets = sum_values(local, self._mesh.join("ddp", "fsdp")).clamp(min=1)
        return Batch(list(cut(rows, tensors, self._parts, n_targets, self._total)), n_targets)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def to_device(rows: Rows, device: torch.device) -> dict[str, Tensor]:
    """The arrays of ``rows`` as tensors on ``device``; copies to CUDA do not block."""
    arrays = {"tokens": rows.tokens, "targets": rows.targets, "positions": rows.positions, "documents": rows.documents}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if device.type == "cuda":
        tensors = {name: t.pin_memory().to(device, non_blocking=True) for name, t in tensors.items()}
    return tensors


def cut(
    rows: Rows, tensors: dict[str, Tensor], parts: int, n_targets: Tensor, n_sequences: int
) -> Iterator[MicroBatch]:
    """``parts`` microbatches of equally many rows, in order."""
    size = len(rows.tokens) // parts
    for i in range(parts):
        t = {name: x[i * size : (i + 1) * size] for name, x in tensors.items()}
        documents = None if rows.single_document else t["documents"]
        yield MicroBatch(tokens=t["tokens"], targets=t["targets"], positions=t["positions"], documents=documents,
                         n_targets=n_targets, n_sequences=n_sequences)  # fmt: skip
