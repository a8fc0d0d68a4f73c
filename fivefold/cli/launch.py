"""Start the local ranks of a run through torch's elastic launcher, and tell which one failed first.

torch is imported once and the ranks are forked (spawned with CUDA, which does not survive a fork), so the parent runs
no torch operation. No rank may go on before the last is forked: the parent's store looks up the address of each rank
that connects, under a lock of glibc's resolver, and a rank forked at that moment would find the lock taken for ever.

elastic reports one failed rank, not the first; so each rank leaves a note of its own error and of being stopped by the
parent, for :mod:`.failure` to read.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final

from ..config.errors import ConfigError
from .failure import UNWRITTEN, Note, RankError, first_failure, stopped_file

LOST_PEER_PAUSE_S: Final = 1.0
"""How long a rank that lost another stays, so that all can write their notes before the parent stops everybody."""

FORK_TIMEOUT_S: Final = 60.0
"""How long the ranks wait for the last of them to be forked: milliseconds, unless it died on the way."""


def launch(
    function: Callable[..., None],
    args: Sequence[Any],
    *,
    world: int,
    logs: Path,
    cuda: bool = False,
    stop_timeout_s: int = 30,
) -> None:
    """Call ``function(*args)`` on ``world`` local ranks and return when all have.

    Rank 0 writes to this terminal, the others to ``rank<k>.txt`` in the folder ``logs``. One rank runs in this process.

    Args:
        cuda: whether the ranks use CUDA: they are spawned, and ``function`` and ``args`` must be picklable.
        stop_timeout_s: how long ranks may take to stop before they are killed, in seconds.

    Raises:
        RankError: when a rank fails; the others are stopped.
        SystemExit: with 128 + the signal's number, when this process is told to stop.
    """
    if world == 1:
        _alone(function, args)
        return
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logs.mkdir(parents=True, exist_ok=True)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"is_host": True, "timeout": 60},
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="spawn" if cuda else "fork",
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        shutdown_timeout=stop_timeout_s,
    )
    forked = None if cuda else multiprocessing.get_context("fork").Barrier(world, timeout=FORK_TIMEOUT_S)
    try:
        elastic_launch(config, _rank)(function, tuple(args), str(logs), forked)
    except ChildFailedError as error:
        raise first_failure(error, world, logs) from None
    except SignalException as stop:
        raise SystemExit(128 + stop.sigval) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        _tidy(logs, world)


def as_rank(function: Callable[..., None], args: Sequence[Any]) -> None:
    """Call ``function(*args)`` in this process, a rank that ``torchrun`` started and is told of an error."""
    from torch.distributed.elastic.multiprocessing.errors import record

    record(function)(*args)


def _alone(function: Callable[..., None], args: Sequence[Any]) -> None:
    """One rank in this process, ended by signals as several are."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        function(*args)
    except ConfigError:
        raise
    except Exception as error:
        note = Note.of(error)
        raise RankError(f"rank 0 of 1 failed: {note.error}", rank=0, note=note) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _rank(function: Callable[..., None], args: Sequence[Any], logs: str, forked: Barrier | None) -> None:
    """What a started rank does: set itself up, call ``function``, and leave a note if that fails.

    Args:
        forked: where forked ranks wait until the last of them exists; None when they are spawned for CUDA.
    """
    rank = int(os.environ["RANK"])
    # the parent's handlers raise, which a rank inside a collective would notice too late
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stopped = stopped_file(Path(logs), rank).open("w", encoding="utf-8")
    faulthandler.register(signal.SIGTERM, file=stopped, chain=True)
    if rank:
        _redirect(Path(logs) / f"rank{rank}.txt")
    try:
        if forked is not None:
            import torch

            torch.set_num_threads(1)
            forked.wait()
        function(*args)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        note = Note.of(error)
        noted = note.write(Path(logs), rank)
        with suppress(OSError):  # the output's disk may be full too
            if rank or not noted:
                sys.stderr.write(note.traceback)
            sys.stdout.flush()
            sys.stderr.flush()
        if note.caused:
            time.sleep(LOST_PEER_PAUSE_S)
        os._exit(note.status if noted else UNWRITTEN)  # no teardown: it could wait for ranks that are gone


def _redirect(path: Path) -> None:
    """Send this process's output, C++'s included, to the file ``path``."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _tidy(logs: Path, world: int) -> None:
    """Remove notes that say nothing, and bring back a cursor that a progress bar has hidden."""
    for rank in range(world):
        path = stopped_file(logs, rank)
        if path.is_file() and not path.stat().st_size:
            path.unlink()
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()
