"""Which rows each step trains on, as a pure function of seed and step.

Letters: B sequences of the whole run's batch, N rows, T tokens a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .mixture import Mixture
from .permutation import permute
from .rows import Rows, Stream, join
from .tokenfile import TokenFile

SOURCE_SHIFT = 48  # a sample id is the source in the upper bits and the row in the lower 48


class Sampler:
    """Samples of a weighted mixture of token files; it has no state, so any rank can ask for any part of any step.

    Sample number k of the run is the same whatever the layout. Each file is read in epochs: every row once, in a new
    pseudo-random order each time.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        weights: Sequence[float],
        sequence_length: int,
        batch_size: int,
        seed: int,
    ) -> None:
        """Sample ``files``, each of at least one row.

        Args:
            weights: each file's share of samples; empty takes them in proportion to rows.
        """
        self.sequence_length, self.batch_size, self.seed = sequence_length, batch_size, seed
        self._streams = [Stream(file, 0, file.n_training_tokens) for file in files]
        self.n_rows = tuple(stream.n_targets // sequence_length for stream in self._streams)
        assert all(self.n_rows), "a file without a row of training tokens"
        self._mixture = Mixture(weights or self.n_rows)

    def ids(self, step: int) -> NDArray[np.int64]:
        """The sample ids of a step, counted from 1: file number times 2^48, plus row.

        Shapes: -> [B].
        """
        return self._ids(step, 0, self.batch_size)

    def rows(self, step: int, start: int, stop: int) -> Rows:
        """Sequences ``[start, stop)`` of a step's batch, steps counted from 1.

        Shapes: fields [stop - start, T].
        """
        source, row = np.divmod(self._ids(step, start, stop), 1 << SOURCE_SHIFT)
        present = np.unique(source)
        groups = [np.flatnonzero(source == i) for i in present]
        parts = [self._streams[i].rows(row[group], self.sequence_length) for i, group in zip(present, groups)]
        return parts[0] if len(parts) == 1 else join(parts, np.argsort(np.concatenate(groups)))

    def _ids(self, step: int, start: int, stop: int) -> NDArray[np.int64]:
        assert step >= 1 and 0 <= start < stop <= self.batch_size
        sample = (step - 1) * self.batch_size + np.arange(start, stop, dtype=np.int64)
        source, number = self._mixture.locate(sample)
        row = np.empty_like(number)
        for i in np.unique(source):
            mine = source == i
            epoch, index = np.divmod(number[mine], self.n_rows[i])
            row[mine] = permute(index, self.n_rows[i], self.seed, i, epoch)
        return (source << SOURCE_SHIFT) | row
