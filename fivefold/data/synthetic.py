"""Made-up rows that are hard on purpose: what ``verify`` feeds a model, and what the tiny recipes train on.

Letters: N rows, T tokens a row.
"""

from __future__ import annotations

import numpy as np

from .rows import IGNORE, Rows

SHARES = (16, 7, 5, 1, 0, 11, 3, 16)
"""Targets that count in a row, in sixteenths, by its number in the batch: from all of them to none at all."""


class Synthetic:
    """Uniform token ids in rows of one to four documents whose targets are masked raggedly; no files.

    Row ``i`` of a step is a function of (seed, step, i), like a sampler's.

    Args:
        documents: whether rows hold several documents; without, the same tokens and targets are one document a row.
    """

    def __init__(self, vocab_size: int, sequence_length: int, batch_size: int, seed: int, *,
                 documents: bool = True) -> None:  # fmt: skip
        self.documents = documents
        self.vocab_size, self.sequence_length, self.batch_size, self.seed = (
            vocab_size,
            sequence_length,
            batch_size,
            seed,
        )
        self.heldout = SyntheticHeldout(self)

    def rows(self, step: int, start: int, stop: int) -> Rows:
        """Sequences ``[start, stop)`` of a step's batch, steps counted from 1; step 0 is the held-out split."""
        made = [self._row(step, i) for i in range(start, stop)]
        tokens, targets, positions, documents = (np.stack(column) for column in zip(*made, strict=True))
        return Rows(tokens=tokens, targets=targets, positions=positions, documents=documents,
                    single_document=not documents.any())  # fmt: skip

    def _row(self, step: int, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        length = self.sequence_length
        random = np.random.Generator(np.random.Philox(key=self.seed, counter=[step, index, 0, 0]))
        ids = random.integers(self.vocab_size, size=length + 1)
        counted = random.permutation(length)[: round(length * SHARES[index % len(SHARES)] / 16)]
        targets = np.full(length, IGNORE)
        targets[counted] = ids[1:][counted]
        first = np.zeros(length, bool)
        if self.documents:
            first[1 + random.permutation(length - 1)[: index % 4]] = True
        at = np.arange(length)
        return ids[:-1], targets, at - np.maximum.accumulate(np.where(first, at, 0)), np.cumsum(first, dtype=np.int32)


class SyntheticHeldout:
    """A batch's worth of rows, each target standing for one byte."""

    def __init__(self, source: Synthetic) -> None:
        self._source, self.n_rows = source, source.batch_size
        self.n_bytes = int((source.rows(0, 0, self.n_rows).targets != IGNORE).sum())

    def rows(self, start: int, stop: int) -> Rows:
        """Rows ``[start, stop)``; those past the end have only ignored targets."""
        rows = self._source.rows(0, start, stop)
        rows.targets[max(0, self.n_rows - start) :] = IGNORE
        return rows
