"""Weighted mixtures as a pure function of the global sample number."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

# Samples of one period of the pattern. A multiple of 100,000 keeps weights in thousandths of a percent exact.
PERIOD = 100_000


def quotas(weights: Sequence[float], period: int = PERIOD) -> list[int]:
    """Share ``period`` samples out by weight, exactly: largest remainders first, and at least one for every weight."""
    total = sum(map(Fraction, weights), Fraction(0))
    shares = [Fraction(weight) * period / total for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for i in by_remainder[: period - sum(counts)]:
        counts[i] += 1
    for i, count in enumerate(counts):
        if count == 0:
            counts[i] = 1
            counts[counts.index(max(counts))] -= 1
    return counts


class Mixture:
    """Which source each sample comes from, and how many samples of that source came before it.

    A fixed pattern of ``PERIOD`` samples repeats; within it every source is spread evenly, so any stretch of samples
    holds each source's share to within about one sample.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.quotas = np.array(quotas(weights), np.int64)
        source = np.repeat(np.arange(len(self.quotas)), self.quotas)
        rank = np.arange(PERIOD) - np.repeat(np.cumsum(self.quotas) - self.quotas, self.quotas)
        order = np.argsort((rank + 0.5) / self.quotas[source], kind="stable")
        self._source = source[order].astype(np.int16)
        self._rank = rank[order].astype(np.int32)

    def locate(self, sample: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each global sample number, and its number among that source's samples."""
        period, slot = np.divmod(sample, PERIOD)
        source = self._source[slot].astype(np.int64)
        return source, period * self.quotas[source] + self._rank[slot]
