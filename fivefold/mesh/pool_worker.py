"""One rank of a :class:`~.pool.Pool`: takes cases from a pipe, runs them, answers with results or errors."""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from ..config.dims import ParallelDims
from ..observe.recorder import Recorder
from .mesh import Groups, Mesh
from .process import use_loopback


@dataclass(kw_only=True)
class RankContext:
    """What a case gets beside its arguments."""

    rank: int
    world: int
    cache: dict[str, Any] = field(default_factory=dict, repr=False)
    """What a case wants to find again in the next."""
    _groups: Groups = field(repr=False)
    _meshes: dict[object, Mesh] = field(default_factory=dict, repr=False)

    def mesh(self, dims: ParallelDims | str, recorder: Recorder | None = None,
             ends: tuple[int, int] | None = None) -> Mesh:  # fmt: skip
        """The mesh of a layout, with the ``ends`` of its pipeline; built once, its groups shared with other meshes.

        Every rank has to ask for the same layouts in the same order.
        """
        dims = ParallelDims.parse(dims, self.world) if isinstance(dims, str) else dims
        key = str(dims), ends or (0, dims.pp - 1)
        if key not in self._meshes:
            assert dims.world == self.world, f"{dims} needs {dims.world} ranks, the pool has {self.world}"
            self._meshes[key] = Mesh(dims, self.rank, groups=self._groups, ends=ends)
        mesh = self._meshes[key]
        return mesh if recorder is None else mesh.recorded(recorder)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What a case raised."""

    kind: str
    """Name of the exception's type."""
    message: str
    trace: str


def serve(rank: int, world: int, connection: Connection, folder: str, timeout_s: float) -> None:
    """Be rank ``rank`` until the parent closes the connection or dies. The first answer says that all have met."""
    torch.set_num_threads(1)  # before any operator: OpenMP's threads do not survive a fork
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_die_with_parent, args=(folder,), daemon=True).start()
    context = RankContext(rank=rank, world=world, _groups=Groups(rank, timeout_s))
    with trace_file(folder, rank).open("w") as log:
        faulthandler.enable(log)
        connection.send_bytes(_answer(lambda: _meet(rank, world, folder, timeout_s)))
        while (message := _receive(connection)) is not None:
            connection.send_bytes(_answer(lambda m=message: _run(m, context, log)))
    sys.stdout.flush()
    os._exit(0)  # the other ranks may be gone: nothing to tear down together


def trace_file(folder: str, rank: int) -> Path:
    """Where a worker writes the trace of its threads when it crashes or runs out of time."""
    return Path(folder) / f"trace-{rank}.txt"


def _die_with_parent(folder: str) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _meet(rank: int, world: int, folder: str, timeout_s: float) -> None:
    if world > 1:
        use_loopback()
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world,
                                timeout=timedelta(seconds=timeout_s))  # fmt: skip


def _receive(connection: Connection) -> bytes | None:
    try:
        return connection.recv_bytes()
    except EOFError:
        return None


def _run(message: bytes, context: RankContext, log: TextIO) -> Any:
    timeout_s, case, args = load(message)
    faulthandler.dump_traceback_later(timeout_s, file=log)
    try:
        return case(context, *args)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _answer(job: Callable[[], Any]) -> bytes:
    """The packed result of ``job``, or its packed :class:`Failure`."""
    try:
        return dump(job())
    except BaseException as error:  # also SystemExit: the parent decides what ends a worker
        return dump(Failure(kind=type(error).__name__, message=str(error), trace=traceback.format_exc()))


# ---- values on the pipe ----------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Sends a CPU tensor as its own bytes: torch would send the whole storage that a small view looks at."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.device.type == "cpu" and obj.layout == torch.strided:
            data = obj.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return _tensor, (bytearray(data), obj.dtype, tuple(obj.shape))
        return NotImplemented


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def dump(value: Any) -> bytes:
    """Bytes of ``value``; tensors go as plain values, without gradient. For pipes between own processes only."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def load(message: bytes) -> Any:
    """The value that :func:`dump` packed."""
    return pickle.loads(message)


Case = Callable[..., Any]
"""``case(context, *args)``: a function of a module, the same on every rank."""
