"""A pool of worker processes, one a rank, that stay alive between cases: what ``verify`` and the tests run on.

Starting ranks costs more than most cases, so they are started once. The workers are forked from a server process that
has imported torch and run nothing (``multiprocessing``'s ``forkserver``): the parent may have run torch operators, and
a child forked from it after that can hang in OpenMP or refuse autograd.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal, Self

from .pool_worker import Case, Failure, dump, load, serve, trace_file

PRELOAD = ("fivefold.mesh.pool_worker", "fivefold.mesh.collectives")
"""What the fork server imports before it forks."""
START_S = 120.0
"""How long the ranks may take to start and meet."""
GRACE_S = 2.0
"""How long after its time limit a worker may take to write its trace."""
ECHO_S = 0.3
"""How long after the first failure the other ranks may report theirs."""

DIED = "death"
"""The kind of failure of a worker that did not answer."""


class PoolError(RuntimeError):
    """A case that failed, hung or killed its worker; the message has rank, case and trace."""

    def __init__(self, message: str, *, rank: int, case: str, kind: str, said: str = "") -> None:
        super().__init__(message)
        self.rank, self.case, self.kind = rank, case, kind
        self.said = said
        """The message of what the case itself raised."""


@dataclass
class _Workers:
    """The processes between a start and a stop."""

    folder: tempfile.TemporaryDirectory[str]
    """Private: the store they meet through, and their traces."""
    processes: list[BaseProcess] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    met: bool = False
    """Whether all ranks have answered for the first time."""

    def answer(self, rank: int) -> Any:
        """What the worker sent, or a :class:`Failure` if it is dead."""
        try:
            return load(self.connections[rank].recv_bytes())
        except (EOFError, OSError):
            self.processes[rank].join(1.0)
            status = self.processes[rank].exitcode
            return Failure(kind=DIED, message=f"its process ended with status {status}", trace=self.trace(rank))

    def trace(self, rank: int) -> str:
        """What the worker's fault handler wrote, without the frames and the thread that are the pool's own."""
        text = trace_file(self.folder.name, rank).read_text(errors="replace")
        threads = [t.partition("pool_worker.py")[0].rpartition("\n")[0] or t for t in text.split("\n\n")
                   if "_die_with_parent" not in t]  # fmt: skip
        return "\n\n".join(threads) or "(no trace)"


class Pool:
    """``world`` ranks joined by gloo. ``run`` calls a function on all of them.

    A failure, a crash or a timeout ends all workers: a rank that stopped in the middle leaves the others waiting, and
    what they would do next is worth nothing. The next ``run`` starts new ones.

    Args:
        world: number of ranks.
        timeout_s: limit of one case, and of every collective in it, in seconds.
        preload: further modules that the fork server imports, if this is the first pool of the process.
        method: ``forkserver``; or ``fork``, from this process itself, which saves importing torch again and is safe
            only if no torch operator has run here.
    """

    def __init__(self, world: int, *, timeout_s: float = 120.0, preload: Sequence[str] = (),
                 method: Literal["forkserver", "fork"] = "forkserver") -> None:  # fmt: skip
        self.world, self.timeout_s = world, timeout_s
        self._preload, self._method = [*PRELOAD, *preload], method
        self._workers: _Workers | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the workers unless they run; ``run`` waits until they have met."""
        if self._workers is not None:
            return
        context: Any = multiprocessing.get_context(self._method)
        if self._method == "forkserver":
            context.set_forkserver_preload(self._preload)
        workers = self._workers = _Workers(tempfile.TemporaryDirectory(prefix="fivefold-pool-"))
        for rank in range(self.world):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, name=f"rank {rank}", daemon=True,
                                      args=(rank, self.world, theirs, workers.folder.name, self.timeout_s))  # fmt: skip
            process.start()
            theirs.close()  # so that the pipe ends with the worker
            workers.processes.append(process)
            workers.connections.append(mine)

    def close(self) -> None:
        """End the workers."""
        workers, self._workers = self._workers, None
        if workers is None:
            return
        for process in workers.processes:
            process.kill()
        for process, connection in zip(workers.processes, workers.connections, strict=True):
            process.join()
            connection.close()
        workers.folder.cleanup()

    def run(self, case: Case, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """``case(context, *args)`` on every rank; the results by rank, tensors as plain values.

        Args:
            case: a function of an importable module.
            args: what can be pickled.
            timeout_s: limit of this case, where it is not the pool's, in seconds.

        Raises:
            PoolError: if a rank raises, dies, or is not done in time.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        message = dump((limit_s, case, args))
        try:
            if self._workers is None or not self._workers.met:
                self.start()
                self._exchange("the start of the pool", None, START_S)
            return self._exchange(f"{case.__module__}.{case.__qualname__}", message, limit_s)
        except BaseException:
            self.close()
            raise

    def _exchange(self, case: str, message: bytes | None, limit_s: float) -> list[Any]:
        """Send the case to every rank and wait for the answers."""
        workers = self._workers
        assert workers is not None
        waiting: dict[Any, int] = {connection: rank for rank, connection in enumerate(workers.connections)}
        answers: list[Any] = [None] * self.world
        failures: dict[int, Failure] = {}
        if message is not None:
            for connection in workers.connections:
                with contextlib.suppress(OSError):  # a worker that died is met below
                    connection.send_bytes(message)
        end = time.monotonic() + limit_s + GRACE_S
        while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                answers[rank] = workers.answer(rank)
                if isinstance(answers[rank], Failure):
                    failures[rank] = answers[rank]
                    end = min(end, time.monotonic() + ECHO_S)
        if failures:
            raise self._failed(case, failures, sorted(waiting.values()))
        if waiting:
            raise self._late(case, limit_s, sorted(waiting.values()))
        workers.met = True
        return answers

    def _failed(self, case: str, failures: dict[int, Failure], unfinished: list[int]) -> PoolError:
        first = next((r for r in failures if failures[r].kind == DIED), next(iter(failures)))
        failure = failures[first]
        lines = [f"rank {first} of {self.world} failed in {case}: {failure.kind}: {failure.message}", failure.trace]
        lines += [f"rank {r} failed too: {f.kind}: {f.message}" for r, f in failures.items() if r != first]
        if unfinished:
            lines.append(f"Not finished: rank {', '.join(map(str, unfinished))}.")
        return PoolError("\n".join(lines), rank=first, case=case, kind=failure.kind, said=failure.message)

    def _late(self, case: str, limit_s: float, unfinished: list[int]) -> PoolError:
        assert self._workers is not None
        ranks = ", ".join(map(str, unfinished))
        lines = [f"{case} did not finish within {limit_s:g} s on rank {ranks} of {self.world}."]
        lines += [f"Rank {r} was at:\n{self._workers.trace(r)}" for r in unfinished]
        return PoolError("\n".join(lines), rank=unfinished[0], case=case, kind="timeout")
