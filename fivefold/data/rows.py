"""Rows of a fixed length cut from a stream of documents.

Letters: N rows, T tokens a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .tokenfile import TokenFile

IGNORE = -100  # a target that the loss leaves out


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some rows of a batch; a row may hold pieces of several documents.

    Shapes: all [N, T].
    """

    tokens: NDArray[np.int64]
    """Inputs."""
    targets: NDArray[np.int64]
    """The token after each input; -100 where that is another document's, or nothing."""
    positions: NDArray[np.int64]
    """Tokens since the start of the document's piece in this row."""
    documents: NDArray[np.int32]
    """Number of the document within the row, from 0: tokens attend only to their own."""
    single_document: bool
    """Whether no row holds more than one document, so that plain causal attention is exact."""

    def parts(self, n: int) -> Iterator[Rows]:
        """``n`` portions of equally many rows, in order."""
        size = len(self.tokens) // n
        for i in range(n):
            cut = {name: x[i * size : (i + 1) * size] for name, x in self._arrays().items()}
            yield Rows(**cut, single_document=self.single_document)

    def columns(self, columns: NDArray[np.int64]) -> Rows:
        """Some columns of each row.

        Shapes: columns [N, t] -> fields [N, t].
        """
        taken = {name: np.take_along_axis(x, columns, 1) for name, x in self._arrays().items()}
        return Rows(**taken, single_document=self.single_document)

    def problem(self) -> str:
        """What forbids these rows: a document whose tokens do not stand together. Empty if nothing does."""
        back = np.argwhere(np.diff(self.documents, axis=1) < 0)
        if not len(back):
            return ""
        row, column = back[0].tolist()
        before, after = self.documents[row, column : column + 2].tolist()
        return (
            f"documents[{row}, {column + 1}]={after} goes back in its row (documents[{row}, {column}]={before}). "
            "Number the documents of a row in ascending order."
        )

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {name: getattr(self, name) for name in ("tokens", "targets", "positions", "documents")}


@dataclass(frozen=True)
class Stream:
    """Tokens ``[start, stop)`` of a token file as rows: row r reads T tokens from ``start + r*T`` on.

    Each row's last target is the next row's first input, so every token but the first is a target once.
    """

    file: TokenFile
    start: int
    stop: int

    @property
    def n_targets(self) -> int:
        """Tokens that have one before them."""
        return max(self.stop - self.start - 1, 0)

    def rows(self, row: NDArray[np.int64], sequence_length: int) -> Rows:
        """The rows of these numbers; past the end, the last token repeats and targets are ignored.

        Shapes: row [N].
        """
        begin = self.start + row * sequence_length
        index = begin[:, None] + np.arange(sequence_length + 1)
        last = self.stop - 1
        ids = self.file.tokens[np.minimum(index, last)].astype(np.int64)
        new = self._first_tokens(begin, np.minimum(begin + sequence_length, last), sequence_length + 1)
        inputs = new[:, :-1]
        column = np.arange(sequence_length)
        return Rows(
            tokens=np.ascontiguousarray(ids[:, :-1]),
            targets=np.where(new[:, 1:] | (index[:, 1:] > last), IGNORE, ids[:, 1:]),
            positions=column - np.maximum.accumulate(np.where(inputs, column, 0), axis=1),
            documents=np.cumsum(inputs, axis=1, dtype=np.int32),
            single_document=not inputs.any(),
        )

    def _first_tokens(self, begin: NDArray[np.int64], end: NDArray[np.int64], width: int) -> NDArray[np.bool_]:
        """Which tokens after each row's first are the first of a document.

        Shapes: begin, end (inclusive) [N] -> [N, width].
        """
        starts = self.file.starts
        low = np.searchsorted(starts, begin, side="right")
        count = np.maximum(np.searchsorted(starts, end, side="right") - low, 0)  # empty documents share a start
        row = np.repeat(np.arange(len(begin)), count)
        which = np.arange(len(row)) + np.repeat(low - (np.cumsum(count) - count), count)
        first = np.zeros((len(begin), width), np.bool_)
        first[row, starts[which] - begin[row]] = True
        return first


def join(parts: list[Rows], order: NDArray[np.int64] | slice = slice(None)) -> Rows:
    """Rows one after another, then in another order."""
    names = parts[0]._arrays()
    arrays = {name: np.concatenate([part._arrays()[name] for part in parts])[order] for name in names}
    return Rows(**arrays, single_document=all(part.single_document for part in parts))
