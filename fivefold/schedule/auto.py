"""A schedule made for given costs: W placed into the gaps of an order of F and I, under a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, product
from math import floor
from typing import Literal, NamedTuple

from ..config.errors import ConfigError
from . import streams
from .cost import UNIT, Cost, price
from .simulate import simulate
from .table import Action, Step, Table, owners, play

Placement = Literal["loop", "v"]
Fill = Literal["behind", "always", "never"]
EPSILON = 1e-9
"""Relative to the unit of the costs, what rounding may leave of equal times or memories."""


class Placed(NamedTuple):
    """A table with all its W, and the two times it can be judged by."""

    table: Table
    makespan: float
    span: float


class Task(NamedTuple):
    """What a table is to be made for, with the stages placed; see :func:`auto`."""

    placement: Placement
    pp: int
    microbatches: int
    chunks: int
    cost: Callable[[Action], float]
    comm: float
    limit: float
    weight_memory: float


def auto(
    pp: int,
    microbatches: int,
    chunks: int = 1,
    *,
    cost: Cost = UNIT,
    comm: float = 0.0,
    limit: float | None = None,
    weight_memory: float = 1.0,
    placement: Placement | None = None,
    objective: Literal["makespan", "span"] = "makespan",
    limit_key: str = "pipeline.memory_limit",
    chunks_key: str = "pipeline.chunks",
) -> Table:
    """The fastest table found that fits the limit: never slower than a named one of that placement and chunk count.

    The candidates are the named schedules, and orders of F and I with longer or shorter warm-ups, W placed into each in
    three ways. The same arguments give the same table.

    Args:
        comm: time of a message between ranks, in the unit of the costs.
        limit: activations of one microbatch in one stage that a rank may hold; None: the memory of 1F1B, ``pp*chunks``.
        weight_memory: the share of an activation that I leaves for W.
        placement: ``loop`` puts stage s on rank ``s mod pp``; ``v``, with two chunks, stages r and ``2*pp - 1 - r`` on
            rank r; None takes the better.
        objective: what to make shortest, as :class:`.simulate.Timeline` defines it.
        limit_key: what the limit is called in messages.
        chunks_key: what the chunks are called.
    Raises:
        ConfigError: if no table fits the limit.

    Source: Qi et al. 2023, arXiv 2401.10241, section 3.1.
    """
    limit = float(pp * chunks) if limit is None else limit
    least = chunks - 1 + max(1.0, weight_memory)
    if limit < least - EPSILON:
        why = f"the activations that a rank holds for one microbatch ({chunks_key}={chunks})"
        raise ConfigError([f"{limit_key}={limit:g} is below {least:g}, {why}. Use {least:g} or more."])
    if placement == "v" and chunks != 2:
        raise ConfigError([f"{chunks_key}={chunks} is not 2, the only chunk count of a V. Use {chunks_key}=2."])
    places: tuple[Placement, ...] = (placement,) if placement else ("loop", "v") if chunks == 2 else ("loop",)
    best: Placed | None = None
    for place in places:
        for found in _candidates(Task(place, pp, microbatches, chunks, price(cost), comm, limit, weight_memory)):
            if best is None or getattr(found, objective) < getattr(best, objective) * (1 - EPSILON):
                best = found
    assert best is not None, "one microbatch at a time fits every limit that is not refused"
    return best.table


def place_weights(
    skeleton: Table,
    steps: Sequence[Step],
    cost: Callable[[Action], float],
    *,
    comm: float,
    limit: float,
    weight_memory: float,
    fill: Fill,
) -> Placed | None:
    """Insert a W for each I, oldest first: where its rank would idle as long as it takes, and where memory is full.

    Args:
        skeleton: a table of F and I only.
        steps: how it plays.
        fill: what to do with a shorter gap: ``never`` or ``always`` use it, or only on a rank that would otherwise have
            idled longer than each other (``behind``). What no gap took runs at the end.
    Returns:
        None if the skeleton does not fit the limit.
    """
    owner, n = owners(skeleton), len(skeleton)
    clock, held, idle, first = [0.0] * n, [0.0] * n, [0.0] * n, [0.0] * n
    pending: list[list[Action]] = [[] for _ in range(n)]
    table: Table = [[] for _ in range(n)]
    end: dict[Action, float] = {}

    def weight(rank: int) -> None:
        action = pending[rank].pop(0)
        clock[rank] += cost(action)
        held[rank] -= weight_memory
        table[rank].append(action)

    for rank, action, required in steps:
        ready = 0.0
        for a in required:
            ready = max(ready, end[a] + (comm if owner[a.stage] != rank else 0.0))
        adds = 1.0 if action.kind == "F" else weight_memory - 1.0
        while pending[rank]:
            gap = ready - clock[rank]
            full = held[rank] + adds > limit + EPSILON
            if not full and gap < cost(pending[rank][0]) - EPSILON:
                if gap <= EPSILON or fill == "never":
                    break
                if fill == "behind" and idle[rank] + gap <= max(idle) + EPSILON:
                    break
            weight(rank)
        held[rank] += adds
        if held[rank] > limit + EPSILON:
            return None
        start = max(ready, clock[rank])
        if table[rank]:
            idle[rank] += start - clock[rank]
        else:
            first[rank] = start
        clock[rank] = end[action] = start + cost(action)
        table[rank].append(action)
        if action.kind == "I":
            pending[rank].append(Action("W", action.stage, action.microbatch))
    for rank in range(n):
        while pending[rank]:
            weight(rank)
    return Placed(table, max(clock) - min(first), max(last - begin for last, begin in zip(clock, first)))


def _candidates(task: Task) -> Iterator[Placed]:
    """The named tables that fit the limit, and every skeleton with W placed in every way."""
    named = list(_named(task))
    for table in named:
        timeline = simulate(table, task.cost, task.comm, task.weight_memory)
        if max(timeline.peak) <= task.limit + EPSILON:
            yield Placed(table, timeline.makespan, timeline.span)
    skeletons = [_halves(table) for table in named]
    skeletons += _skeletons(task)
    fills: tuple[Fill, ...] = ("behind", "always", "never")
    for skeleton in _distinct(s for s in skeletons if _live(s) <= task.limit + EPSILON):
        steps, waits = play(skeleton)
        for fill in () if waits else fills:
            found = place_weights(skeleton, steps, task.cost, comm=task.comm, limit=task.limit,
                                  weight_memory=task.weight_memory, fill=fill)  # fmt: skip
            if found is not None:
                yield found


def _named(task: Task) -> Iterator[Table]:
    pp, microbatches, chunks = task.pp, task.microbatches, task.chunks
    if task.placement == "v":
        yield from (streams.zb_v(pp, microbatches), streams.dualpipe_v(pp, microbatches))
        return
    if chunks == 1:  # the interleaved and looped ones are then among these
        for make in (streams.one_f_one_b, streams.zb_h1, streams.zb_h2, streams.gpipe):
            yield make(pp, microbatches)
        return
    for make in (streams.interleaved_split, streams.interleaved, streams.looped_bfs):
        yield make(pp, microbatches, chunks)


def _halves(table: Table) -> Table:
    """A table's F and I, a full backward becoming an I."""
    return [[a._replace(kind="I") if a.kind == "B" else a for a in order if a.kind != "W"] for order in table]


def _live(skeleton: Table) -> int:
    """The most activations that a rank of a skeleton holds even if W keeps none."""
    counts = (accumulate(1 if a.kind == "F" else -1 for a in order) for order in skeleton)
    return max(max(count) for count in counts)


def _distinct(tables: Iterable[Table]) -> list[Table]:
    found: list[Table] = []
    for table in tables:
        if table not in found:
            found.append(table)
    return found


def _skeletons(task: Task) -> Iterator[Table]:
    """Orders of F and I that fit the limit: rounds of some size through all chunks, with some warm-up.

    A warm-up that reaches the first I keeps its rank busy until then; under the limit it is cut. The paper's warm-ups
    decrease from rank to rank; with cut ones that is a variant, not a rule.
    """
    pp, microbatches, chunks = task.pp, task.microbatches, task.chunks
    for size in _round_sizes(task):
        room = max(0, floor(task.limit + EPSILON) - (chunks - 1) * size - 1)
        for more, falling in product((0, 1), (False, True)):
            hops = [min(n + more * (n > 0), room) for n in _hops(task)]
            for rank in range(1, pp) if falling else ():
                hops[rank] = min(hops[rank], max(hops[rank - 1] - 1, pp - 1 - rank))
            table = []
            for rank in range(pp):
                stages = [rank, 2 * pp - 1 - rank] if task.placement == "v" else list(range(rank, chunks * pp, pp))
                groups = [range(m, min(m + size, microbatches)) for m in range(0, microbatches, size)]
                forwards = [(stage, m) for group in groups for stage in stages for m in group]
                backwards = [(stage, m) for group in groups for stage in reversed(stages) for m in group]
                warmup = (chunks - 1) * len(groups[0]) + hops[rank]
                table.append(_halves([streams.weave(forwards, backwards, warmup)])[0])
            yield table


def _round_sizes(task: Task) -> list[int]:
    """Round sizes worth trying, each one that leaves room under the limit for at least one forward beside a round."""
    if task.chunks == 1:
        return [task.pp]
    most = max(1, floor((task.limit + EPSILON - 1) / (task.chunks - 1)))
    sizes = {task.pp, len(streams.rounds(task.microbatches, task.pp)[0]), task.pp // 2, most, 1}
    return sorted({size for size in sizes if 1 <= size <= most} | {1}, reverse=True)


def _hops(task: Task) -> list[int]:
    """Forwards that fit, on each rank, between its first last-chunk forward and that one's I."""
    found = []
    base, cost, most = (task.chunks - 1) * task.pp, task.cost, task.microbatches
    for rank in range(task.pp):
        beyond = range(base + rank + 1, base + task.pp)
        time = sum(cost(Action("F", s, 0)) + cost(Action("I", s, 0)) + 2 * task.comm for s in beyond)
        forward = cost(Action("F", base + rank, 0))
        found.append(min(most, floor(time / forward + EPSILON)) if forward else most)
    return found
