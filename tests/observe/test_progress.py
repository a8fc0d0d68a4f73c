"""What a rank is at is readable whenever the rank is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from fivefold.observe.progress import SLOT, Progress, progress_file, read


def test_what_was_said_last(tmp_path: Path) -> None:
    path = progress_file(tmp_path / "logs", 3)
    progress = Progress(path)
    assert path == tmp_path / "logs" / "rank3.progress"
    assert read(path) is None
    for text in ("building the model", "x"):
        progress.at(text)
        assert read(path) == text
    progress.step(7)
    assert read(path) == "step 7"
    progress.at("B1.2")
    assert read(path) == "step 7, B1.2"
    progress.at("F0.12, waiting")
    assert read(path) == "step 7, F0.12, waiting"
    progress.step(8)
    assert read(path) == "step 8"


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "p")
    progress.at("é" * SLOT)
    said = read(tmp_path / "p")
    assert said == "é" * ((SLOT - 1) // 2)
    progress.at("short")
    assert read(tmp_path / "p") == "short"


def test_a_text_that_was_not_finished_does_not_count(tmp_path: Path) -> None:
    """All bytes of the next text but the one that makes it count."""
    progress = Progress(tmp_path / "p")
    progress.at("first")
    before = (tmp_path / "p").read_bytes()
    progress.at("second")
    after = (tmp_path / "p").read_bytes()
    assert before[0] != after[0]
    (tmp_path / "p").write_bytes(before[:1] + after[1:])
    assert read(tmp_path / "p") == "first"


def test_no_file_no_cost_no_trace(tmp_path: Path) -> None:
    progress = Progress()
    progress.step(1)
    progress.at("F0.0")
    progress.close()
    assert list(tmp_path.iterdir()) == []
    assert read(tmp_path / "none") is None
    (tmp_path / "other").write_text("something else")
    assert read(tmp_path / "other") is None


def test_a_file_that_cannot_be_made_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    progress = Progress(tmp_path / "file" / "logs" / "rank0.progress")
    progress.step(1)
    progress.at("F0.0")
    progress.close()
    assert (tmp_path / "file").read_text() == ""


def test_a_run_that_ended_well_leaves_nothing(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "p")
    progress.at("F0.0")
    progress.close()
    progress.close()
    assert not (tmp_path / "p").exists()
    progress.at("after")


def work(path: str) -> None:
    progress, n = Progress(Path(path)), 0
    progress.step(7)
    while True:
        n += 1
        progress.at(f"F0.{n:0{n % 100}d}")  # of all lengths


def test_it_outlives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "p"
    for _ in range(5):
        process = multiprocessing.get_context("forkserver").Process(target=work, args=(str(path),))
        process.start()
        deadline = time.monotonic() + 30
        while not (said := read(path)) or not said.startswith("step 7, "):
            assert time.monotonic() < deadline
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        said = read(path)
        assert said is not None and said.startswith("step 7, F0.")
        digits = said.removeprefix("step 7, F0.")
        n = int(digits)
        assert digits == f"{n:0{n % 100}d}"  # whole
        path.unlink()


@pytest.mark.parametrize("file", [True, False])
def test_it_costs_next_to_nothing(tmp_path: Path, file: bool) -> None:
    progress, loops = Progress(tmp_path / "p" if file else None), 20_000
    progress.step(7)
    began = time.perf_counter()
    for _ in range(loops):
        progress.at("B1.2")
    assert (time.perf_counter() - began) / loops < 20e-6  # measured: 0.6 us, and 0.06 us without a file
