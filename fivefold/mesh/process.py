"""A rank joins its run, tightens its time limits once it runs, and leaves: the life of one process."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from ..config.parts import CommConfig

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's ``mallopt``, from its ``malloc.h``."""
KEEP_BYTES = 1 << 30
"""Free memory at the end of the heap that stays with the process."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """This process's place in the run."""

    rank: int
    """Number among all ranks."""
    world: int
    """Ranks of the run."""
    local_rank: int
    """Number among the ranks of this host."""
    device: torch.device
    """Where its tensors live."""


def join(comm: CommConfig, device: str) -> Process:
    """Join the run that the launcher's environment describes; without one, be a run of one rank.

    A single rank gets no process group: every collective disappears.

    Args:
        comm: time limits; ``init_timeout_s`` holds until :func:`set_step_timeouts`.
        device: ``cpu`` or ``cuda``.

    Raises:
        RuntimeError: if the other ranks do not come within ``init_timeout_s``.
    """
    rank, world, local_rank = (int(os.environ.get(k, d)) for k, d in
                               (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))  # fmt: skip
    on = torch.device("cuda", local_rank) if device == "cuda" else torch.device(device)
    if on.type == "cuda":
        torch.cuda.set_device(on)
    else:
        keep_freed_memory()
    if world > 1:
        if _one_host():
            use_loopback()
        timeout = timedelta(seconds=comm.init_timeout_s)
        store, _, _ = next(rendezvous("env://", rank, world, timeout=timeout))
        # The agent's store outlives a restart, and with it the addresses of ranks that are gone.
        store = dist.PrefixStore(f"try-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        backend = "nccl" if on.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return Process(rank=rank, world=world, local_rank=local_rank, device=on)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next allocation, as torch does on CUDA; elsewhere do nothing.

    A step frees and allocates the same buffers every time, and to have their pages mapped and zeroed again each time
    costs a small model 4 to 7 % of its CPU time.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)
        mallopt(M_MMAP_MAX, 0)


def set_step_timeouts(groups: Iterable[dist.ProcessGroup], step_timeout_s: float) -> None:
    """Limit every collective on the default group and on ``groups`` from now on: once the first step is done, all ranks
    are in step, and a rank that does not come soon will not come at all."""
    if dist.is_initialized():
        for group in {dist.group.WORLD, *groups}:
            _set_pg_timeout(timedelta(seconds=step_timeout_s), group)


def leave(process: Process, shutdown_timeout_s: float) -> None:
    """Give the process groups up; a teardown that hangs ends the process with status 1 and every thread's trace."""
    with deadline(shutdown_timeout_s):
        if process.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def deadline(timeout_s: float) -> Iterator[None]:
    """End the process, with the trace of every thread on stderr, if the block takes longer.

    The watchdog is faulthandler's: it needs no interpreter lock, which a hang inside a C call may hold.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def use_loopback() -> None:
    """Let gloo talk over the loopback interface, unless the user chose one: a host's own name may not resolve."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in names if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _one_host() -> bool:
    """Whether all ranks run on this host, as far as the launcher's environment says."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    return local == os.environ["WORLD_SIZE"] or os.environ.get("MASTER_ADDR") in LOOPBACK_HOSTS


def make_deterministic() -> None:
    """Require torch's deterministic algorithms; an operator that has none raises when it is called.

    cuBLAS also needs a fixed workspace, which it reads from the environment when it starts.
    Source: PyTorch documentation, "Reproducibility".
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
