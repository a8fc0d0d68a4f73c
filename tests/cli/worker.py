"""What the launched ranks of the tests do, and a process that launches them."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fivefold.cli.launch import RankError, launch
from fivefold.cli.main import main as fivefold
from fivefold.config.errors import ConfigError
from fivefold.mesh.process import set_step_timeouts
from fivefold.observe.progress import Progress, progress_file

WORLD = 3
PIPELINE_TIMEOUT_S = 2.0


def work(mode: str, folder: str) -> None:
    """Meet the other ranks, then do what ``mode`` says."""
    rank = int(os.environ.get("RANK", 0))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    (Path(folder) / f"pid{rank}").write_text(str(os.getpid()))
    print(f"output of rank {rank}, {torch.get_num_threads()} thread", flush=True)
    x = torch.ones(1)
    if mode == "raise" and rank == 1:
        raise ValueError("the first mistake")
    if mode == "teardown" and rank == 1:
        try:
            raise ValueError("the first mistake")
        finally:
            dist.destroy_process_group()
            time.sleep(0.3)
    if mode == "config":
        raise ConfigError(["train.steps=0 is wrong. Use 1.", "optim.lr=0 is wrong. Use 2."])
    if mode == "kill" and rank == 1:
        os.kill(os.getpid(), 9)
    if mode == "full" and rank == 1:
        (Path(folder) / "logs" / f"rank{rank}.error.json").mkdir()  # as on a full disk, the note cannot be written
        raise ValueError("the first mistake")
    if mode == "exit" and rank == 1:
        os._exit(3)
    if mode == "status" and rank == 1:
        raise SystemExit(5)
    if mode == "stuck":
        set_step_timeouts([], 2.0)
        dist.all_reduce(x)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
    if mode.startswith("pipeline"):
        pipeline(mode, rank, Path(folder) / "logs")
    if mode == "hang" or (mode == "stuck" and rank == 2):
        time.sleep(300)
    if "RANK" in os.environ:
        for _ in range(3):  # the others notice here that one is gone
            dist.all_reduce(x)
        dist.destroy_process_group()


class MessageError(RuntimeError):
    """What the executor raises when a message does not come."""


def pipeline(mode: str, rank: int, logs: Path) -> None:
    """A pipeline that stops in the middle: rank 0 waits for rank 1, and rank 2 is busy elsewhere."""
    x = torch.ones(1)
    dist.all_reduce(x)
    progress = Progress(progress_file(logs, rank))
    progress.step(7)
    progress.at(f"B{rank}.2")
    if rank == 0:
        progress.at("B0.2, waiting for the gradient from B1.2 of rank 1")
        (logs / "before").write_text(str(time.time()))
        try:
            work = dist.irecv(x, src=1)
            assert work is not None
            work.wait(timedelta(seconds=PIPELINE_TIMEOUT_S))
        except RuntimeError as error:
            raise MessageError(f"rank 0 waited at B0.2 for the gradient from B1.2 of rank 1: {error}") from error
    if rank == 2:
        time.sleep(300)
    time.sleep(0.3)
    if mode == "pipeline kill":
        os.kill(os.getpid(), 9)
    if mode == "pipeline raise":
        raise ValueError("the first mistake")
    time.sleep(300)


def run(mode: str, folder: str, world: int) -> None:
    """Be a command that launches the ranks."""
    _begin(folder)
    sys.exit(main(mode, folder, world))


def command(argv: list[str], folder: str) -> None:
    """Be ``fivefold`` with these arguments."""
    _begin(folder)
    sys.exit(fivefold(argv))


def _begin(folder: str) -> None:
    """Be in a session of its own and write to ``out`` and ``err`` in ``folder``."""
    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT), number)


def main(mode: str, folder: str, world: int) -> int:
    """Launch, and print what went wrong."""
    try:
        stop_s = 1 if mode == "stuck" else 30
        launch(
            work, (mode, folder), world=world, logs=Path(folder) / "logs", cuda=mode == "spawn", stop_timeout_s=stop_s
        )
    except ConfigError as error:
        print("problems:", *error.problems, sep="\n")
        return 2
    except RankError as error:
        print(f"rank={error.rank} problems={error.problems}\n{error.details}{error}", file=sys.stderr)
        return error.status
    print("all done")
    return 0
