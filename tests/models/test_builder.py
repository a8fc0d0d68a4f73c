"""Finding a model's builder, and what is said of one that returns something else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fivefold.config.errors import ConfigError
from fivefold.config.model import ModelConfig
from fivefold.models.builder import build_parts
from tests.helpers import single

GOOD = """
from torch import nn

def parts(run, config, names=None):
    made = {"first": nn.Embedding(config.vocab_size, 4), "last": nn.Linear(4, config.vocab_size)}
    return made if names is None else {n: made[n] for n in names}

def nothing(run, config, names=None):
    return {}

def a_list(run, config, names=None):
    return [nn.Linear(1, 1)]

def wrong_values(run, config, names=None):
    return {"first": nn.Linear(1, 1), 2: "last"}

NUMBER = 3
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own.py").write_text(GOOD)
    return tmp_path


def build(reference: str, names=None) -> dict[str, nn.Module]:
    return build_parts(single(), ModelConfig(builder=reference, vocab_size=5), names)


def test_own_file(folder):
    parts = build(f"{folder}/own.py:parts")
    assert list(parts) == ["first", "last"]
    assert parts["last"](parts["first"](torch.tensor([1]))).shape == (1, 5)
    assert list(build(f"{folder}/own.py:parts", ["last"])) == ["last"]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nothing", "returned no parts"),
        ("a_list", "returned a list, not a dict"),
        ("NUMBER", "own.py:NUMBER"),
        ("absent", "own.py:absent"),
    ],
)
def test_wrong_builders(folder, function, said):
    with pytest.raises(ConfigError, match=r"model\.builder=") as caught:
        build(f"{folder}/own.py:{function}")
    assert said in str(caught.value)
    assert len(caught.value.problems) == 1


def test_every_problem_at_once(folder):
    with pytest.raises(ConfigError) as caught:
        build(f"{folder}/own.py:wrong_values", ["first"])
    assert len(caught.value.problems) == 3
    for problem, said in zip(
        caught.value.problems, ["named 2, not a str", "a str as part 2", "names=['first']"], strict=True
    ):
        assert said in problem


@pytest.mark.parametrize("reference", ["no.such.module:build", "nothing", "absent.py:build"])
def test_builders_that_do_not_exist(reference):
    with pytest.raises(ConfigError, match=f"model.builder={reference}"):
        build(reference)


DRAWN = """
from torch import nn

def parts(run, config, names=None):
    kinds = {"a": lambda: nn.Linear(3, 4), "b": lambda: nn.LayerNorm(4), "c": lambda: nn.Embedding(5, 6)}
    return {n: kinds[n]() for n in (kinds if names is None else names)}
"""


def test_values_that_modules_draw_do_not_depend_on_their_company(tmp_path):
    """So that a pipeline's ranks, which build some parts each, start where one rank does."""
    (tmp_path / "drawn.py").write_text(DRAWN)
    config = ModelConfig(builder=f"{tmp_path}/drawn.py:parts", vocab_size=5)

    def values(names, seed=3, **how):
        parts = build_parts(single(), config, names, seed, **how)
        return {f"{n}.{path}": p.detach() for n, part in parts.items() for path, p in part.named_parameters()}

    whole = values(None, layout_free=True)
    for names in (["a"], ["c"], ["b", "c"], ["a", "b", "c"]):
        found = values(names, layout_free=True)
        assert found.keys() == {n for n in whole if n.split(".")[0] in names}
        assert all(torch.equal(x, whole[n]) for n, x in found.items())
    assert not torch.equal(values(["c"])["c.weight"], values(None)["c.weight"])  # torch's own way
    assert not torch.equal(values(["c"], 4, layout_free=True)["c.weight"], whole["c.weight"])


SHARED = """
from torch import nn
from fivefold.mesh.parameter import Init, parameter, tie

def parts(run, config, names=None):
    found = {"a": nn.Linear(3, 4), "b": nn.LayerNorm(4), "c": nn.Linear(3, 4)}
    found["c"].weight = found["a"].weight
    return {n: found[n] for n in (found if names is None else names)}

def tied(run, config, names=None):
    found = {"a": nn.Module(), "b": nn.LayerNorm(4), "c": nn.Module()}
    for name in "ac":
        found[name].weight = tie(parameter(run.mesh, (4, 3), (None, None), Init()), "a.weight")
    return {n: found[n] for n in (found if names is None else names)}
"""


def test_a_parameter_shared_with_another_ranks_part_is_refused(tmp_path):
    """Each rank would build, and train, its own."""
    (tmp_path / "shared.py").write_text(SHARED)

    def build_names(function, names):
        build_parts(single(), ModelConfig(builder=f"{tmp_path}/shared.py:{function}", vocab_size=5), names)

    for names in (["a"], ["b", "c"]):
        with pytest.raises(ConfigError, match="shares one parameter between the parts 'a' and 'c'"):
            build_names("parts", names)
        build_names("tied", names)
    for names in (None, ["b"], ["a", "b", "c"]):
        build_names("parts", names)


def test_parts_that_the_costs_do_not_name_are_refused(tmp_path):
    (tmp_path / "drawn.py").write_text(DRAWN)

    class Named(ModelConfig):
        names: str = "abc"

        def part_costs(self, sequence_length):
            return dict.fromkeys(self.names, 1.0)

    def build_first(names):
        config = Named(builder=f"{tmp_path}/drawn.py:parts", vocab_size=5, names=names)
        return build_parts(single(), config, [names[0]], layout_free=True)

    assert list(build_first("abc")) == ["a"]
    for wrong in ("bac", "abcd", "ab"):
        with pytest.raises(ConfigError, match=rf"the parts a, b, c, but Named\.part_costs names {', '.join(wrong)}\."):
            build_first(wrong)
