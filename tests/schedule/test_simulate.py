"""Times and memory of tables small enough to work out by hand; and the prices in text."""

from __future__ import annotations

import pytest

from fivefold.config.errors import ConfigError
from fivefold.schedule.cost import UNIT, price, read
from fivefold.schedule.named import build
from fivefold.schedule.simulate import simulate
from fivefold.schedule.streams import one_f_one_b
from fivefold.schedule.table import Action
from tests.schedule.test_check import table


def test_1f1b_on_two_ranks_by_hand() -> None:
    timeline = simulate(build("1f1b", 2, 2))
    starts = {str(a): t for a, t in timeline.start.items()}
    assert starts == {"F0.0": 0, "F0.1": 1, "F1.0": 1, "B1.0": 2, "F1.1": 4, "B0.0": 4, "B1.1": 5, "B0.1": 7}
    assert all(timeline.end[a] == t + UNIT[a.kind] for a, t in timeline.start.items())
    assert (timeline.makespan, timeline.span, timeline.busy) == (9, 9, 6)
    assert timeline.bubble == timeline.span_bubble == pytest.approx(1 / 3)
    assert timeline.peak == (2, 1)
    assert timeline.deferred == (0, 0)


def test_a_message_takes_time_but_no_rank() -> None:
    timeline = simulate(build("1f1b", 2, 2), comm=0.5)
    assert timeline.start[Action("F", 1, 0)] == 1.5
    assert timeline.start[Action("B", 0, 0)] == 5
    assert timeline.makespan == 10  # two crossings in the critical path
    v = build("zb_v", 2, 2)
    assert simulate(v, comm=0.5).start[Action("F", 2, 0)] == simulate(v, comm=0.5).end[Action("F", 1, 0)]


def test_the_span_is_the_longest_of_one_rank() -> None:
    timeline = simulate(table("F0.0 I0.0 W0.0 / F1.0 I1.0 W1.0"))
    assert (timeline.makespan, timeline.span) == (5, 5)
    timeline = simulate(table("F0.0 B0.0 / F1.0 I1.0 W1.0"), {"F": 1, "B": 2, "I": 1, "W": 5})
    assert (timeline.makespan, timeline.span, timeline.busy) == (8, 7, 7)
    assert timeline.span_bubble == 0
    assert timeline.bubble == pytest.approx(1 / 8)


def test_memory_of_what_waits() -> None:
    made = table("F0.0 F0.1 I0.0 F0.2 I0.1 I0.2 W0.0 W0.1 W0.2")
    assert simulate(made).peak == (3,)
    assert simulate(made).deferred == (2,)  # W0.0 and W0.1 while I0.2 runs
    timeline = simulate(made, weight_memory=0.25)
    assert timeline.peak == (2.25,)
    assert timeline.deferred == (0.5,)
    assert simulate(table("F0.0 I0.0 W0.0 F0.1 I0.1 W0.1")).deferred == (0,)
    assert simulate(table("F0.0 I0.0 W0.0"), weight_memory=1.5).peak == (1.5,)


def test_costs_by_action() -> None:
    def slow_last(action: Action) -> float:
        return UNIT[action.kind] * (2 if action.stage == 1 else 1)

    timeline = simulate(build("gpipe", 2, 3), slow_last)
    assert timeline.busy == 18
    assert timeline.makespan == 1 + 18 + 2
    assert simulate(one_f_one_b(1, 4), lambda action: 0.0).bubble == 0


def test_a_deadlock_names_what_each_rank_waits_for() -> None:
    broken = table("F0.0 B0.0 F0.1 B0.1 / F1.0 F1.1 B1.0 B1.1")
    with pytest.raises(ValueError, match=r"rank 0 waits at B0\.0 for B1\.0; rank 1 waits at F1\.1 for F0\.1"):
        simulate(broken)


def test_a_missing_backward_price_is_the_sum_of_its_halves() -> None:
    assert price({"F": 1, "I": 2, "W": 3})(Action("B", 0, 0)) == 5
    assert price({"F": 1, "B": 4, "I": 2, "W": 3})(Action("B", 0, 0)) == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ({"F": 1, "I": 1, "W": 1, "B": 2}, 0)),
        ("F=2", ({"F": 2, "I": 1, "W": 1, "B": 2}, 0)),
        ("F=1, I=1.5 ,W=0,comm=0.1", ({"F": 1, "I": 1.5, "W": 0, "B": 1.5}, 0.1)),
        ("W=1e-3,B=3", ({"F": 1, "I": 1, "W": 0.001, "B": 3}, 0)),
    ],
)
def test_prices_in_text(text: str, expected: tuple[dict[str, float], float]) -> None:
    assert read(text, "cost") == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("X=1", ["cost=X=1 has X=1. Use NAME=NUMBER with a name in [F, B, I, W, comm], as F=1,I=1,W=1."]),
        ("F", ["has F. Use NAME=NUMBER"]),
        ("F=1,F=2", ["gives F twice. Give it once."]),
        ("F=a", ["has F=a. Use 0, or a number from 1e-30 to 1e+30, as F=1."]),
        ("F=1e-320,I=1e308,comm=-1", ["has F=1e-320. Use 0", "has I=1e308. Use 0", "has comm=-1. Use 0"]),
        ("F=-1,I=nan,comm=inf", ["has F=-1", "has I=nan", "has comm=inf"]),
        ("F=0", ["makes an action free. Use F, B and I above 0."]),
    ],
)
def test_wrong_prices_are_told_all_at_once(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read(text, "cost")
    assert len(error.value.problems) == len(words)
    assert all(word in problem for word, problem in zip(words, error.value.problems))
