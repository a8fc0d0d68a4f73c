"""The pipeline of a configuration: stages, ranks and table; every mistake in it found before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fivefold.config.errors import ConfigError
from fivefold.config.model import DecoderConfig, ModelConfig
from fivefold.config.overrides import apply, split
from fivefold.config.run import RunConfig
from fivefold.models.decoder import part_names
from fivefold.recipes import RECIPES
from fivefold.schedule import named
from fivefold.schedule.plan import check_run, plan, problems, replanned, warnings
from fivefold.schedule.simulate import simulate
from fivefold.schedule.table import Action, check, owners, split_backwards

TABLES = '''
"""Tables of a user's own."""
from fivefold.schedule.table import Action

def right(pp, microbatches, chunks):
    kinds = ("F", "B")
    return [[(kind, rank, m) for kind in kinds for m in range(microbatches)] for rank in range(pp)]

def more_stages(pp, microbatches, chunks):
    return [*right(pp, microbatches, chunks)[:-1], [
        (kind, stage, m) for kind in "FB" for stage in sorted(range(pp - 1, 7), reverse=kind == "B")
        for m in range(microbatches)]]

def repeats(pp, microbatches, chunks):
    table = right(pp, microbatches, chunks)
    table[0].insert(1, Action("F", 0, 0))
    return table

def omits(pp, microbatches, chunks):
    table = right(pp, microbatches, chunks)
    table[1].pop(0)
    return table

def deadlocks(pp, microbatches, chunks):
    table = right(pp, microbatches, chunks)
    table[0] = [(kind, 0, m) for m in range(microbatches) for kind in "FB"]
    return table

def repeats_and_omits(pp, microbatches, chunks):
    return [repeats(pp, microbatches, chunks)[0], omits(pp, microbatches, chunks)[1]]

def raises(pp, microbatches, chunks):
    raise KeyError("no such thing")

def text(pp, microbatches, chunks):
    return "F0.0 B0.0"

def takes_two(pp, microbatches):
    return right(pp, microbatches, 1)
'''


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    path = tmp_path / "tables.py"
    path.write_text(TABLES)
    return path


def configured(line: str, recipe: str = "dense_tiny") -> RunConfig:
    layout, *words = line.split()
    rest, given = split(words)
    config, wrong = apply(RECIPES[recipe](), given | {"parallel": layout})
    assert (rest, wrong) == ([], [])
    return config


def own(costs: object, line: str = "pp2") -> RunConfig:
    """A run of a model that says ``costs`` of its parts."""

    class Own(ModelConfig):
        def part_costs(self, sequence_length: int) -> Any:
            if isinstance(costs, Exception):
                raise costs
            return costs

    return configured(line).model_copy(update={"model": Own(builder="m:f", vocab_size=37)})


# ---- what is planned ------------------------------------------------------------------------------------------------


def test_one_stage_takes_all_parts_whatever_they_are_called() -> None:
    for config in (configured("fsdp2 --train.microbatches 4"), own(None, "fsdp2 --train.microbatches 4")):
        made = plan(config)
        assert (made.owners, made.parts, made.names(0), made.stages(0)) == ((0,), None, None, (0,))
        assert made.table == [[Action(kind, 0, m) for m in range(4) for kind in ("F", "B")]]
        assert problems(config) == []
        assert warnings(config) == []


def test_stages_are_balanced_by_cost() -> None:
    made = plan(configured("pp2 --train.microbatches 4"))
    assert made.owners == (0, 1)
    assert made.parts == (("embed", "layers.0", "layers.1"), ("layers.2", "layers.3", "head"))
    assert made.table == named.build("1f1b", 2, 4)
    assert made.names(1) == ("layers.2", "layers.3", "head")
    heavy = plan(configured("pp2 --train.microbatches 4 --model.vocab-size 4000"))
    assert heavy.parts == (("embed", "layers.0", "layers.1", "layers.2", "layers.3"), ("head",))


def test_counts_that_are_given() -> None:
    made = plan(configured("pp4 --train.microbatches 4 --pipeline.stages 2,1,1,2"))
    assert made.parts == (("embed", "layers.0"), ("layers.1",), ("layers.2",), ("layers.3", "head"))


def test_several_stages_on_a_rank() -> None:
    made = plan(configured("pp2 --train.microbatches 4 --pipeline.chunks 2"))
    assert made.owners == (0, 1, 0, 1)
    assert made.table == named.build("interleaved_split", 2, 4, 2)
    made = plan(configured("pp2 --train.microbatches 4 --pipeline.schedule zb_v"))
    assert made.owners == (0, 1, 1, 0)
    assert made.stages(0) == (0, 3)
    assert made.parts is not None
    assert made.names(0) == (*made.parts[0], *made.parts[3])
    made = plan(configured("single --train.microbatches 2 --pipeline.chunks 3"))
    assert made.owners == (0, 0, 0)
    assert made.parts is not None
    assert [name for stage in made.parts for name in stage] == list(made.names(0) or ())


@pytest.mark.parametrize("pp", range(1, 9))
def test_every_part_is_in_one_stage(pp: int) -> None:
    for n_layers in (1, 2, 5, 14):
        for chunks in range(1, 5):
            line = f"pp{pp} --pipeline.chunks {chunks} --model.n-layers {n_layers} --train.microbatches {pp}"
            config = configured(line.replace("pp1 ", "single ", 1))
            assert isinstance(config.model, DecoderConfig)
            names = part_names(config.model)
            if pp * chunks > len(names):
                (problem,) = problems(config)
                assert f"={pp * chunks} stages are more than the model's {len(names)} parts" in problem
                continue
            made = plan(config)
            assert check(made.table, pp=pp, microbatches=pp) == []
            stages = made.parts or (names,)
            assert [name for stage in stages for name in stage] == names
            assert len(stages) == pp * chunks == len(made.owners)
            assert sorted(s for rank in range(pp) for s in made.stages(rank)) == list(range(pp * chunks))


@pytest.mark.parametrize(("more", "begins"), [("", "zb_h1"), ("--pipeline.chunks 2", "interleaved_split")])
def test_auto_measures_first_and_keeps_the_stages_where_they_are(more: str, begins: str) -> None:
    config = configured(f"pp2 --train.microbatches 6 --pipeline.schedule auto {more}")
    made = plan(config)
    assert made.table == named.build(begins, 2, 6, 2 if more else None)
    assert split_backwards(made.table)
    slow = {"F": 1.0, "B": 2.5, "I": 1.5, "W": 1.0}
    table = replanned(config, slow, 0.1)
    assert check(table, pp=2, microbatches=6) == []
    assert tuple(owners(table)) == made.owners
    assert simulate(table, slow, 0.1).makespan <= simulate(made.table, slow, 0.1).makespan


def test_what_auto_measures_on_keeps_the_memory_limit() -> None:
    table = plan(configured("pp4 --train.microbatches 8 --pipeline.schedule auto --pipeline.memory-limit 2")).table
    assert check(table, pp=4, microbatches=8) == []
    assert max(simulate(table).peak) == 2
    assert {a.kind for order in table for a in order} == set("FIW")


def test_auto_with_costs_plans_at_once() -> None:
    config = configured("pp4 --train.microbatches 8 --pipeline.schedule auto --pipeline.costs F=1,I=1,W=1,comm=0.1")
    table = plan(config).table
    assert check(table, pp=4, microbatches=8) == []
    assert simulate(table, comm=0.1).makespan <= simulate(named.build("1f1b", 4, 8), comm=0.1).makespan
    tight = configured("pp4 --train.microbatches 8 --pipeline.schedule auto --pipeline.memory-limit 4")
    tight = tight.model_copy(update={"pipeline": tight.pipeline.model_copy(update={"costs": "F=1,I=1,W=1"})})
    assert max(simulate(plan(tight).table).peak) <= 4


def test_a_table_of_ones_own(tables: Path) -> None:
    made = plan(configured(f"pp2 --train.microbatches 3 --pipeline.schedule {tables}:right"))
    assert made.table == named.build("gpipe", 2, 3)
    made = plan(configured(f"pp2 --train.microbatches 2 --pipeline.schedule {tables}:more_stages --model.n-layers 5"))
    assert made.owners == (0, *(1,) * 6)
    assert made.parts is not None
    assert [name for stage in made.parts for name in stage][-1] == "head"


def test_fewer_microbatches_than_ranks_are_told() -> None:
    (text,) = warnings(configured("pp4 --train.microbatches 2"))
    assert "2" in text and "pp=4" in text and "bubble" in text and "%" in text
    assert warnings(configured("pp4 --train.microbatches 4")) == []


def test_a_run_that_ends_before_auto_has_measured_is_told() -> None:
    line = "pp2 --train.microbatches 2 --pipeline.schedule auto --optim.warmup-steps 0 --train.steps"
    (text,) = warnings(configured(f"{line} 3"))
    assert "has measured its costs (3 steps): the run keeps zb_h1" in text
    assert warnings(configured(f"{line} 4")) == warnings(configured(f"{line} 3 --pipeline.costs F=1")) == []


def test_a_batch_that_is_not_cut_evenly_makes_no_table() -> None:
    found = check_run(configured(f"pp2 --train.microbatches {10**12}"))
    assert len(found) == 1 and "is not a multiple of train.microbatches" in found[0]


def test_a_table_too_large_to_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="is too large to plan"):
        named.build("zb_v", 1000, 10**6)


def test_a_model_of_ones_own_is_cut_by_its_costs() -> None:
    made = plan(own({"a": 1, "b": 1, "c": 2.0}))
    assert made.parts == (("a", "b"), ("c",))


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pp8", ["pp=8 stages are more than the model's 6 parts (embed, layers.0, ..., head)", "pp from 1 to 6, or"]),
        (
            "pp4 --pipeline.chunks 2",
            [
                "pp*chunks=8 stages are more than the model's 6 parts (embed, layers.0, ..., head; pp=4, chunks=2, "
                "schedule interleaved_split). Use pp from 1 to 3 with pipeline.chunks=2, or one chunk with pp=4, or"
            ],
        ),
        ("single --pipeline.chunks 7", ["pp*chunks=7 stages", "pipeline.chunks from 1 to 6 with pp=1"]),
        ("pp4 --pipeline.schedule zb_v", ["pp*chunks=8 stages", "pp from 1 to 3"]),
        ("pp1024 --pipeline.chunks 1024", ["pp*chunks=1048576 stages"]),
        ("pp2 --pipeline.schedule zb_h3", ["pipeline.schedule=zb_h3 is not a schedule. Did you mean zb_h"]),
        ("pp2 --pipeline.schedule 1f1b --pipeline.chunks 2", ["pipeline.chunks=2", "1f1b"]),
        ("pp2 --pipeline.schedule zb_v --pipeline.chunks 3", ["pipeline.chunks=3", "zb_v"]),
        ("pp2 --pipeline.stages 3,2,1", ["pipeline.stages=3,2,1 counts 3 stages, not the 2 of pp=2", "such as 3,3"]),
        (
            "pp2 --pipeline.stages 2,2,1,1 --pipeline.schedule gpipe",
            ["not the 2 of pp=2. Use 2 numbers that add up to 6"],
        ),
        (
            "pp2 --pipeline.stages 3,3 --pipeline.schedule zb_v",
            ["not the 4 of pp*chunks=4 (pp=2, chunks=2, schedule zb_v)"],
        ),
        ("pp2 --pipeline.stages 3,4", ["pipeline.stages=3,4 adds up to 7 parts, but the model has 6", "such as 3,3"]),
        ("single --pipeline.stages 5", ["pipeline.stages=5 adds up to 5 parts"]),
        ("single --pipeline.stages 3,3", ["counts 2 stages, not the 1 of pp=1"]),
        ("pp2 --pipeline.costs F=1", ["pipeline.costs=F=1 has no effect", "(pipeline.schedule=1f1b)", "schedule=auto"]),
        ("pp2 --pipeline.schedule zb_v --pipeline.memory-limit 6", ["pipeline.memory_limit=6 has no effect", "zb_v"]),
        ("pp2 --pipeline.schedule auto --pipeline.costs F=x", ["pipeline.costs=F=x", "Use 0, or a number from"]),
        ("pp2 --pipeline.schedule auto --pipeline.costs G=1", ["pipeline.costs=G=1", "F, B, I, W, comm"]),
        ("pp2 --pipeline.schedule auto --pipeline.costs F=0", ["pipeline.costs=F=0", "above 0"]),
        (
            "pp2 --pipeline.schedule auto --pipeline.chunks 2 --pipeline.memory-limit 1.5",
            ["pipeline.memory_limit=1.5 is below 2"],
        ),
    ],
)
def test_messages(line: str, words: list[str]) -> None:
    found = problems(configured(f"{line} --train.microbatches 8"))
    assert len(found) == 1, found
    assert all(word in found[0] for word in words), found
    with pytest.raises(ConfigError) as error:
        plan(configured(f"{line} --train.microbatches 8"))
    assert error.value.problems == tuple(found)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("repeats", ["F0.0 runs 2 times on rank 0"]),
        ("omits", ["Rank 1 never runs F1.0"]),
        ("deadlocks", ["rank 0 waits at B0.0 for B1.0; rank 1 waits at F1.1 for F0.1"]),
        ("raises", ["KeyError", "no such thing"]),
        ("text", ["'F0.0 B0.0' is not a table"]),
        ("takes_two", ["TypeError"]),
        ("write", ["has no write", "Did you mean", ":right?"]),
    ],
)
def test_tables_of_ones_own_that_are_wrong(tables: Path, function: str, words: list[str]) -> None:
    found = problems(configured(f"pp2 --train.microbatches 3 --pipeline.schedule {tables}:{function}"))
    text = "\n".join(found)
    assert all(word in text for word in words), found
    assert all(f"pipeline.schedule={tables}:{function}" in problem for problem in found)


def test_everything_wrong_with_a_table_is_told(tables: Path) -> None:
    found = problems(configured(f"pp2 --train.microbatches 3 --pipeline.schedule {tables}:repeats_and_omits"))
    assert len(found) == 2, found


def test_a_table_of_more_stages_than_parts(tables: Path) -> None:
    (problem,) = problems(configured(f"pp2 --pipeline.schedule {tables}:more_stages"))
    assert f"pipeline.schedule={tables}:more_stages makes 7 stages, more than the model's 6 parts" in problem


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (None, ["pp=2 cuts the model, but Own does not say what its parts are. Define part_costs(sequence_length)"]),
        ({}, ["Own.part_costs returns {}. Return every part's name"]),
        (["a", "b"], ["Own.part_costs returns ['a', 'b']"]),
        ({"a": 1.0, "b": -1.0}, ["Own.part_costs returns 'b': -1.0"]),
        ({"a": 1.0, 2: 1.0, "b": float("nan")}, ["Own.part_costs returns 2: 1.0", "Own.part_costs returns 'b': nan"]),
        (ZeroDivisionError("division by zero"), ["Own.part_costs fails: ZeroDivisionError: division by zero"]),
    ],
)
def test_a_model_that_cannot_be_cut(costs: object, words: list[str]) -> None:
    found = problems(own(costs))
    assert len(found) == len(words), found
    assert all(word in problem for word, problem in zip(words, found, strict=True)), found


def test_counts_for_a_model_that_does_not_name_its_parts() -> None:
    (problem,) = problems(own(None, "single --pipeline.stages 3"))
    assert problem.startswith("pipeline.stages=3 counts parts, but Own does not say what its parts are")


def test_a_whole_run() -> None:
    config = configured("pp2-fsdp* --train.microbatches 3 --pipeline.stages 2,2 --optim.warmup-steps 30")
    found = check_run(config, world=4)
    assert len(found) == 3, found
    for key in ("data.batch_size=8", "pipeline.stages=2,2", "optim.warmup_steps=30"):
        assert sum(problem.startswith(key) for problem in found) == 1
    assert any(problem.startswith("parallel=") for problem in check_run(config, world=3))
    assert check_run(configured("pp2-fsdp* --train.microbatches 2"), world=4) == []


def test_a_layout_that_does_not_parse_hides_no_setting() -> None:
    found = check_run(configured("pq2 --pipeline.costs F=1 --pipeline.memory-limit 3"))
    assert len(found) == 3, found
