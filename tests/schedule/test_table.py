"""Tables of one stage."""

from __future__ import annotations

import pytest

from fivefold.schedule.streams import one_f_one_b
from fivefold.schedule.table import Action, last_backwards


@pytest.mark.parametrize("n", [1, 2, 5])
def test_accumulation_runs_each_microbatch_forward_then_backward(n: int) -> None:
    (order,) = one_f_one_b(1, n)
    assert order == [Action(kind, 0, m) for m in range(n) for kind in ("F", "B")]
    alive = most = 0
    for action in order:
        alive += 1 if action.kind == "F" else -1
        most = max(most, alive)
    assert (alive, most) == (0, 1)


@pytest.mark.parametrize("n", [1, 3])
def test_last_backward_completes_the_stage(n: int) -> None:
    assert last_backwards(one_f_one_b(1, n)[0]) == {Action("B", 0, n - 1)}


def test_last_backward_of_each_stage_and_of_split_backwards() -> None:
    order = [Action("F", 0, 0), Action("I", 1, 0), Action("W", 1, 0), Action("B", 0, 0), Action("I", 1, 1),
             Action("W", 1, 1), Action("B", 0, 1), Action("I", 0, 2)]  # fmt: skip
    assert last_backwards(order) == {Action("W", 1, 1), Action("B", 0, 1)}
    assert last_backwards([]) == set()


def test_prints_kind_stage_and_microbatch() -> None:
    assert [str(a) for a in one_f_one_b(1, 2)[0]] == ["F0.0", "B0.0", "F0.1", "B0.1"]
    assert str(Action("W", 3, 12)) == "W3.12"
