"""A rank of a real pipeline that is gone or stuck in the middle of a step: the message says who waited for what."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from fivefold.mesh.pool import PRELOAD
from fivefold.observe.progress import progress_file, read
from tests.cli import worker

LIMIT_S = 60
STEP_TIMEOUT_S = 3


def start(folder: Path) -> BaseProcess:
    """An endless training run of a pipeline of three ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "torch.distributed.launcher.api", "fivefold.train.main"])
    argv = ["train", "moe_tiny", "--parallel", "pp3", "--train.microbatches", "8", "--train.steps", "1000000"]
    argv += ["--train.device", "cpu", "--train.evaluate", "false", "--data.files", "random", "--metrics.every", "1000"]
    argv += ["--comm.step_timeout_s", str(STEP_TIMEOUT_S), "--run-dir", str(folder / "run")]
    process = context.Process(target=worker.command, args=(argv, str(folder)))
    process.start()
    return process


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while int((re.findall(r"step (\d+)", read(progress_file(folder / "run" / "logs", 1)) or "") or [0])[0]) < step:
        assert time.monotonic() < deadline, (folder / "err").read_text()
        time.sleep(0.05)


def pid_of_rank_1(folder: Path) -> int:
    """The process that prints to rank 1's file."""
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if os.readlink(path) == str(folder / "run" / "logs" / "rank1.txt"):
                return int(path.parts[2])
        except OSError:
            continue
    raise AssertionError("rank 1 is not there")


def stop_mid_schedule(folder: Path, victim: int) -> None:
    """Stop rank 1 where both others will soon need it: elsewhere they would wait in a sum over all ranks."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        os.kill(victim, signal.SIGSTOP)
        time.sleep(0.02)  # until it stands
        if re.search(r", [FB]1\.[2-5]", read(progress_file(folder / "run" / "logs", 1)) or ""):
            return
        os.kill(victim, signal.SIGCONT)
        assert time.monotonic() < deadline
        time.sleep(0.003)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_the_message_says_who_waited_for_what(tmp_path: Path, how: str) -> None:
    process = start(tmp_path)
    victim = 0
    try:
        wait_for_step(tmp_path, 3)
        victim = pid_of_rank_1(tmp_path)
        stop_mid_schedule(tmp_path, victim)
        began = time.monotonic()
        if how == "killed":
            time.sleep(1)  # the others come to where they need it
            os.kill(victim, signal.SIGKILL)
        else:
            time.sleep(STEP_TIMEOUT_S + 2)
            os.kill(victim, signal.SIGCONT)  # or the launcher takes 30 s to kill it
        process.join(LIMIT_S)
        assert process.exitcode == 1
        assert time.monotonic() - began < STEP_TIMEOUT_S + 25
    finally:
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            if victim:
                os.kill(victim, signal.SIGCONT)
    first, *others = (tmp_path / "err").read_text().split("error: ")[-1].splitlines()
    place = r"at step \d+(, .+)?"
    waits = rf"  rank [02] (waited( at \S+)?|was {place}, waiting) for .*rank [012].*"
    if how == "killed":
        assert re.fullmatch(rf"rank 1 of 3 was killed by SIGKILL {place}\. The system may have .*", first)
        assert len(others) == 2 and all(re.fullmatch(waits, line) for line in others), others
    else:
        assert re.match(rf"rank [02] of 3 failed {place}, waiting for .*rank [012].*: .*Timed out", first)
        assert any(re.fullmatch(rf"  rank 1 was {place}", line) for line in others)
    for rank in range(3):
        assert read(progress_file(tmp_path / "run" / "logs", rank))
