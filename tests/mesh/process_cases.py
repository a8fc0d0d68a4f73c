"""What the tests of joining and leaving run in processes of their own."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from fivefold.config.dims import ParallelDims
from fivefold.config.parts import CommConfig
from fivefold.mesh import p2p, transport
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.process import join, leave, set_step_timeouts


def start(case: Callable[..., Any], environment: dict[str, str], stderr: str, answer: Connection, *args: Any) -> None:
    """Run a case under an environment; send what it returns, or the error it raises, and exit 0."""
    torch.set_num_threads(1)
    os.environ.update(environment)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    try:
        answer.send(case(*args))
    except Exception as error:
        answer.send(repr(error))
    sys.stderr.flush()
    os._exit(0)


def place(init_timeout_s: float, late_s: float = 0.0) -> tuple[Any, ...]:
    """Join, rank 1 so much later, add the ranks up, and leave."""
    time.sleep(late_s * int(os.environ["RANK"]))
    process = join(CommConfig(init_timeout_s=init_timeout_s), "cpu")
    total = torch.tensor(float(process.rank))
    dist.all_reduce(total)
    backend = dist.get_backend()
    leave(process, 10.0)
    return (process.rank, process.world, process.local_rank, str(process.device), total.item(), backend,
            dist.is_initialized(), os.environ.get("GLOO_SOCKET_IFNAME"))  # fmt: skip


def die_after_joining() -> None:
    """Join, then be killed, leaving addresses in the store."""
    join(CommConfig(init_timeout_s=20), "cpu")
    dist.barrier()
    os._exit(9)


def absent(step_timeout_s: float) -> dict[str, tuple[float, str]]:
    """Rank 1 stops coming after the first step: what the other ranks' collectives do, each on a group of its own."""
    process = join(CommConfig(init_timeout_s=60), "cpu")
    moves: dict[str, Callable[..., transport.Handle]] = {
        "all_gather": lambda axis: transport.all_gather(torch.ones(2), axis),
        "reduce_scatter": lambda axis: transport.reduce_scatter(torch.ones(4), axis),
        "all_reduce": lambda axis: transport.all_reduce(torch.ones(2), axis),
        "all_to_all": lambda axis: transport.all_to_all(torch.ones(2), axis, [1, 1], [1, 1]),
        "broadcast": lambda axis: transport.broadcast(torch.ones(2), axis, 1),
        "shift": lambda axis: transport.shift(torch.ones(2), axis),
        "send": lambda axis: (p2p.receive if axis.rank else p2p.send)(torch.ones(2), axis, 1 - axis.rank),
        "receive": lambda axis: (p2p.send if axis.rank else p2p.receive)(torch.ones(2), axis, 1 - axis.rank),
    }
    meshes = {name: Mesh(ParallelDims(tp=2), process.rank, timeout_s=60) for name in moves}
    for name, move in moves.items():  # the first step: everybody comes
        move(meshes[name].tp).wait()
    set_step_timeouts([group for mesh in meshes.values() for group in mesh.groups], step_timeout_s)
    seen: dict[str, tuple[float, str]] = {}
    store = dist.distributed_c10d._get_default_store()
    if process.rank == 1:
        store.wait(["done"], timedelta(seconds=30))
        return seen
    for name, move in [*moves.items(), ("default", None)]:
        begin = time.monotonic()
        try:
            if move is None:
                dist.all_reduce(torch.ones(2))
            else:
                move(meshes[name].tp).wait()
            seen[name] = (time.monotonic() - begin, "")
        except RuntimeError as error:
            seen[name] = (time.monotonic() - begin, str(error))
    store.set("done", "yes")
    return seen


def hang_in_teardown(holding_the_lock: bool) -> str:
    """Join, then leave with a teardown that never ends: asleep, or in a C call that keeps the interpreter's lock."""
    process = join(CommConfig(init_timeout_s=20), "cpu")
    dist.barrier()

    def hang() -> None:
        if holding_the_lock:
            re.match(r"(a+)+$", "a" * 64 + "b")
        time.sleep(60)

    dist.destroy_process_group = hang
    leave(process, 0.5)
    return "left"


def leave_and_live(limit_s: float) -> str:
    """Leave in time, and outlive the limit."""
    process = join(CommConfig(init_timeout_s=20), "cpu")
    dist.barrier()
    leave(process, limit_s)
    time.sleep(2 * limit_s)
    return "alive"
