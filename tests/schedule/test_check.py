"""What is wrong with a table is said in words that name rank, stage, microbatch and action; a right one passes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fivefold.schedule.named import build
from fivefold.schedule.table import Action, Table, check, needs, owners, play, read, split_backwards


def table(text: str) -> Table:
    """A table from its ranks' actions, as ``F0.0 B0.0 / F1.0 B1.0``."""
    return [[action(word) for word in rank.split()] for rank in text.split("/")]


def action(word: str) -> Action:
    kind, stage, m = re.fullmatch(r"(.)(-?\d+)\.(-?\d+)", word).groups()
    return Action(kind, int(stage), int(m))


GOOD = "F0.0 F0.1 B0.0 B0.1 / F1.0 B1.0 F1.1 I1.1 W1.1"
RUN_ALL = "Run every microbatch of stage"
PLANTED = {
    "a rank too few": (
        "F0.0 F0.1 B0.0 B0.1",
        ["The table has 1 ranks, not pp=2. Give one list of actions for each rank."],
    ),
    "a rank too many": (f"{GOOD} / F2.0", ["The table has 3 ranks, not pp=2."]),
    "an empty rank": ("F0.0 B0.0 F0.1 B0.1 /", ["Rank 1 has no action. Give each rank at least one stage."]),
    "an unknown kind": (GOOD.replace("I", "X"), ["X1.1 on rank 1 is of an unknown kind. Use F, B, I or W."]),
    "a negative stage": ("F-1.0 " + GOOD, ["F-1.0 on rank 0 is on a negative stage. Number the stages from 0."]),
    "a negative microbatch": (
        GOOD.replace("F0.0", "F0.-1 F0.0"),
        ["F0.-1 on rank 0 is of no microbatch of microbatches=2. Use 0 to 1."],
    ),
    "microbatches beyond the last": (
        GOOD.replace("F0.1", "F0.1 F0.2 F0.3"),
        ["F0.2, F0.3 on rank 0 are of no microbatch of microbatches=2."],
    ),
    "a stage on two ranks": (
        GOOD.replace("B0.1 /", "/ B0.1"),
        ["Stage 0 is on rank 0 (F0.0) and rank 1 (B0.1). Keep each stage on one rank."],
    ),
    "a missing stage": (
        GOOD.replace("1.", "3."),
        ["Stages 1, 2 are missing (the last stage is 3). Number the stages from 0 without a gap."],
    ),
    "the first stage missing": (GOOD.replace("1.", "2.").replace("0.", "1."), ["Stage 0 is missing"]),
    "a repeated action": (GOOD.replace("F0.1", "F0.1 F0.1"), ["F0.1 runs 2 times on rank 0. Run it once."]),
    "stages that are far apart": (
        GOOD.replace("1.", "1000000000."),
        ["Stages 1, 2, 3, 4, 5, 6, 7, 8 and 999999991 more are missing (the last stage is 1000000000)."],
    ),
    "repeated actions": (
        GOOD.replace("F0.1", "F0.0 F0.1 F0.1"),
        ["F0.0, F0.1 run more than once on rank 0. Run each of them once."],
    ),
    "whole and half backwards": (
        GOOD.replace("W1.1", "W1.1 W1.0 B1.1"),
        ["Rank 1 runs both B1.0 and W1.0, both B1.1 and I1.1 and W1.1. Keep either the B"],
    ),
    "an omitted forward": (GOOD.replace("F1.0 ", ""), [f"Rank 1 never runs F1.0. {RUN_ALL} 1."]),
    "an omitted backward": (GOOD.replace("B0.0", ""), [f"Rank 0 never runs B0.0 (or I0.0 and W0.0). {RUN_ALL} 0."]),
    "an omitted weight gradient": (GOOD.replace("W1.1", ""), [f"Rank 1 never runs W1.1. {RUN_ALL} 1."]),
    "an omitted input gradient": (GOOD.replace("I1.1", ""), [f"Rank 1 never runs I1.1. {RUN_ALL} 1."]),
    "a whole and a half backward": (
        GOOD.replace("I1.1", "B1.1"),
        ["Rank 1 runs both B1.1 and W1.1. Keep either the B, or the I and the W."],
    ),
    "a whole and both halves": (GOOD.replace("I1.1", "B1.1 I1.1"), ["Rank 1 runs both B1.1 and I1.1 and W1.1."]),
    "forwards that descend": (
        GOOD.replace("F0.0 F0.1", "F0.1 F0.0"),
        ["F0.0 runs after F0.1 on rank 0. Run the forwards of a stage in ascending microbatches."],
    ),
    "backwards that descend": (GOOD.replace("B0.0 B0.1", "B0.1 B0.0"), ["B0.0 runs after B0.1 on rank 0."]),
    "weight gradients that descend": (
        "F0.0 F0.1 I0.0 I0.1 W0.1 W0.0 / F1.0 B1.0 F1.1 B1.1",
        ["W0.0 runs after W0.1 on rank 0. Run the weight gradients of a stage in ascending microbatches."],
    ),
    "weight gradients that descend over kinds": (
        "F0.0 F0.1 I0.0 B0.1 W0.0 / F1.0 B1.0 F1.1 B1.1",
        ["W0.0 runs after B0.1 on rank 0. Run the weight gradients"],
    ),
    "a W before its I": (GOOD.replace("I1.1 W1.1", "W1.1 I1.1"), ["W1.1 runs before I1.1 on rank 1. Run it later."]),
    "a backward before its forward": (
        GOOD.replace("F1.1 I1.1", "I1.1 F1.1"),
        ["I1.1 runs before F1.1 on rank 1. Run it later."],
    ),
    "a deadlock": (
        GOOD.replace("F0.1 B0.0", "B0.0 F0.1").replace("B1.0 F1.1", "F1.1 B1.0"),
        ["The table deadlocks: rank 0 waits at B0.0 for B1.0; rank 1 waits at F1.1 for F0.1. Reorder these actions."],
    ),
    "two faults": (
        GOOD.replace("F0.1", "F0.1 F0.1").replace("W1.1", ""),
        ["F0.1 runs 2 times on rank 0.", "Rank 1 never runs W1.1."],
    ),
}  # fmt: skip


def test_a_good_table_passes() -> None:
    assert check(table(GOOD), pp=2, microbatches=2) == []


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named_and_nothing_else(fault: str) -> None:
    text, expected = PLANTED[fault]
    found = check(table(text), pp=2, microbatches=2)
    assert len(found) == len(expected), found
    for message, words in zip(found, expected):
        assert message.startswith(words)
        assert message.endswith(".")


def test_a_table_for_other_sizes_is_told_shortly() -> None:
    (text,) = check(build("gpipe", 2, 30), pp=2, microbatches=20)[:1]
    assert text.startswith("F0.20, F0.21, F0.22, F0.23, F0.24, F0.25, F0.26, F0.27 and 12 more on rank 0 are of no")
    found = check(build("gpipe", 2, 20), pp=2, microbatches=30)
    assert len(found) == 2
    assert "Rank 0 never runs F0.20, B0.20 (or I0.20 and W0.20), F0.21" in found[0]
    assert "and 12 more" in found[0]


def test_every_transposition_of_neighbours_that_is_not_legal_is_found() -> None:
    """A swap of two neighbours either is refused, or leaves a table that plays to its end."""
    good = build("zb_v", 2, 3)
    verdicts = set()
    for rank, order in enumerate(good):
        for i in range(len(order) - 1):
            changed = [list(entry) for entry in good]
            changed[rank][i : i + 2] = reversed(changed[rank][i : i + 2])
            legal = check(changed, pp=2, microbatches=3) == []
            verdicts.add(legal)
            first, second = order[i : i + 2]
            alike = first.kind == second.kind or first.microbatch == second.microbatch
            ordered = first.stage == second.stage and alike
            assert legal == (not play(changed)[1] and not ordered), (first, second)
    assert verdicts == {True, False}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None is not a table. Return one list of Action(kind, stage, microbatch) for each rank."),
        (7, "7 is not a table."),
        ("F0.0", "'F0.0' is not a table."),
        ({0: []}, "{0: []} is not a table."),
        ([None], "None is not the list of actions of rank 0."),
        ([Action("F", 0, 0)], "F0.0 is not the list of actions of rank 0."),
        ([{("F", 0, 0)}], "{('F', 0, 0)} is not the list of actions of rank 0."),
        ([["F0.0", "B0.0"]], "'F0.0', 'B0.0' on rank 0 are not actions. Use Action(kind, stage, microbatch)."),
        ([[("F", 0)]], "('F', 0) on rank 0 is not an action."),
        ([[("F", 0.0, 0)]], "('F', 0.0, 0) on rank 0 is not an action."),
        ([[("F", True, 0)]], "('F', True, 0) on rank 0 is not an action."),
        ([[(0, 0, "F")]], "(0, 0, 'F') on rank 0 is not an action."),
        ([["x" * 100]], f"'{'x' * 56}... on rank 0 is not an action."),
        ([[None] * 20], "None, None, None, None, None, None, None, None and 12 more on rank 0 are not actions."),
    ],
)
def test_what_is_no_table_is_told(value: object, words: str) -> None:
    made, (text,) = read(value)
    assert made == []
    assert text.startswith(words)


def test_plain_triples_and_any_iterables_make_a_table() -> None:
    expected = [[Action("F", 0, 0), Action("B", 0, 0)]]
    assert read(([("F", 0, 0), ["B", 0, 0]],)) == (expected, [])
    assert read([(entry for entry in expected[0])]) == (expected, [])
    assert read([[(kind, np.int64(0), np.int32(0)) for kind in "FB"]]) == (expected, [])
    assert all(isinstance(entry, Action) for entry in read([[("F", 0, 0)]])[0][0])


def test_owners_are_read_off_the_table() -> None:
    assert owners(table("F0.0 F3.0 / F1.0 F2.0")) == [0, 1, 1, 0]
    for text, words in (("F0.0 / F0.0", "Stage 0 is on rank 0"), ("F0.0 / F2.0", "Stage 1 is missing")):
        with pytest.raises(ValueError, match=words):
            owners(table(text))


def test_needs() -> None:
    split = split_backwards(table(GOOD))
    assert split == {(1, 1)}
    expected = {"F0.1": "", "F1.1": "F0.1", "B1.0": "F1.0", "I1.1": "F1.1", "W1.1": "I1.1", "B0.0": "F0.0 B1.0",
                "B0.1": "F0.1 I1.1"}  # fmt: skip
    assert {word: " ".join(map(str, needs(action(word), 2, split))) for word in expected} == expected


def test_play_runs_everything_after_what_it_needs() -> None:
    for name in ("1f1b", "zb_v", "interleaved"):
        made = build(name, 3, 5)
        steps, waits = play(made)
        assert waits == []
        done: set[Action] = set()
        at = [0, 0, 0]
        for step in steps:
            assert done.issuperset(step.needs)
            assert made[step.rank][at[step.rank]] == step.action
            at[step.rank] += 1
            done.add(step.action)
        assert at == [len(order) for order in made]
