"""What is read from what ranks left behind: who failed first, and what the others waited for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fivefold.cli.failure import Note, RankError, first_failure, stopped_file
from fivefold.config.errors import ConfigError
from fivefold.observe.progress import Progress, progress_file

CLOSED = "[../pair.cc:534] Connection closed by peer [127.0.0.1]:3333"


def leave(logs: Path, rank: int, error: Exception | None = None, at: str = "", stopped: bool = False) -> None:
    """What a rank leaves: its note, its progress, the trace of being stopped."""
    if error is not None:
        Note.of(error).write(logs, rank)
    if at:
        progress = Progress(progress_file(logs, rank))
        progress.step(3)
        progress.at(at)
    if stopped:
        stopped_file(logs, rank).write_text("Current thread")


def found(logs: Path, world: int, rank: int, exitcode: int = 1) -> RankError:
    """The failure, when elastic reports this one."""
    error: Any = SimpleNamespace(failures={rank: SimpleNamespace(exitcode=exitcode)})
    return first_failure(error, world, logs)


def waited(rank: int, on: int, why: str = CLOSED) -> RuntimeError:
    return RuntimeError(f"rank {rank} waited at F{rank}.0 for the activation from F{on}.0 of rank {on}: {why}")


def test_a_lost_message_is_never_the_first_cause(tmp_path: Path) -> None:
    """Its note is older, and its transport says nothing that is known."""
    leave(tmp_path, 1, waited(1, 0, "NCCL error 17"), "F1.0")
    leave(tmp_path, 0, ValueError("no such token"), "F0.0")
    error = found(tmp_path, 2, 1)
    assert error.rank == 0 and "no such token" in error.details
    first, other = str(error).splitlines()
    assert first == "rank 0 of 2 failed at step 3, F0.0: ValueError: no such token"
    assert other == "  rank 1 waited at F1.0 for the activation from F0.0 of rank 0"


def test_a_send_that_nobody_takes(tmp_path: Path) -> None:
    leave(tmp_path, 0, RuntimeError(f"rank 0 waited for rank 1 to take F0.3's result: {CLOSED}"), "F0.4")
    message = str(found(tmp_path, 2, 1, -9))
    assert message.splitlines()[1:] == ["  rank 0 waited for rank 1 to take F0.3's result"]
    assert message.startswith("rank 1 of 2 was killed by SIGKILL. ")


def test_many_others_are_counted(tmp_path: Path) -> None:
    for rank in range(16):
        if rank % 2 or rank == 14:
            leave(tmp_path, rank, at=f"F{rank}.0", stopped=rank != 5)
        else:
            leave(tmp_path, rank, waited(rank, 5), f"F{rank}.0")
    lines = str(found(tmp_path, 16, 5, -9)).splitlines()
    assert lines[0].startswith("rank 5 of 16 was killed by SIGKILL at step 3, F5.0. ")
    assert [line.split()[1] for line in lines[1:-1]] == ["0", "2", "4", "6", "8", "10", "12", "1"]  # who waited first
    assert lines[-1] == "  and 7 more ranks"


def test_without_progress_and_messages_it_is_one_line(tmp_path: Path) -> None:
    leave(tmp_path, 0, RuntimeError(CLOSED))
    leave(tmp_path, 1, ValueError("wrong"))
    assert str(found(tmp_path, 2, 1)) == "rank 1 of 2 failed: ValueError: wrong"


def test_an_error_of_all_ranks_does_not_list_them(tmp_path: Path) -> None:
    for rank in range(4):
        leave(tmp_path, rank, ArithmeticError("not finite"), "gradient norm")
    assert str(found(tmp_path, 4, 2)) == "rank 0 of 4 failed at step 3, gradient norm: ArithmeticError: not finite"


def test_a_collective_that_timed_out_says_where_all_were(tmp_path: Path) -> None:
    leave(tmp_path, 0, RuntimeError("Timed out waiting 2000ms for recv operation to complete"), "gradient norm")
    leave(tmp_path, 1, at="B1.2", stopped=True)
    lines = str(found(tmp_path, 2, 0)).splitlines()
    assert lines[0].endswith(f"What the others were doing: {tmp_path}/rank1.stopped.txt")
    assert lines[1:] == ["  rank 1 was at step 3, B1.2"]


def test_a_pipeline_whose_rank_had_to_be_killed(tmp_path: Path) -> None:
    leave(tmp_path, 0, waited(0, 1, "Timed out waiting 2000ms for recv operation to complete"), "F0.0", stopped=True)
    leave(tmp_path, 1, at="B1.2")
    leave(tmp_path, 2, waited(2, 1, "Timed out waiting 2000ms for recv operation to complete"), "F2.0", stopped=True)
    first, *others = str(found(tmp_path, 3, 0)).splitlines()
    assert first.startswith("rank 0 of 3 failed at step 3, F0.0: ")
    assert first.endswith("operation to complete. Did not react, and had to be killed: rank 1")
    assert others == ["  rank 2 waited at F2.0 for the activation from F1.0 of rank 1", "  rank 1 was at step 3, B1.2"]


def test_what_a_rank_waited_for_is_said_once(tmp_path: Path) -> None:
    leave(tmp_path, 0, waited(0, 1, "Timed out"), "F0.0, waiting for the activation from F1.0 of rank 1")
    leave(tmp_path, 1, at="B1.2", stopped=True)
    message = str(found(tmp_path, 2, 0)).splitlines()[0]
    assert message.startswith(
        "rank 0 of 2 failed at step 3, F0.0, waiting for the activation from F1.0 of rank 1: Timed out. What the others"
    )


def test_notes_of_an_error_are_in_its_line() -> None:
    error = MemoryError("no room")
    error.add_note("snapshot: x.pickle")
    assert Note.of(error).error == "MemoryError: no room snapshot: x.pickle"


@pytest.mark.parametrize("error", [ConfigError(["a=1 is wrong. Use 2."]), SystemExit(5), ValueError("x")])
def test_a_note_is_read_as_it_was_written(tmp_path: Path, error: Exception) -> None:
    written = Note.of(error)
    written.write(tmp_path, 0)
    note = Note.read(tmp_path, 0)
    assert note == written
    assert note.problems == (("a=1 is wrong. Use 2.",) if isinstance(error, ConfigError) else None)
    assert note.status == (5 if isinstance(error, SystemExit) else 1)
    (tmp_path / "rank1.error.json").write_text("{")
    assert Note.read(tmp_path, 1) is None and Note.read(tmp_path, 2) is None
