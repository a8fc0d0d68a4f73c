"""What ended a run: read from what its ranks left behind.

A rank that fails leaves a note of its own error, one that is stopped by the parent a trace of where it was, and each
says in its progress file what it is at. A rank that is gone with neither note nor trace was killed from outside, which
comes before every error it caused in the others.
"""

from __future__ import annotations

import json
import re
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..config.errors import ConfigError
from ..observe import progress

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

LOST_PEER: Final = re.compile(r"[Cc]onnection (closed|reset|refused)|Broken pipe|Socket Timeout|remote process exited")
"""What gloo and NCCL say when another rank is gone: never the first cause when there is another error."""

TIMED_OUT: Final = re.compile(r"[Tt]imed out|[Tt]imeout")
"""What a rank says that waited for another in vain: the other may hang, or be stopped from outside."""

WAITED: Final = re.compile(r"rank \d+ waited .*?(?=: |$)", re.MULTILINE)
"""What the executor says of a message that did not come, up to the transport's own words."""

WAITS: Final = re.compile(r"waited|waiting")
"""In what a rank is at: its executor waits for a message."""

UNWRITTEN: Final = 74
"""Exit status of a rank whose error could not be noted down: an input/output error, as sysexits.h numbers it."""

OTHERS_SHOWN: Final = 8
"""Ranks of which the message says what they were waiting for."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """How one rank ended, as it wrote down itself."""

    time_ns: int
    error: str
    traceback: str
    problems: tuple[str, ...] | None
    status: int

    @classmethod
    def of(cls, error: BaseException) -> Note:
        status = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        problems = error.problems if isinstance(error, ConfigError) else None
        text = "".join(traceback.format_exception(error))
        line = " ".join(part.strip() for part in traceback.format_exception_only(error))
        return cls(time_ns=time.time_ns(), error=line, traceback=text, problems=problems, status=status)

    @property
    def waited(self) -> str:
        """Which message its rank waited for in vain; empty if for none."""
        found = WAITED.search(self.error)
        return found[0] if found else ""

    @property
    def caused(self) -> bool:
        """Whether another rank's end explains the error."""
        return bool(self.waited or LOST_PEER.search(self.error))

    def write(self, logs: Path, rank: int) -> bool:
        """Leave the note; False if the disk takes none."""
        try:
            note_file(logs, rank).write_text(json.dumps(asdict(self)), encoding="utf-8")
        except OSError:
            return False
        return True

    @classmethod
    def read(cls, logs: Path, rank: int) -> Note | None:
        """The note the rank left, if any."""
        try:
            note = cls(**json.loads(note_file(logs, rank).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None
        return replace(note, problems=None if note.problems is None else tuple(note.problems))


class RankError(Exception):
    """The first failure among the ranks: ``str()`` says it in its first line, what others waited for in further ones.

    ``details`` is the rank's own traceback, ``problems`` holds the messages of a ``ConfigError``, and is empty for
    every other failure.
    """

    def __init__(self, message: str, *, rank: int, note: Note | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.details = note.traceback if note else ""
        self.problems = (note.problems or ()) if note else ()
        self.status = note.status if note else 1


def note_file(logs: Path, rank: int) -> Path:
    """Where the rank leaves its note."""
    return logs / f"rank{rank}.error.json"


def stopped_file(logs: Path, rank: int) -> Path:
    """Where the rank leaves the trace of its threads when the parent stops it."""
    return logs / f"rank{rank}.stopped.txt"


def first_failure(error: ChildFailedError, world: int, logs: Path) -> RankError:
    """Which rank failed first, how, what it was at, and what the others were waiting for."""
    notes = {rank: note for rank in range(world) if (note := Note.read(logs, rank))}
    reported, failure = next(iter(error.failures.items()))
    stopped = {rank for rank in range(world) if (p := stopped_file(logs, rank)).is_file() and p.stat().st_size}
    silent = [reported] if reported not in notes else []
    silent += [rank for rank in range(world) if rank not in {*notes, *stopped, *silent}]
    if silent and not (reported in notes and TIMED_OUT.search(notes[reported].error)):
        rank = silent[0]
        code = failure.exitcode if rank == reported else None
        message = f"rank {rank} of {world} {_death(code, _at(logs, rank), logs)}"
        return RankError(message + _others(rank, world, notes, logs), rank=rank)
    rank = min(notes, key=lambda r: (notes[r].caused, notes[r].time_ns))
    at, said = _at(logs, rank), notes[rank].error
    if notes[rank].waited and WAITS.search(at):  # both say the same
        said = said.partition(notes[rank].waited)[2].removeprefix(": ")
    message = f"rank {rank} of {world} failed{at}: {said}"
    timed_out = TIMED_OUT.search(notes[rank].error)
    if timed_out:
        message += _waited_for(silent, sorted(stopped - notes.keys()), logs)
    if timed_out or any(note.waited for note in notes.values()):  # else each of them merely was somewhere
        message += _others(rank, world, notes, logs)
    return RankError(message, rank=rank, note=notes[rank])


def _at(logs: Path, rank: int) -> str:
    """What the rank was at: `` at step 7, B1.2``; empty if it never said."""
    text = progress.read(progress.progress_file(logs, rank))
    return f" at {text}" if text else ""


def _death(exitcode: int | None, at: str, logs: Path) -> str:
    if exitcode == UNWRITTEN:
        return f"failed{at} and could not write its error to {logs}. Is the disk full?"
    if exitcode is not None and exitcode >= 0:
        return f"ended with status {exitcode} and no Python error{at}"
    name = signal.Signals(-exitcode).name if exitcode else "a signal"
    hint = ". The system may have run out of memory" if name in ("SIGKILL", "a signal") else ""
    return f"was killed by {name}{at}{hint}"


def _waited_for(silent: Sequence[int], stopped: Sequence[int], logs: Path) -> str:
    """Which ranks another may have waited for: ``silent`` ones had to be killed, ``stopped`` ones left a trace."""
    text = f". Did not react, and had to be killed: rank {', '.join(map(str, silent))}" if silent else ""
    if stopped:
        text += f". What the others were doing: {', '.join(str(stopped_file(logs, rank)) for rank in stopped)}"
    return text


def _others(first: int, world: int, notes: dict[int, Note], logs: Path) -> str:
    """A line for each rank beside ``first``: the message it waited for, or what it was at; those that waited first."""
    waited, worked = [], []
    for rank in range(world):
        text = (notes[rank].waited if rank in notes else "") or f"rank {rank} was{_at(logs, rank)}"
        if rank != first and text != f"rank {rank} was":
            (waited if WAITS.search(text) else worked).append(text)
    lines = waited + worked
    if len(lines) > OTHERS_SHOWN:
        lines[OTHERS_SHOWN:] = [f"and {len(lines) - OTHERS_SHOWN} more ranks"]
    return "".join(f"\n  {line}" for line in lines)
