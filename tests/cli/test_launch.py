"""The launcher: all ranks end when one fails, the first failure is reported, and signals leave nobody behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from fivefold.mesh.pool import PRELOAD
from tests.cli import worker
from tests.cli.worker import PIPELINE_TIMEOUT_S, WORLD

LIMIT_S = 60


def start(mode: str, folder: Path, world: int = WORLD) -> BaseProcess:
    """A command that launches ``world`` ranks, from a server that has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "torch.distributed.launcher.api"])
    process = context.Process(target=worker.run, args=(mode, str(folder), world))
    process.start()
    return process


def finish(process: BaseProcess, folder: Path) -> tuple[int, str, str]:
    """Its exit status and what it wrote."""
    process.join(LIMIT_S)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        raise TimeoutError((folder / "err").read_text())
    return process.exitcode, (folder / "out").read_text(), (folder / "err").read_text()


def alive(folder: Path) -> list[int]:
    """Process ids of ranks that still run."""
    pids = [int(path.read_text()) for path in folder.glob("pid*")]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and "Z" not in state(pid)]


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def wait_for_ranks(folder: Path, world: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while len([p for p in folder.glob("pid*") if p.read_text()]) < world:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_all_ranks_run_and_only_rank_0_prints(tmp_path):
    status, out, err = finish(start("fine", tmp_path), tmp_path)
    assert (status, err) == (0, "")
    assert out == "output of rank 0, 1 thread\nall done\n"
    for rank in range(1, WORLD):
        assert (tmp_path / "logs" / f"rank{rank}.txt").read_text() == f"output of rank {rank}, 1 thread\n"
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["rank1.txt", "rank2.txt"]


@pytest.mark.parametrize("mode", ["raise", "teardown"])
def test_the_first_error_is_reported(tmp_path, mode):
    status, _, err = finish(start(mode, tmp_path), tmp_path)
    assert status == 1
    assert err.startswith("rank=1 problems=()")
    assert err.endswith(f"rank 1 of {WORLD} failed: ValueError: the first mistake\n")
    assert "Connection" not in err
    assert err.count("Traceback") == 1
    assert "ValueError: the first mistake" in (tmp_path / "logs" / "rank1.txt").read_text()
    assert alive(tmp_path) == []


def test_a_killed_rank_is_named(tmp_path):
    status, _, err = finish(start("kill", tmp_path), tmp_path)
    assert status == 1
    assert err.endswith(f"rank 1 of {WORLD} was killed by SIGKILL. The system may have run out of memory\n")
    assert "Traceback" not in err
    assert alive(tmp_path) == []


def test_ranks_that_hang_are_named(tmp_path):
    status, _, err = finish(start("stuck", tmp_path), tmp_path)
    assert status == 1
    assert f"rank 0 of {WORLD} failed: RuntimeError" in err
    assert "Timed out" in err
    assert "Did not react, and had to be killed: rank 1. " in err
    assert err.endswith(f"What the others were doing: {tmp_path}/logs/rank2.stopped.txt\n")
    assert "worker.py" in (tmp_path / "logs" / "rank2.stopped.txt").read_text()
    assert alive(tmp_path) == []


WAITED = {  # from its note, or where it was stopped before it could write one, from its progress
    f"  rank 0 {text} the gradient from B1.2 of rank 1"
    for text in ("waited at B0.2 for", "was at step 7, B0.2, waiting for")
}


def test_a_pipeline_whose_rank_is_killed(tmp_path):
    status, _, err = finish(start("pipeline kill", tmp_path), tmp_path)
    assert status == 1
    *_, first, waited, other = err.splitlines()
    assert first == f"rank 1 of {WORLD} was killed by SIGKILL at step 7, B1.2. The system may have run out of memory"
    assert waited in WAITED and other == "  rank 2 was at step 7, B2.2"
    assert "Traceback" not in err and "Connection" not in err
    assert alive(tmp_path) == []


def test_a_pipeline_whose_rank_fails(tmp_path):
    status, _, err = finish(start("pipeline raise", tmp_path), tmp_path)
    assert status == 1
    *_, first, waited, other = err.splitlines()
    assert first == f"rank 1 of {WORLD} failed at step 7, B1.2: ValueError: the first mistake"
    assert waited in WAITED and other == "  rank 2 was at step 7, B2.2"
    assert err.count("Traceback") == 1
    assert alive(tmp_path) == []


def test_a_pipeline_whose_rank_hangs(tmp_path):
    status, _, err = finish(start("pipeline hang", tmp_path), tmp_path)
    assert time.time() - float((tmp_path / "logs" / "before").read_text()) < PIPELINE_TIMEOUT_S + 5
    assert status == 1
    assert f"rank 0 of {WORLD} failed at step 7, B0.2, waiting for the gradient from B1.2 of rank 1: " in err
    assert "MessageError: rank 0 waited at B0.2 for the gradient from B1.2 of rank 1: " in err  # in the traceback
    assert err.endswith("  rank 1 was at step 7, B1.2\n  rank 2 was at step 7, B2.2\n")
    assert alive(tmp_path) == []


def test_a_rank_that_leaves_without_a_word_is_named(tmp_path):
    status, _, err = finish(start("exit", tmp_path), tmp_path)
    assert status == 1
    assert f"rank 1 of {WORLD} " in err
    assert "Connection" not in err


def test_a_rank_that_cannot_write_its_error_is_named(tmp_path):
    status, _, err = finish(start("full", tmp_path), tmp_path)
    assert status == 1
    assert err.endswith(
        f"rank 1 of {WORLD} failed and could not write its error to {tmp_path}/logs. Is the disk full?\n"
    )
    assert "ValueError: the first mistake" in (tmp_path / "logs" / "rank1.txt").read_text()
    assert alive(tmp_path) == []


def test_a_rank_says_its_status(tmp_path):
    status, _, err = finish(start("status", tmp_path), tmp_path)
    assert status == 5
    assert "rank 1 of" in err


def test_a_config_error_inside_the_ranks(tmp_path):
    _, _, err = finish(start("config", tmp_path), tmp_path)
    assert "problems=('train.steps=0 is wrong. Use 1.', 'optim.lr=0 is wrong. Use 2.')" in err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("world", [1, WORLD])
def test_signals_end_everybody(tmp_path, number, status, world):
    process = start("hang", tmp_path, world)
    wait_for_ranks(tmp_path, world)
    begin = time.monotonic()
    os.kill(process.pid, number)
    code, _, err = finish(process, tmp_path)
    assert code == status
    assert err == ""
    assert time.monotonic() - begin < 10
    assert alive(tmp_path) == []


def test_ctrl_c_in_a_terminal_reaches_every_process(tmp_path):
    process = start("hang", tmp_path)
    wait_for_ranks(tmp_path, WORLD)
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finish(process, tmp_path)
    assert (code, err) == (130, "")
    assert alive(tmp_path) == []


def test_a_dead_parent_takes_the_ranks_along(tmp_path):
    process = start("hang", tmp_path)
    wait_for_ranks(tmp_path, WORLD)
    process.kill()
    finish(process, tmp_path)
    deadline = time.monotonic() + 10
    while alive(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_for_cuda_are_spawned(tmp_path):
    status, out, err = finish(start("spawn", tmp_path, 2), tmp_path)
    assert (status, err) == (0, "")
    assert out.startswith("output of rank 0")
    assert out.endswith("all done\n")


def test_one_rank_runs_here(tmp_path):
    status, out, err = finish(start("fine", tmp_path, world=1), tmp_path)
    assert (status, err) == (0, "")
    assert out.startswith("output of rank 0")
    assert not (tmp_path / "logs").exists()
    status, out, _ = finish(start("config", tmp_path, world=1), tmp_path)
    assert status == 2
    assert "problems:\ntrain.steps=0" in out
