"""The held-out documents as rows, with the bytes they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .rows import IGNORE, Rows, Stream, join
from .tokenfile import TokenFile


class Heldout:
    """The held-out split of several token files: each file's documents one after another, cut into rows.

    A token is a target exactly once, unless it is a document's first; the last row of each file is padded with
    ignored targets. Bits per byte is the summed loss in nats over all rows, divided by ``log(2) * n_bytes``.
    """

    def __init__(self, files: Sequence[TokenFile], sequence_length: int, limit_rows: int = 0) -> None:
        """``limit_rows`` keeps the first whole documents of each file, about so many rows in all."""
        self._sequence_length = sequence_length
        self._streams: list[Stream] = []
        self.n_documents = 0
        self.n_bytes = 0
        total = sum(file.n_tokens - file.n_training_tokens for file in files)
        for file in files:
            first, stop = file.index.n_training_documents, file.n_documents
            start = file.n_training_tokens
            if limit_rows and total:
                wanted = start + 1 + limit_rows * sequence_length * (file.n_tokens - start) // total
                stop = min(max(_nearest(file, wanted), first + 1), stop)  # one of each file that has any
            self._streams.append(Stream(file, start, int(file.starts[stop])))
            self.n_documents += stop - first
            self.n_bytes += int(file.document_bytes[first:stop].sum())
        counts = [-(-stream.n_targets // sequence_length) for stream in self._streams]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self.n_rows = int(self._ends[-1])

    def rows(self, start: int, stop: int) -> Rows:
        """Rows ``[start, stop)``; those past the end have only ignored targets, so that ranks can share them evenly."""
        number = np.arange(start, stop, dtype=np.int64)
        source = np.minimum(np.searchsorted(self._ends, number, side="right"), self._last)
        first = np.concatenate([[0], self._ends[:-1]])
        parts = [
            self._streams[i].rows(number[source == i] - first[i], self._sequence_length)
            for i in (np.unique(source) if len(number) else [self._last])
        ]
        return join(parts)

    @property
    def _last(self) -> int:
        """The last file that has rows: padding repeats its last token."""
        return int(np.searchsorted(self._ends, self.n_rows, side="left"))


def _nearest(file: TokenFile, token: int) -> int:
    """The document whose start, or the file's end, is nearest to a place in the tokens."""
    after = min(int(np.searchsorted(file.starts, token)), file.n_documents)
    before = max(after - 1, 0)
    return after if file.starts[after] - token <= token - file.starts[before] else before


class Windows:
    """Rows that each lie inside one held-out document, starting every ``stride`` tokens of it.

    Every token of a long document but those near its two ends comes at a place of every ``stride`` tokens of a row: a
    loss by position is then one over the same tokens, with less or more of the document before them.
    """

    def __init__(self, files: Sequence[TokenFile], sequence_length: int, stride: int) -> None:
        self._sequence_length = sequence_length
        self._places: list[Stream] = []
        for file in files:
            for document in range(file.index.n_training_documents, file.n_documents):
                start, stop = map(int, file.starts[document : document + 2])
                last = stop - sequence_length - 1  # a row needs one token more, for its last target
                self._places += [Stream(file, at, at + sequence_length + 1) for at in range(start, last + 1, stride)]
        self.n_rows = len(self._places)

    def rows(self, start: int, stop: int) -> Rows:
        """Rows ``[start, stop)``; those past the end repeat the last and have only ignored targets."""
        zero = np.zeros(1, np.int64)
        places = [self._places[min(i, self.n_rows - 1)] for i in range(start, stop)]
        found = join([place.rows(zero, self._sequence_length) for place in places])
        found.targets[max(0, self.n_rows - start) :] = IGNORE
        return found
