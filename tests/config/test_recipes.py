"""Where a run comes from: a name, a user's file, a saved run; and the released shapes."""

from __future__ import annotations

import json

import pytest

from fivefold import recipes
from fivefold.config.errors import ConfigError
from fivefold.config.overrides import apply
from fivefold.recipes import RECIPES

USER_FILE = '''
from __future__ import annotations

from pydantic import PositiveInt

from fivefold.config.model import ModelConfig
from fivefold.config.parts import DataConfig, OptimConfig, TrainConfig
from fivefold.config.run import RunConfig


class Mine(ModelConfig):
    """A model of my own."""

    builder: str = "mine.py:build"
    width: PositiveInt = 4
    """Units."""

    def problems(self, dims, sequence_length):
        return [f"model.width={self.width} is not a multiple of tp={dims.tp}. Use 4."] if self.width % dims.tp else []


def recipe() -> RunConfig:
    """Mine."""
    return RunConfig(
        model=Mine(vocab_size=37),
        data=DataConfig(files=("random",), batch_size=4, sequence_length=8),
        optim=OptimConfig(lr=1e-3),
        train=TrainConfig(steps=3),
    )


def wrong():
    return RunConfig(
        model=Mine(vocab_size=0, widht=3),
        data=DataConfig(batch_size=4, sequence_length=8),
        optim=OptimConfig(lr=1e-3),
        train=TrainConfig(steps=3),
    )


def nothing():
    return None


def broken():
    return {}["key"]


def leaves():
    raise SystemExit(0)


def copied(**update):
    return recipe().model_copy(update=update)


def copied_group():
    return copied(train=recipe().train.model_copy(update={"steps": -3, "stepz": 1}))


def copied_none():
    return copied(optim=None, parallel=3)
'''


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return path


def failing(spec: str) -> str:
    with pytest.raises(ConfigError) as caught:
        recipes.load(spec)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize("name", RECIPES)
def test_round_trip(name, tmp_path):
    recipe = recipes.load(name)
    recipes.save(tmp_path / "config.json", recipe.name, recipe.config)
    for spec in (tmp_path, tmp_path / "config.json"):
        again = recipes.load(str(spec))
        assert again == recipe
        assert again.config.model_dump() == recipe.config.model_dump()


def test_a_users_file(user_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = recipes.load("mine.py:recipe")
    assert recipe.name == f"{user_file}:recipe"
    assert type(recipe.config.model).__name__ == "Mine"
    assert recipes.load(f"{user_file}:recipe").config.model == recipe.config.model
    config, problems = apply(recipe.config, {"model.width": "6"})
    assert problems == []
    recipes.save(tmp_path / "config.json", recipe.name, config)
    monkeypatch.chdir("/")
    again = recipes.load(str(tmp_path)).config
    assert again == config
    assert type(again.model) is type(config.model)


def test_messages(user_file, tmp_path):
    assert "recipe=moe_tinny is not a recipe. Did you mean moe_tiny?" in failing("moe_tinny")
    assert "recipe=xyz is not a recipe. Use one of moe_tiny" in failing("xyz")
    assert "does not exist" in failing(f"{tmp_path}/none.py:recipe")
    assert "Did you mean" in failing(f"{tmp_path}/mime.py:recipe")
    assert "has no recip. Did you mean" in failing(f"{user_file}:recip")
    assert "names no function" in failing(f"{user_file}:")
    assert "returns a NoneType. Return a RunConfig" in failing(f"{user_file}:nothing")
    assert "fails: KeyError" in failing(f"{user_file}:broken")
    assert failing(f"{user_file}:wrong").count("\n") == 1
    assert "vocab_size=0 is not above 0" in failing(f"{user_file}:wrong")
    assert "widht=3 is not a field" in failing(f"{user_file}:wrong")


def test_what_a_copy_did_not_validate(user_file):
    found = failing(f"{user_file}:copied_group")
    assert "train.steps=-3 is not above 0" in found
    assert "train.stepz=1 is not a field" in found
    found = failing(f"{user_file}:copied_none")
    assert "optim=None is not a group of fields" in found
    assert "parallel=3 is not a layout" in found
    assert recipes.load(f"{user_file}:copied").config.model.width == 4


def test_a_file_that_leaves(user_file, tmp_path):
    assert "fails: SystemExit: 0. Correct the function" in failing(f"{user_file}:leaves")
    (tmp_path / "script.py").write_text("import sys\nsys.exit()\n")
    assert "cannot be imported: SystemExit" in failing(f"{tmp_path}/script.py:recipe")
    assert "names no function" in failing(f"{tmp_path}/script.py")


def test_a_file_that_fails(tmp_path):
    (tmp_path / "bad.py").write_text("x = 1\nimport nowhere_to_be_found\n")
    message = failing(f"{tmp_path}/bad.py:recipe")
    assert "ModuleNotFoundError" in message
    assert "line 2" in message
    (tmp_path / "syntax.py").write_text("def f(:\n")
    assert "SyntaxError" in failing(f"{tmp_path}/syntax.py:recipe")


def test_a_damaged_saved_run(tmp_path):
    path = tmp_path / "config.json"
    assert "cannot be read" in failing(str(path))
    path.write_text("{")
    assert "is not a saved run" in failing(str(path))
    path.write_text('{"recipe": "moe_tiny"}')
    assert "is not a saved run" in failing(str(path))
    recipe = recipes.load("moe_tiny")
    values = recipe.config.model_dump(mode="json")
    values["train"]["steps"] = 0
    values["optim"]["lrr"] = 1
    values["extra"] = {}
    path.write_text(json.dumps({"recipe": "moe_tiny", "config": values}))
    message = failing(str(path))
    assert "train.steps=0 is not above 0" in message
    assert "optim.lrr=1 is not a field" in message
    assert "extra is not a group" in message
    path.write_text(json.dumps({"recipe": "gone", "config": {}}))
    assert "recipe=gone is not a recipe" in failing(str(path))


def test_released_shapes():
    v3, lite = RECIPES["deepseek_v3"]().model, RECIPES["deepseek_v2_lite"]().model
    assert (v3.dim, v3.n_layers, v3.ffn_dim, v3.vocab_size) == (7168, 61, 18432, 129280)
    assert (v3.attention.q_rank, v3.attention.kv_rank, v3.attention.n_heads) == (1536, 512, 128)
    assert (v3.moe.n_experts, v3.moe.top_k, v3.moe.expert_dim, v3.moe.n_dense_layers) == (256, 8, 2048, 3)
    assert (v3.moe.n_groups, v3.moe.top_groups, v3.moe.route_scale, v3.moe.score) == (8, 4, 2.5, "sigmoid")
    assert (v3.rope.scaling.factor, v3.rope.scaling.mscale, v3.rope.scaling.mscale_all_dim) == (40, 1, 1)
    assert (lite.dim, lite.n_layers, lite.ffn_dim, lite.vocab_size) == (2048, 27, 10944, 102400)
    assert (lite.attention.q_rank, lite.moe.n_shared, lite.moe.normalise, lite.moe.score) == (0, 2, False, "softmax")
    assert (lite.rope.scaling.mscale, lite.rope.scaling.mscale_all_dim) == (0.707, 0.707)
    for name in ("llama3_8b", "llama3_70b", "llama3_405b"):
        model = RECIPES[name]().model
        assert (model.vocab_size, model.rope.theta, model.rope.layout, model.norm_eps) == (
            128256,
            500_000,
            "half",
            1e-5,
        )
        assert model.dim == model.attention.n_heads * model.attention.head_dim
        assert not model.tied


def test_tokens_of_the_published_runs():
    tokens = {
        name: (config := RECIPES[name]()).train.steps * config.data.batch_size * config.data.sequence_length
        for name in RECIPES
    }
    assert tokens["llama3_8b"] == pytest.approx(15e12, rel=1e-3)
    assert tokens["deepseek_v2_lite"] == pytest.approx(5.7e12, rel=1e-3)
    assert tokens["deepseek_v3"] == pytest.approx(14.3e12, rel=1e-3)
