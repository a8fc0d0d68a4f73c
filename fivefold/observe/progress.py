"""What a rank is at right now, where others can read it after the rank was killed."""

from __future__ import annotations

import mmap
from pathlib import Path

SLOT = 160
"""Bytes of a text and its length: enough for a step, an action and what it waits for."""


class Progress:
    """Says what this rank is at, in a small file mapped into memory: no system call, and it outlives the process.

    A text is written beside the one before, and then one byte says which of the two counts: whenever the process is
    killed, one of them is whole. A file that cannot be made is left out: nothing depends on it.

    Args:
        path: the file; None says nothing anywhere.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._prefix = b""
        self._slot = 0
        self._map: mmap.mmap | None = None
        if path is not None:
            try:
                self._map = _mapped(path)
            except OSError:
                self._path = None

    def step(self, step: int) -> None:
        """A step begins: its number stands before every text from now on."""
        self._prefix = b"step %d" % step
        self._write(self._prefix)

    def at(self, text: str) -> None:
        """This rank is about to do ``text``, such as ``B1.2``; what is longer than the file holds is cut."""
        if self._map is not None:
            coded = text.encode()
            self._write(b"%b, %b" % (self._prefix, coded) if self._prefix else coded)

    def close(self) -> None:
        """The run ended well: remove the file. May be called again."""
        if self._map is not None:
            self._map.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._map = self._path = None

    def _write(self, text: bytes) -> None:
        if self._map is None:
            return
        text = text[: SLOT - 1]
        self._slot = 1 - self._slot
        begin = 1 + self._slot * SLOT
        self._map[begin : begin + 1 + len(text)] = b"%c%b" % (len(text), text)
        self._map[0] = self._slot


def progress_file(logs: Path, rank: int) -> Path:
    """Where the rank of a run says what it is at."""
    return logs / f"rank{rank}.progress"


def read(path: Path) -> str | None:
    """What the rank of that file was at last; None if it never said."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != 1 + 2 * SLOT:
        return None
    slot = data[1 + data[0] * SLOT :]
    return slot[1 : 1 + slot[0]].decode(errors="ignore") or None


def _mapped(path: Path) -> mmap.mmap:
    """The file, empty and mapped. Its bytes are written once: a full disk is found here, and not by a signal later."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w+b") as file:
        file.write(bytes(1 + 2 * SLOT))
        file.flush()
        return mmap.mmap(file.fileno(), 1 + 2 * SLOT)
