"""Schedules by name and by function: what they are, and what a wrong name, count or function is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.config.errors import ConfigError
from fivefold.schedule.named import NAMES, SCHEDULES, build, problems_of, warnings
from fivefold.schedule.simulate import simulate
from fivefold.schedule.table import check, owners, split_backwards


def problem(*args: object, **options: object) -> str:
    with pytest.raises(ConfigError) as error:
        build(*args, **options)  # pyright: ignore
    (text,) = error.value.problems
    return text


@pytest.mark.parametrize("name", NAMES)
def test_every_name_makes_what_it_says(name: str) -> None:
    schedule = SCHEDULES[name]
    for pp, m in ((1, 1), (3, 2), (3, 7)):
        table = build(name, pp, m)
        assert check(table, pp=pp, microbatches=m) == []
        assert len(owners(table)) == pp * schedule.chunks
        assert bool(split_backwards(table)) <= schedule.splits
        if pp == 3:
            assert bool(split_backwards(table)) == schedule.splits
        assert table == build(name, pp, m, schedule.chunks)
    for chunks in (1, 2, 3, 5):
        if schedule.any_chunks:
            assert len(owners(build(name, 2, 3, chunks))) == 2 * chunks
        elif chunks != schedule.chunks:
            assert f"pipeline.chunks={chunks} is not {schedule.chunks}" in problem(name, 2, 3, chunks)


def test_names_are_the_documented_ones() -> None:
    expected = "gpipe 1f1b interleaved interleaved_split looped_bfs zb_h1 zb_h2 zb_v dualpipe_v auto"
    assert expected.split() == list(NAMES)
    assert all(schedule.summary and not schedule.summary.endswith(".") for schedule in SCHEDULES.values())


def test_wrong_names_and_counts_are_told_the_nearest() -> None:
    names = f"[{', '.join(NAMES)}]"
    assert problem("zb_h3", 2, 2) == (
        f"pipeline.schedule=zb_h3 is not a schedule. Did you mean zb_h2? Use one of {names}, or path/file.py:function."
    )
    assert "Did you mean" not in problem("q", 2, 2)
    assert problem("zb_v", 2, 2, 1) == (
        "pipeline.chunks=1 is not 2, the only chunk count of pipeline.schedule=zb_v. Use pipeline.chunks=2, "
        "or pipeline.schedule in [interleaved, interleaved_split, looped_bfs, auto]."
    )
    assert problem("auto", 2, 2, 0) == (
        "pipeline.chunks=0 is not a number of stages (pipeline.schedule=auto). Use 1 or more."
    )
    assert problem("1f1b", 2, 2, 3, key="schedule", chunks_key="chunks").startswith("chunks=3 is not 1")
    assert problems_of("1f1b", 1) == problems_of("mine.py:table", 7) == []


def test_few_microbatches_are_warned_about_with_their_bubble() -> None:
    for name in NAMES:
        for m in (1, 2, 3):
            (text,) = warnings(name, 4, m)
            bubble = simulate(build(name, 4, m)).bubble
            assert text == (
                f"train.microbatches={m} is below pp=4: a bubble of {bubble:.1%} at unit costs. "
                "Use train.microbatches=4 or more to shrink it."
            )
        assert warnings(name, 4, 4) == []
    assert warnings("gpipe", 4, 2) == warnings(build("gpipe", 4, 2), 4, 2)
    assert "60.0%" in warnings("gpipe", 4, 2)[0]


OWN = """
from fivefold.schedule.streams import gpipe
from fivefold.schedule.table import Action

def good(pp, microbatches, chunks):
    assert chunks in (1, 3)
    return gpipe(pp, microbatches)

def triples(pp, microbatches, chunks):
    return tuple(tuple((a.kind, a.stage, a.microbatch) for a in order) for order in gpipe(pp, microbatches))

def raises(pp, microbatches, chunks):
    return {}["no such key"]

def exits(pp, microbatches, chunks):
    raise SystemExit(3)

def two(pp, microbatches):
    return gpipe(pp, microbatches)

def nothing(pp, microbatches, chunks):
    gpipe(pp, microbatches)

def names(pp, microbatches, chunks):
    return [["F0.0"]] * pp

def two_faults(pp, microbatches, chunks):
    first, second = gpipe(pp, microbatches)
    return [[first[0], *first], second[:-1]]

table = 7
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_a_function_of_ones_own(own: str) -> None:
    expected = build("gpipe", 2, 3)
    assert build(f"{own}:good", 2, 3) == build(f"{own}:good", 2, 3, 3) == build(f"{own}:triples", 2, 3) == expected
    assert all(hasattr(action, "kind") for action in build(f"{own}:triples", 2, 3)[0])
    assert "bubble of 50.0%" in warnings(f"{own}:good", 2, 1)[0]


def test_every_problem_of_a_functions_table_is_told(own: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(f"{own}:two_faults", 2, 3)
    given = f"pipeline.schedule={own}:two_faults returns a table that cannot run (pp=2, microbatches=3, chunks=1). "
    assert error.value.problems == (
        f"{given}F0.0 runs 2 times on rank 0. Run it once.",
        f"{given}Rank 1 never runs B1.2 (or I1.2 and W1.2). Run every microbatch of stage 1.",
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", ["raises KeyError: 'no such key' (", "own.py, line 13) when called with (pp=2, microbatches=3"]),
        ("exits", ["raises SystemExit: 3 (", "Correct it."]),
        ("two", ["raises TypeError: two() takes 2 positional arguments but 3 were given"]),
        ("nothing", ["returns a table that cannot run", "None is not a table. Return one list of Action("]),
        ("names", ["'F0.0' on rank 0 is not an action. Use Action(kind, stage, microbatch)."]),
        ("goods", ["is not a function", "Did you mean", "own.py:good?"]),
        ("table", ["is not a function"]),
    ],
)
def test_a_function_that_makes_no_table_is_told(own: str, name: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        build(f"{own}:{name}", 2, 3, key="schedule")
    text = error.value.problems[0]
    assert text.startswith(f"schedule={own}:{name} ")
    assert all(word in text for word in words), text


def test_files_and_modules_that_are_not_there_are_told(tmp_path: Path) -> None:
    assert "names no file" in problem(f"{tmp_path}/none.py:table", 2, 2)
    assert "cannot be imported: ModuleNotFoundError" in problem("no_such_module:table", 2, 2)
