"""From rows of the sampler to the microbatches of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..config import locate
from ..config.errors import ConfigError, not_multiple
from ..config.run import RunConfig
from ..data.placement import PLACEMENTS, Columns, check_columns
from ..data.rows import IGNORE, Rows
from ..layers.microbatch import Holders, MicroBatch
from ..mesh.collectives import sum_values
from ..mesh.mesh import Mesh


class Source(Protocol):
    """What gives rows: a sampler over token files, or a synthetic one."""

    def rows(self, step: int, start: int, stop: int) -> Rows: ...


class EvaluationRows(Protocol):
    """Rows to evaluate, those past the end counting nothing."""

    n_rows: int

    def rows(self, start: int, stop: int) -> Rows: ...


class HeldoutRows(EvaluationRows, Protocol):
    """Rows kept for evaluation, and the bytes of text their targets stand for."""

    n_bytes: int


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
        self._source, self._mesh, self._cutter = source, mesh, Cutter(config, mesh)
        share = config.data.batch_size // mesh.dims.data
        self._start = mesh.data_rank() * share
        self._stop = self._start + share
        self._total = config.data.batch_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._ahead: tuple[int, Future[Rows]] | None = None

    def rows(self, step: int) -> Rows:
        """This data rank's whole rows of ``step``, counted from 1; starts on the next step's."""
        ready = self._ahead[1] if self._ahead and self._ahead[0] == step else self._submit(step)
        rows = ready.result()
        self._ahead = step + 1, self._submit(step + 1)
        return rows

    def _submit(self, step: int) -> Future[Rows]:
        return self._thread.submit(self._source.rows, step, self._start, self._stop)

    def batch(self, rows: Rows) -> Batch:
        """This rank's part of the rows on its device, in microbatches with the whole batch's counts (one loss rule)."""
        shares = self._cutter.shares(rows)
        n_targets = sum_values(counted(shares), self._mesh.join("ddp", "fsdp", "cp")).clamp(min=1)
        return Batch(list(microbatches(shares, n_targets, self._total)), n_targets)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class Share:
    """What this rank holds of one microbatch, as tensors by name, and who holds what."""

    tensors: dict[str, Tensor]
    single_document: bool
    held: Holders | None


class Cutter:
    """Cuts rows into microbatches, in order, and each row over ``cp``, labels already shifted."""

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        self._parts, self._axis, self._device = config.train.microbatches, mesh.cp, mesh.device
        self._name = config.context.placement

    def shares(self, rows: Rows) -> list[Share]:
        """This rank's part of each microbatch, on its device.

        Raises:
            ConfigError: for a row whose document numbers go back.
        """
        if problem := rows.problem():
            raise ConfigError([problem])
        return [self._share(part) for part in rows.parts(self._parts)]

    def _share(self, rows: Rows) -> Share:
        if self._axis.size == 1:
            return Share(to_device(rows, self._device), rows.single_document, None)
        columns = self._columns(rows)
        held = Holders(columns, None if rows.single_document else rows.documents)
        return Share(to_device(rows.columns(columns[self._axis.rank]), self._device), rows.single_document, held)

    def _columns(self, rows: Rows) -> Columns:
        placement = PLACEMENTS.get(self._name)
        if placement is not None:
            return placement(rows.documents, self._axis.size)
        columns = np.asarray(locate.function(self._name, "context.placement")(rows.documents, self._axis.size))
        n_rows, width = rows.tokens.shape
        check_columns(columns, n_rows, width, self._axis.size, self._name)
        return columns


def counted(shares: Sequence[Share]) -> Tensor:
    """How many targets of ``shares`` count."""
    return torch.stack([(share.tensors["targets"] != IGNORE).sum() for share in shares]).sum()


def microbatches(shares: Sequence[Share], n_targets: Tensor, n_sequences: int) -> Iterator[MicroBatch]:
    """``shares`` with the counts of the whole batch."""
    for share in shares:
        t = share.tensors
        yield MicroBatch(tokens=t["tokens"], targets=t["targets"], positions=t["positions"],
                         documents=None if share.single_document else t["documents"],
                         n_targets=n_targets, n_sequences=n_sequences, held=share.held)  # fmt: skip


def to_device(rows: Rows, device: torch.device) -> dict[str, Tensor]:
    """The arrays of ``rows`` as tensors on ``device``; copies to CUDA do not block."""
    arrays = {"tokens": rows.tokens, "targets": rows.targets, "positions": rows.positions, "documents": rows.documents}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if device.type == "cuda":
        tensors = {name: t.pin_memory().to(device, non_blocking=True) for name, t in tensors.items()}
    return tensors
