"""The named schedules. Each is two streams per rank, a warm-up, and a lag of W behind I; :func:`weave` does the rest.

Bubbles are given in the papers' terms: ``F``, ``B``, ``I``, ``W`` the times of the actions, ``B = I + W``, messages
free, ``p`` ranks, ``m`` microbatches, ``v`` chunks (stages of one rank), times those of one stage. A bubble is idle
time of a step: of its makespan or of its span, which are the same unless told (:class:`.simulate.Timeline`). What a
rank holds is counted in activations of one microbatch in one stage, and never more than its ``m*v``.

A stream is a list of (stage, microbatch); a ``None`` in it is a turn without a forward or a backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, zip_longest

from .table import Action, Table

Turn = tuple[int, int] | None


def weave(
    forwards: Sequence[Turn], backwards: Sequence[Turn], warmup: int, lag: Sequence[int | None] = ()
) -> list[Action]:
    """One rank's actions: ``warmup`` forwards, then a forward and a backward in turn, then the backwards that are left.

    Args:
        lag: for each turn of ``backwards`` how many W may wait after it. None, or no number: this backward is a B.
            Otherwise it is an I, and then W run, oldest first, until that many wait. All that wait at the end run then.
    """
    order = [Action("F", *turn) for turn in forwards[:warmup] if turn]
    waiting: list[Action] = []
    for forward, backward, most in zip_longest(forwards[warmup:], backwards, lag):
        if forward:
            order.append(Action("F", *forward))
        if not backward:
            continue
        order.append(Action("B" if most is None else "I", *backward))
        if most is not None:
            waiting.append(Action("W", *backward))
            surplus = max(0, len(waiting) - most)
            order += waiting[:surplus]
            del waiting[:surplus]
    return order + waiting


def gpipe(pp: int, microbatches: int) -> Table:
    """All forwards, then all backwards. Bubble ``(p-1)(F+B)``; a rank holds ``m``.

    Source: Huang et al. 2019, arXiv 1811.06965.
    """
    streams = [[(rank, m) for m in range(microbatches)] for rank in range(pp)]
    return [weave(stream, stream, microbatches) for stream in streams]


def one_f_one_b(pp: int, microbatches: int) -> Table:
    """Each backward as soon as it can run. Bubble ``(p-1)(F+B)``; rank r holds ``p-r``.

    Source: Narayanan et al. 2019, PipeDream; Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1.
    """
    streams = [[(rank, m) for m in range(microbatches)] for rank in range(pp)]
    return [weave(stream, stream, pp - 1 - rank) for rank, stream in enumerate(streams)]


def zb_h1(pp: int, microbatches: int) -> Table:
    """1F1B with rank r's W ``r`` behind its I. Bubble ``(p-1)(F+I-W)``; each rank holds ``p``, the most in 1F1B.

    From ``m = p`` on, while W is no longer than F and I.

    Source: Qi et al. 2023, arXiv 2401.10241, section 2.1 and figure 3.
    """
    streams = [[(rank, m) for m in range(microbatches)] for rank in range(pp)]
    return [weave(stream, stream, pp - 1 - rank, [rank] * microbatches) for rank, stream in enumerate(streams)]


def zb_h2(pp: int, microbatches: int) -> Table:
    """Twice the warm-up and lag of ZB-H1. Bubble ``(p-1)(F+I-2W)`` of the span; each rank holds ``2p-1``.

    Of the makespan ``(p-1)F`` if that is more. From ``m = 2p-1`` on, while W is no longer than F and ``(F+I)/2``.

    Source: Qi et al. 2023, arXiv 2401.10241, section 2.2 and figure 3.
    """
    streams = [[(rank, m) for m in range(microbatches)] for rank in range(pp)]
    lags = [[2 * rank] * microbatches for rank in range(pp)]
    return [weave(stream, stream, 2 * (pp - 1 - rank), lags[rank]) for rank, stream in enumerate(streams)]


def looped_bfs(pp: int, microbatches: int, chunks: int) -> Table:
    """Breadth first: all microbatches through a chunk before the next chunk. A rank holds ``m*v``.

    Bubble ``(p-1)(F+B)`` from ``m = p`` on. Stage s is on rank ``s mod p``.

    Source: Lamy-Poirier 2022, arXiv 2211.05953.
    """
    table = []
    for rank in range(pp):
        stages = range(rank, chunks * pp, pp)
        forwards = [(stage, m) for stage in stages for m in range(microbatches)]
        backwards = [(stage, m) for stage in reversed(stages) for m in range(microbatches)]
        table.append(weave(forwards, backwards, len(forwards)))
    return table


def interleaved(pp: int, microbatches: int, chunks: int) -> Table:
    """Interleaved 1F1B: a round of microbatches goes through every chunk before the next round.

    Bubble ``(p-1)(F+B)`` from ``m = p`` on. With several chunks rank r holds ``(v-1)g + 2(p-1-r) + 1``, g being the
    first round, which is p where p divides m; with one it is 1F1B. Stage s is on rank ``s mod p``.

    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2.
    """
    return _interleave(pp, microbatches, chunks, split=False)


def interleaved_split(pp: int, microbatches: int, chunks: int) -> Table:
    """Interleaved 1F1B with rank r's W ``r`` behind its I: the interleaved form of ZB-H1.

    Bubble ``(p-1)(F+I-W)`` from ``m = p`` on, while W is no longer than F and I. Each rank holds ``(v-1)g + p``, g
    being the first round, which is p where p divides m. Stage s is on rank ``s mod p``.

    Source: Qi et al. 2023, arXiv 2401.10241, section 2.1, applied to Narayanan et al. 2021, arXiv 2104.04473.
    """
    return _interleave(pp, microbatches, chunks, split=True)


def zb_v(pp: int, microbatches: int) -> Table:
    """Two chunks in a V, rank r with stages ``r`` and ``2p-1-r``. No bubble in the span where ``F = I = W``.

    Of the makespan ``(p-1)F``. From ``m = 2p-1`` on. A rank holds ``2p``, each half as large as with one chunk: what
    1F1B's first rank holds.

    Source: Qi et al. 2023, arXiv 2401.10241, section 6 and figure 8.
    """
    long = max(microbatches, 2 * pp - 1)
    table = []
    for rank in range(pp):
        forwards, backwards = _v(pp, long, rank)
        lag = [0] * (2 * long - pp - rank) + [2 * rank] * (pp + rank)
        table.append(weave(forwards, backwards, 2 * pp - 1, lag))
    return _shorten(table, microbatches)


def dualpipe_v(pp: int, microbatches: int) -> Table:
    """ZB-V's streams, one more forward in flight, split backwards only at both ends: so that each F is beside a B.

    Bubble ``(p-1)(F+I-W)`` while F and B run one after the other, from ``m = 2p`` on, where ``W <= I <= F <= B``. If
    each F ran with the B beside it, in the time ``F&B``, it would be at most the published ``(p-1)(F&B+B-3W)``. A rank
    holds ``2p+1``, each half as large as with one chunk.

    Source: DeepSeek-AI 2025, https://github.com/deepseek-ai/DualPipe.
    """
    long = max(microbatches, 2 * pp)
    table = []
    for rank in range(pp):
        forwards, backwards = _v(pp, long, rank)
        split = pp - 1 - rank
        backwards.insert(split, None)
        lag = [0] * split + [None] * (2 * long - pp - split + 1) + [rank] * pp
        table.append(weave(forwards, backwards, 2 * pp - 1, lag))
    return _shorten(table, microbatches)


def rounds(microbatches: int, pp: int) -> list[range]:
    """The microbatches in as many near-equal rounds of at least ``pp`` as there are, larger ones first.

    A smaller round than ``pp`` leaves its rank idle between chunks; a larger one than the first would deadlock, as the
    first sets the warm-up.
    """
    n = max(1, microbatches // pp)
    size, larger = divmod(microbatches, n)
    cuts = [i * size + min(i, larger) for i in range(n + 1)]
    return [range(a, b) for a, b in pairwise(cuts)]


def _interleave(pp: int, microbatches: int, chunks: int, *, split: bool) -> Table:
    groups = rounds(microbatches, pp)
    table = []
    for rank in range(pp):
        stages = range(rank, chunks * pp, pp)
        forwards = [(stage, m) for group in groups for stage in stages for m in group]
        backwards = [(stage, m) for group in groups for stage in reversed(stages) for m in group]
        # A full backward takes two turns, so a forward has to run as far ahead again to reach the last stage in time.
        hops = (1 if split or chunks == 1 else 2) * (pp - 1 - rank)
        lag = [rank] * len(backwards) if split else []
        table.append(weave(forwards, backwards, (chunks - 1) * len(groups[0]) + hops, lag))
    return table


def _v(pp: int, microbatches: int, rank: int) -> tuple[list[Turn], list[Turn]]:
    """The streams that ZB-V and DualPipeV share, from ``2*pp - 1`` microbatches on.

    Forwards go down the V until the first comes up again, then alternate, with the upward ones first while the V
    fills. Backwards run the V the other way, in three parts alike.
    """
    down, up = rank, 2 * pp - 1 - rank
    n = microbatches
    forwards = [down] * (2 * (pp - rank) - 1) + [up, down] * rank + [up] * (pp - rank)
    forwards += [down, up] * (n - 2 * pp + rank + 1)
    backwards = [up] * (pp - rank) + [down, up] * (n - pp + rank) + [down] * (pp - rank)
    late: list[Turn] = [turn for i in range(pp - 1 - rank) for turn in (None, (up, n - pp + 1 + rank + i))]
    return _number(forwards) + late, _number(backwards)


def _number(stages: Sequence[int]) -> list[Turn]:
    """Each stage's turns, with its microbatches counted from 0."""
    seen = dict.fromkeys(stages, 0)
    turns: list[Turn] = []
    for stage in stages:
        turns.append((stage, seen[stage]))
        seen[stage] += 1
    return turns


def _shorten(table: Table, microbatches: int) -> Table:
    """A long run with the late microbatches left out: what is left still waits only for itself."""
    return [[a for a in order if a.microbatch < microbatches] for order in table]
