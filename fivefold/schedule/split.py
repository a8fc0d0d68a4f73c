"""Where a model is cut into stages: at least one part each, the most expensive stage as cheap as it can be."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from itertools import accumulate, pairwise


def cut(names: Sequence[str], counts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """The parts ``names`` in order, ``counts[i]`` of them in stage i."""
    assert sum(counts) == len(names)
    return tuple(tuple(names[a:b]) for a, b in pairwise(accumulate(counts, initial=0)))


def balanced(costs: Sequence[float], n_stages: int) -> tuple[int, ...]:
    """How many consecutive parts of the given costs go to each stage, at least one.

    The largest cost of a stage is as small as can be, then the second largest, and so on; among what is still equal,
    later stages take more parts, since earlier ones hold the activations of more microbatches. Exact: dynamic
    programming over the first stages, which may be ordered so because adding the same stage to two lists of costs
    does not change which of the lists is better.

    Args:
        costs: of each part, not negative.
        n_stages: from 1 to the number of parts.
    """
    assert 1 <= n_stages <= len(costs)
    total = list(accumulate(_whole(costs), initial=0))
    limit = _smallest_limit(total, n_stages)
    slack = len(costs) - n_stages  # a stage has at most this many parts more than one
    best: dict[int, tuple[list[int], int]] = {0: ([], 0)}  # parts placed -> costs of their stages, the last one's start
    starts: list[dict[int, int]] = []
    for stage in range(n_stages):
        following: dict[int, tuple[list[int], int]] = {}
        for end in range(stage + 1, stage + slack + 2):
            for start in range(max(stage, end - slack - 1), end):
                cost = total[end] - total[start]
                if cost > limit or start not in best:
                    continue
                stages = best[start][0].copy()
                insort(stages, -cost)  # ascending negatives: the largest cost first
                if end not in following or stages > following[end][0]:
                    following[end] = (stages, start)
        best = following
        starts.append({end: start for end, (_, start) in best.items()})
    cuts = [len(costs)]
    for start in reversed(starts):
        cuts.append(start[cuts[-1]])
    return tuple(b - a for a, b in pairwise(reversed(cuts)))


def _whole(costs: Sequence[float]) -> list[int]:
    """``costs`` in a common unit so small that all are whole numbers: sums of floats would depend on their order."""
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    unit = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


def _smallest_limit(total: Sequence[int], n_stages: int) -> int:
    """The smallest cost that no stage has to exceed, by bisection; ``total[i]`` is the cost of the first i parts."""
    low, high = max(b - a for a, b in pairwise(total)), total[-1]
    while low < high:
        middle = (low + high) // 2
        stages, start = 0, 0
        while start < len(total) - 1 and stages <= n_stages:
            start = bisect_right(total, total[start] + middle) - 1
            stages += 1
        if start == len(total) - 1 and stages <= n_stages:
            high = middle
        else:
            low = middle + 1
    return low
