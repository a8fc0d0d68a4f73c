"""Overrides: every form a value may be typed in, and every way it may be wrong, all reported at once."""

from __future__ import annotations

import pytest
from pydantic import PositiveInt

from fivefold.config.model import DecoderConfig, GqaConfig, MlaConfig, ModelConfig, YarnConfig
from fivefold.config.overrides import apply, split
from fivefold.config.run import RunConfig
from fivefold.recipes import RECIPES


def override(recipe: str | RunConfig, line: str) -> tuple[RunConfig, list[str]]:
    rest, given = split(line.split())
    assert rest == []
    return apply(RECIPES[recipe]() if isinstance(recipe, str) else recipe, given)


def legal(recipe: str | RunConfig, line: str) -> RunConfig:
    config, problems = override(recipe, line)
    assert problems == []
    return config


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        ("--train.steps 5", "train.steps", 5),
        ("--train.steps=5", "train.steps", 5),
        ("--optim.warmup-steps 3", "optim.warmup_steps", 3),
        ("--optim.warmup_steps 3", "optim.warmup_steps", 3),
        ("--optim.lr 1e-3", "optim.lr", 1e-3),
        ("--optim.decay 1-sqrt", "optim.decay", "1-sqrt"),
        ("--optim.decay none", "optim.decay", "none"),
        ("--optim.decay-steps 4", "optim.decay_steps", 4),
        ("--optim.decay-steps none", "optim.decay_steps", None),
        ("--optim.betas 0.8,0.9", "optim.betas", (0.8, 0.9)),
        ("--data.files a,b", "data.files", ("a", "b")),
        ("--data.files=one", "data.files", ("one",)),
        ("--data.weights=", "data.weights", ()),
        ("--profile.ranks 0,3", "profile.ranks", (0, 3)),
        ("--train.recompute none", "train.recompute", "none"),
        ("--train.deterministic true", "train.deterministic", True),
        ("--train.deterministic --train.steps 9", "train.deterministic", True),
        ("--train.evaluate false", "train.evaluate", False),
        ("--no-train.evaluate", "train.evaluate", False),
        ("--train.zero 1", "train.zero", 1),
        ("--train.zero auto", "train.zero", "auto"),
        ("--pipeline.schedule zb_v", "pipeline.schedule", "zb_v"),
        ("--pipeline.schedule none", "pipeline.schedule", None),
        ("--pipeline.stages 2,2,1,2", "pipeline.stages", (2, 2, 1, 2)),
        ("--pipeline.stages=", "pipeline.stages", ()),
        ("--pipeline.chunks 2", "pipeline.chunks", 2),
        ("--pipeline.chunks none", "pipeline.chunks", None),
        ("--pipeline.costs F=1,I=1,W=0.5,comm=0.1", "pipeline.costs", "F=1,I=1,W=0.5,comm=0.1"),
        ("--pipeline.memory-limit 12", "pipeline.memory_limit", 12.0),
        ("--train.seed 1 --train.seed 2", "train.seed", 2),
        ("--model.attention.kv-rank 16", "model.attention.kv_rank", 16),
        ("--model.rope.scaling.factor 8", "model.rope.scaling.factor", 8.0),
        ("--model.rope.scaling none", "model.rope.scaling", None),
        ("--model.moe none", "model.moe", None),
        ("--model.moe.bias-off-layers 1,2", "model.moe.bias_off_layers", (1, 2)),
    ],
)
def test_forms(line, path, value):
    found = legal("moe_tiny", line)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_only_what_is_named_changes():
    base = RECIPES["moe_tiny"]()
    config = legal(base, "--model.attention.kv-rank 16")
    assert base.model_dump() == RECIPES["moe_tiny"]().model_dump()
    dumped = config.model_dump()
    dumped["model"]["attention"]["kv_rank"] = 8
    assert dumped == base.model_dump()
    assert type(config.model) is DecoderConfig


def test_a_new_kind_keeps_what_both_have():
    config = legal(
        "dense_tiny",
        "--model.attention.v-dim 4 --model.attention.kv-rank 8 --model.attention.kind mla "
        "--model.attention.nope-dim 4 --model.attention.rope-dim 2",
    )
    assert config.model.attention == MlaConfig(n_heads=8, kv_rank=8, nope_dim=4, rope_dim=2, v_dim=4)
    config = legal(config, "--model.attention.kind gqa --model.attention.n-kv-heads 2 --model.attention.head-dim 4")
    assert config.model.attention == GqaConfig(n_heads=8, n_kv_heads=2, head_dim=4)


def test_a_part_that_was_none():
    config = legal("dense_tiny", "--model.rope.scaling none")
    config = legal(config, "--model.rope.scaling.factor 4 --model.rope.scaling.kind yarn")
    assert config.model.rope.scaling == YarnConfig(factor=4)
    config = legal("dense_tiny", "--model.moe.n-experts 4 --model.moe.top-k 1 --model.moe.expert-dim 8")
    assert config.model.moe.n_experts == 4


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--train.stepz 5", ["train.stepz=5 is not a field", "Did you mean train.steps?"]),
        ("--optm.lr 1", ["optm.lr=1", "Did you mean optim.lr?"]),
        ("--model.kv-rank 4", ["Did you mean model.attention.kv_rank?"]),
        ("--foo.bar 1", ["foo.bar=1", "Use one of model, data, optim"]),
        ("--comm.x 1", ["comm.x=1", "comm.init_timeout_s, comm.step_timeout_s"]),
        ("--train.steps abc", ["train.steps=abc is not a whole number. Use a whole number from 1"]),
        ("--train.steps 2.5", ["train.steps=2.5 is not a whole number"]),
        ("--train.steps 0", ["train.steps=0 is not above 0. Use a whole number from 1"]),
        ("--model.n-layers -3", ["model.n_layers=-3 is not above 0"]),
        ("--train.seed -1", ["train.seed=-1 is below 0. Use a whole number from 0"]),
        ("--train.steps", ["train.steps=true is not a whole number"]),
        ("--optim.lr x", ["optim.lr=x is not a number. Use a number above 0"]),
        ("--optim.lr nan", ["optim.lr=nan is not a finite number"]),
        ("--optim.lr inf", ["optim.lr=inf is not a finite number"]),
        ("--optim.floor 2", ["optim.floor=2 is above 1. Use a number from 0 to 1"]),
        ("--optim.betas 1,0.9", ["optim.betas=1,0.9 is not below 1", "2 values", "from 0 and below 1"]),
        ("--optim.betas 0.9", ["optim.betas=0.9 has another number of values"]),
        ("--optim.betas 0.9,0.9,0.9", ["optim.betas=0.9,0.9,0.9 has another number of values"]),
        ("--optim.decay cosin", ["optim.decay=cosin", "Did you mean cosine?", "linear, cosine, 1-sqrt, none"]),
        ("--train.zero 4", ["train.zero=4 is not one of the choices. Use one of 1, 2, 3, auto"]),
        ("--pipeline.stages 2,0", ["pipeline.stages=2,0 is not above 0", "a whole number from 1"]),
        ("--pipeline.chunks 0", ["pipeline.chunks=0 is not above 0. Use a whole number from 1, or none"]),
        ("--pipeline.scedule 1f1b", ["Did you mean pipeline.schedule?"]),
        (
            "--train.dtype float16",
            ["train.dtype=float16", "Did you mean bfloat16?", "float64, float32, bfloat16, auto"],
        ),
        ("--train.evaluate maybe", ["train.evaluate=maybe is neither true nor false"]),
        ("--optim.decay-steps x", ["optim.decay_steps=x is not a whole number", "or none"]),
        ("--model.attention 5", ["model.attention=5 is not a value"]),
        ("--train.steps.x 5", ["train.steps.x=5", "train.steps is a single value"]),
        ("--model.attention.kind mha", ["model.attention.kind=mha", "Did you mean mla?", "gqa, mla"]),
        ("--model.attention.n-kv-heads 2", ["is a field of gqa, but model.attention.kind=mla"]),
        ("--model.attention.kind gqa --model.attention.head-dim 4", ["model.attention.n_kv_heads is missing"]),
        ("--data.weights 1,-1", ["data.weights=1,-1 is not above 0"]),
    ],
)
def test_messages(line, words):
    config, problems = override("moe_tiny", line)
    assert len(problems) == 1, problems
    assert all(word in problems[0] for word in words), problems
    assert config.model_dump() == RECIPES["moe_tiny"]().model_dump()


def test_scaling_that_is_none_has_no_fields():
    config = legal("moe_tiny", "--model.rope.scaling none")
    _, problems = override(config, "--model.rope.scaling.factor 4")
    assert problems == [
        "model.rope.scaling.factor=4 has no place while model.rope.scaling is none. "
        "Set model.rope.scaling.kind to yarn or llama3 as well."
    ]


def test_all_at_once_and_good_values_stay():
    config, problems = override("moe_tiny", "--train.steps 0 --train.seed 7 --optim.lr -1 --optm.lr 1 --model.dim x")
    assert len(problems) == 4
    assert config.train.seed == 7
    assert config.train.steps == 20


def test_words_that_are_not_overrides_stay():
    rest, given = split(["train", "moe_tiny", "--parallel", "tp2", "--train.steps", "5", "--json=a.b"])
    assert rest == ["train", "moe_tiny", "--parallel", "tp2", "--json=a.b"]
    assert given == {"train.steps": "5"}


class Width(ModelConfig):
    """A user's model."""

    builder: str = "mine.py:build"
    width: PositiveInt = 4
    """Units."""


def test_a_users_model_keeps_its_class():
    base = RECIPES["dense_tiny"]().model_copy(update={"model": Width(vocab_size=37)})
    config = legal(base, "--model.width 8")
    assert config.model == Width(vocab_size=37, width=8)
    _, problems = override(base, "--model.width 0 --model.widht 3")
    assert len(problems) == 2
    assert any("Did you mean model.width?" in problem for problem in problems)
