"""Every named schedule over many sizes: it runs, its bubble is the published one, and it holds what it should."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import pytest

from fivefold.schedule import streams
from fivefold.schedule.simulate import simulate
from fivefold.schedule.streams import rounds, weave
from fivefold.schedule.table import Action, Table, check, owners, split_backwards

RANKS, CHUNKS, MICROBATCHES = range(1, 9), range(1, 5), range(1, 33)
UNIT_COSTS = (1.0, 1.0, 1.0)
COSTS = (UNIT_COSTS, (3.0, 3.0, 2.0), (2.0, 2.0, 1.5), (4.0, 3.5, 3.0))
"""Times of F, I and W, with W <= I <= F <= I + W: where the forms hold."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """What is known of a schedule in closed form: see its docstring for the sources."""

    make: Callable[..., Table]
    any_chunks: bool = False
    chunks: int = 1
    bubble: Callable[[int, float, float, float], float]
    """Idle time of the busiest rank, from p and the times of F, I and W."""
    of: Literal["makespan", "span"]
    other: Callable[[int, float, float, float], float]
    """The same, of the other of the two."""
    least: Callable[[int], int] = lambda p: p
    """The fewest microbatches with these bubbles, from p."""
    costs: tuple[tuple[float, float, float], ...] = COSTS
    peak: Callable[[int, int, int, int], int]
    """Activations that a rank holds, from p, m, v and the rank; at most ``m*v``."""


def full(p: int, f: float, i: float, w: float) -> float:
    return (p - 1) * (f + i + w)


def half(p: int, f: float, i: float, w: float) -> float:
    return (p - 1) * (f + i - w)


def first_round(p: int, m: int) -> int:
    return len(rounds(m, p)[0])


FORMS = {
    "gpipe": Form(make=streams.gpipe, bubble=full, of="makespan", other=full, least=lambda p: 1,
                  peak=lambda p, m, v, r: m),
    "1f1b": Form(make=streams.one_f_one_b, bubble=full, of="makespan", other=full, least=lambda p: 1,
                 peak=lambda p, m, v, r: p - r),
    "interleaved": Form(make=streams.interleaved, any_chunks=True, bubble=full, of="makespan", other=full,
                        peak=lambda p, m, v, r: (v - 1) * first_round(p, m) + (1 + (v > 1)) * (p - 1 - r) + 1),
    "looped_bfs": Form(make=streams.looped_bfs, any_chunks=True, bubble=full, of="makespan", other=full,
                       peak=lambda p, m, v, r: m * v),
    "interleaved_split": Form(make=streams.interleaved_split, any_chunks=True, bubble=half, of="span", other=half,
                              peak=lambda p, m, v, r: (v - 1) * first_round(p, m) + p),
    "zb_h1": Form(make=streams.zb_h1, bubble=half, of="span", other=half, peak=lambda p, m, v, r: p),
    "zb_h2": Form(make=streams.zb_h2, bubble=lambda p, f, i, w: (p - 1) * (f + i - 2 * w), of="span",
                  other=lambda p, f, i, w: (p - 1) * max(f, f + i - 2 * w), least=lambda p: 2 * p - 1,
                  peak=lambda p, m, v, r: 2 * p - 1),
    "zb_v": Form(make=streams.zb_v, chunks=2, bubble=lambda p, f, i, w: 0.0, of="span",
                 other=lambda p, f, i, w: (p - 1) * f, least=lambda p: 2 * p - 1, costs=(UNIT_COSTS,),
                 peak=lambda p, m, v, r: 2 * p),
    "dualpipe_v": Form(make=streams.dualpipe_v, chunks=2, bubble=half, of="span", other=half, least=lambda p: 2 * p,
                       peak=lambda p, m, v, r: 2 * p + 1),
}  # fmt: skip


def tables(form: Form, pp: int, microbatches: int) -> Iterator[tuple[int, Table]]:
    """The schedule's table for each legal chunk count."""
    for chunks in CHUNKS if form.any_chunks else (form.chunks,):
        given = (chunks,) if form.any_chunks else ()
        yield chunks, form.make(pp, microbatches, *given)


@pytest.mark.parametrize("name", FORMS)
def test_every_size_runs_with_the_published_bubble_in_the_known_memory(name: str) -> None:
    form, wrong, checked = FORMS[name], [], 0
    for pp in RANKS:
        for m in MICROBATCHES:
            for chunks, table in tables(form, pp, m):
                wrong += [(pp, m, chunks, problem) for problem in check(table, pp=pp, microbatches=m)]
                for f, i, w in form.costs if m % 8 in (0, 5) else form.costs[:1]:
                    timeline = simulate(table, {"F": f, "I": i, "W": w})
                    busy = m * chunks * (f + i + w)
                    assert timeline.busy == pytest.approx(busy)
                    idle = {"makespan": timeline.makespan - busy, "span": timeline.span - busy}
                    if m >= form.least(pp):
                        (other,) = {"makespan", "span"} - {form.of}
                        expected = {form.of: form.bubble(pp, f, i, w), other: form.other(pp, f, i, w)}
                        checked += 1
                        if idle != pytest.approx(expected):
                            wrong.append((pp, m, chunks, (f, i, w), idle, expected))
                bound = [min(m * chunks, form.peak(pp, m, chunks, rank)) for rank in range(pp)]
                held = list(timeline.peak)
                if name in ("zb_v", "dualpipe_v"):  # every rank at most; some rank as much
                    exact = max(held) == max(bound) and all(a <= b for a, b in zip(held, bound))
                elif m < pp and name in ("zb_h1", "zb_h2", "interleaved_split"):  # ranks differ before the pipe is full
                    exact = max(held) == max(bound)
                else:
                    exact = held == bound
                if not exact:
                    wrong.append((pp, m, chunks, "holds", held, bound))
    assert wrong == []
    assert checked > 150


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_bubble_rates_as_the_papers_write_them(pp: int) -> None:
    for m in (pp, 3 * pp, 5 * pp):
        for form in (FORMS["gpipe"], FORMS["1f1b"]):
            assert simulate(form.make(pp, m)).bubble == pytest.approx((pp - 1) / (m + pp - 1))
        for v in CHUNKS:
            for make in (streams.interleaved, streams.looped_bfs):
                assert simulate(make(pp, m, v)).bubble == pytest.approx((pp - 1) / (m * v + pp - 1))
        if m >= 2 * pp:
            assert simulate(streams.zb_h1(pp, m)).span_bubble == pytest.approx((pp - 1) / (3 * m + pp - 1))
            assert simulate(streams.zb_h2(pp, m)).span_bubble == pytest.approx(0)
            assert simulate(streams.zb_v(pp, m)).span_bubble == pytest.approx(0)


def paired(table: Table, together: float, alone: dict[str, float]) -> float:
    """Idle time of a table whose neighbouring F and B run as one: each needs the other's inputs, and ends with it."""
    order_of = [_pairs(order) for order in table]
    owner, split = owners(table), split_backwards(table)
    end: dict[Action, float] = {}
    clock, at = [0.0] * len(table), [0] * len(table)
    work = max(sum(together if len(unit) == 2 else alone[unit[0].kind] for unit in units) for units in order_of)
    while any(at[rank] < len(units) for rank, units in enumerate(order_of)):
        before = sum(at)
        for rank, units in enumerate(order_of):
            while at[rank] < len(units):
                unit = units[at[rank]]
                inputs = [need for action in unit for need in inputs_of(action, len(owner), split)]
                if any(need not in end for need in inputs):
                    break
                clock[rank] = max([clock[rank], *(end[need] for need in inputs)])
                clock[rank] += together if len(unit) == 2 else alone[unit[0].kind]
                end.update(dict.fromkeys(unit, clock[rank]))
                at[rank] += 1
        assert sum(at) > before, "deadlock"
    return max(clock) - work


def _pairs(order: list[Action]) -> list[tuple[Action, ...]]:
    units: list[tuple[Action, ...]] = []
    for action in order:
        if action.kind == "B" and units and len(units[-1]) == 1 and units[-1][0].kind == "F":
            units[-1] = (units[-1][0], action)
        else:
            units.append((action,))
    return units


def inputs_of(action: Action, n_stages: int, split: frozenset[tuple[int, int]]) -> list[Action]:
    """Inputs of an action, written again so that the package's own are not what proves them."""
    kind, stage, m = action
    if kind == "F":
        return [Action("F", stage - 1, m)] * (stage > 0)
    if kind == "W":
        return [Action("I", stage, m)]
    above = [Action("I" if (stage + 1, m) in split else "B", stage + 1, m)] * (stage + 1 < n_stages)
    return [Action("F", stage, m), *above]


@pytest.mark.parametrize("pp", [2, 3, 4, 6])
def test_dualpipe_v_has_the_published_bubble_when_each_f_runs_with_its_b(pp: int) -> None:
    alone = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    for m in (2 * pp, 2 * pp + 1, 4 * pp):
        table = streams.dualpipe_v(pp, m)
        for order in table:
            units = _pairs(order)
            assert sum(len(unit) == 2 for unit in units) >= 2 * m - 3 * pp  # all but the ends
        # (PP/2 - 1)(F&B + B - 3W), PP = 2p stages; without overlap F&B = F + B
        assert paired(table, 3.0, alone) == pytest.approx((pp - 1) * (3 + 2 - 3))
        assert paired(table, 2.5, alone) <= (pp - 1) * (2.5 + 2 - 3)


def test_rounds_are_near_equal_and_larger_ones_come_first() -> None:
    for pp in RANKS:
        for m in MICROBATCHES:
            found = rounds(m, pp)
            sizes = [len(entry) for entry in found]
            assert [i for entry in found for i in entry] == list(range(m))
            assert sizes == sorted(sizes, reverse=True)
            assert max(sizes) - min(sizes) <= 1
            assert min(sizes) >= min(pp, m)
    assert [len(entry) for entry in rounds(11, 4)] == [6, 5]


def test_weave_by_hand() -> None:
    turns = [(0, m) for m in range(3)]
    assert words(weave(turns, turns, 1)) == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
    assert words(weave(turns, turns, 0, [0] * 3)) == "F0.0 I0.0 W0.0 F0.1 I0.1 W0.1 F0.2 I0.2 W0.2"
    assert words(weave(turns, turns, 2, [1] * 3)) == "F0.0 F0.1 F0.2 I0.0 I0.1 W0.0 I0.2 W0.1 W0.2"
    assert words(weave(turns, [None, *turns], 0, [None, 2, None, 0])) == "F0.0 F0.1 I0.0 F0.2 B0.1 I0.2 W0.0 W0.2"


def test_1f1b_and_zb_h1_by_hand() -> None:
    assert [words(order) for order in streams.one_f_one_b(2, 3)] == [
        "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2",
        "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2",
    ]
    assert [words(order) for order in streams.zb_h1(2, 3)] == [
        "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2",
    ]


def test_placements() -> None:
    for make in (streams.interleaved, streams.interleaved_split, streams.looped_bfs):
        assert owners(make(3, 5, 3)) == [0, 1, 2] * 3
    for make in (streams.zb_v, streams.dualpipe_v):
        assert owners(make(3, 5)) == [0, 1, 2, 2, 1, 0]


def words(order: list[Action]) -> str:
    return " ".join(map(str, order))
