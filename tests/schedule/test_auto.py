"""The automatic schedule: it runs, it fits, and it is never slower than a named one that fits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest

from fivefold.config.errors import ConfigError
from fivefold.schedule.auto import auto
from fivefold.schedule.cost import Cost
from fivefold.schedule.named import SCHEDULES, build
from fivefold.schedule.simulate import simulate
from fivefold.schedule.table import Action, Table, check, owners

SINGLE = ("gpipe", "1f1b", "zb_h1", "zb_h2")
LOOPED = ("interleaved", "interleaved_split", "looped_bfs")
V = ("zb_v", "dualpipe_v")


def named(pp: int, microbatches: int, chunks: int, placement: str | None) -> Iterator[tuple[str, Table]]:
    """The named schedules of a placement and chunk count."""
    names = (*(SINGLE if chunks == 1 else ()), *LOOPED) if placement != "v" else ()
    for name in (*names, *(V if chunks == 2 and placement != "loop" else ())):
        yield name, build(name, pp, microbatches, chunks if SCHEDULES[name].any_chunks else None)


@dataclass(frozen=True)
class ByStage:
    """Costs that differ from stage to stage, and from kind to kind."""

    by_kind: dict[str, float]
    factors: tuple[float, ...]

    def __call__(self, action: Action) -> float:
        return self.by_kind[action.kind] * self.factors[action.stage]


def case(seed: int) -> dict:
    """Arguments of ``auto``, drawn."""
    draw = random.Random(seed)
    pp, chunks = draw.randint(1, 5), draw.choice((1, 1, 2, 2, 3))
    placement = draw.choice(("loop", "v", None)) if chunks == 2 else draw.choice(("loop", None))
    by_kind = {"F": 1.0, "I": draw.uniform(0.5, 2), "W": draw.choice((0.0, draw.uniform(0.1, 2)))}
    by_kind["B"] = by_kind["I"] + by_kind["W"] * draw.choice((1.0, 0.9))
    cost: Cost = by_kind
    if draw.random() < 0.4:
        cost = ByStage(by_kind, tuple(draw.uniform(0.5, 2) for _ in range(pp * chunks)))
    least, usual = chunks + 0.0, pp * chunks
    limit = draw.choice((None, None, least, draw.uniform(least, 2 * usual + 1), 2.0 * usual))
    return {
        "pp": pp, "microbatches": draw.randint(1, 14), "chunks": chunks, "cost": cost, "placement": placement,
        "comm": draw.choice((0.0, draw.uniform(0, 0.5))), "limit": limit,
        "weight_memory": draw.choice((1.0, draw.uniform(0.2, 1.0))), "objective": draw.choice(("makespan", "span")),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(0, 150, 10))
def test_it_runs_fits_and_is_never_slower_than_a_named_one_that_fits(seed: int) -> None:
    for given in map(case, range(seed, seed + 10)):
        pp, m, chunks, objective = (given[key] for key in ("pp", "microbatches", "chunks", "objective"))
        made = auto(**given)
        assert check(made, pp=pp, microbatches=m) == [], given
        sizes = given["cost"], given["comm"], given["weight_memory"]
        timeline = simulate(made, *sizes)
        limit = pp * chunks if given["limit"] is None else given["limit"]
        assert max(timeline.peak) <= limit + 1e-6, given
        for name, table in named(pp, m, chunks, given["placement"]):
            other = simulate(table, *sizes)
            if max(other.peak) <= limit + 1e-6:
                ours, theirs = getattr(timeline, objective), getattr(other, objective)
                assert ours <= theirs * (1 + 1e-6), (name, given)


def test_it_is_faster_than_all_named_ones_where_costs_are_not_alike() -> None:
    cost = {"F": 1.0, "I": 1.2, "W": 0.7}
    for pp, m, limit in ((4, 12, 8.0), (8, 24, 16.0)):
        best = min(simulate(table, cost, 0.1).span for _, table in named(pp, m, 1, None))
        made = simulate(auto(pp, m, cost=cost, comm=0.1, limit=limit, weight_memory=0.4, objective="span"), cost, 0.1)
        assert made.span < 0.97 * best
        assert made.span_bubble < 0.035


def test_more_memory_is_never_slower() -> None:
    cost = {"F": 1.0, "I": 1.0, "W": 0.8}
    times = [simulate(auto(4, 12, cost=cost, comm=0.1, limit=limit), cost, 0.1).makespan for limit in range(1, 10)]
    assert all(after <= before * 1.01 for before, after in pairwise(times))
    assert times[3] < 0.5 * times[0]
    # the last rank cannot start before a forward and a message of each other, and then never idles
    assert times[-1] == pytest.approx(3 * (1 + 0.1) + 12 * 2.8)


def test_without_costs_it_is_zero_bubble_in_the_memory_of_1f1b() -> None:
    made = simulate(auto(4, 8))
    assert made.peak == simulate(build("zb_h1", 4, 8)).peak
    assert made.makespan == simulate(build("zb_h1", 4, 8)).makespan


def test_the_same_arguments_give_the_same_table() -> None:
    for seed in (3, 17):
        assert auto(**case(seed)) == auto(**case(seed))


def test_placements() -> None:
    assert owners(auto(3, 4, 2, placement="loop")) == [0, 1, 2, 0, 1, 2]
    assert owners(auto(3, 4, 2, placement="v")) == [0, 1, 2, 2, 1, 0]
    assert owners(auto(2, 4, 3)) == [0, 1, 0, 1, 0, 1]
    better = {simulate(auto(3, 6, 2, placement=place)).makespan for place in ("loop", "v")}
    assert simulate(auto(3, 6, 2)).makespan == min(better)
    with pytest.raises(ConfigError, match=r"pipeline.chunks=3 is not 2, the only chunk count of a V"):
        auto(3, 4, 3, placement="v")


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2, 3, 5])
def test_the_lowest_limit_still_has_a_table_and_a_lower_one_is_refused(pp: int, chunks: int) -> None:
    for m in (1, 2, 7):
        for placement in ("loop", "v") if chunks == 2 else ("loop",):
            made = auto(pp, m, chunks, limit=chunks, placement=placement)
            assert check(made, pp=pp, microbatches=m) == []
            assert max(simulate(made).peak) == chunks
    with pytest.raises(ConfigError) as error:
        auto(pp, 4, chunks, limit=chunks - 0.5)
    (text,) = error.value.problems
    begin = f"pipeline.memory_limit={chunks - 0.5:g} is below {chunks}, the activations that a rank holds"
    assert text == f"{begin} for one microbatch (pipeline.chunks={chunks}). Use {chunks} or more."
