"""The verdict: what fails it, what it names, its JSON, several layouts at once, and a user's own model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.config.errors import ConfigError
from fivefold.mesh.pool import Pool, PoolError
from fivefold.recipes import load
from fivefold.tools import verify as tool
from fivefold.tools.verify import Outcome, Report, as_json, compare, first_difference, one_rank, verify
from tests.parity import plain
from tests.parity.grid import changed, row

Pools = Callable[[int], Pool]
ROOT = Path(__file__).parents[2]
KEYS = [
    "layout",
    "dtype",
    "steps",
    "loss",
    "grad_norm",
    "gradient",
    "parameter",
    "experts",
    "replicas",
    "owners",
    "worst",
    "first_difference",
    "passed",
]


def run(pool: Pools, config: Any, *layouts: str, **options: Any) -> list[Report]:
    """Verify in the session's pools, which stay open."""
    return verify(config, layouts, pools=lambda world: nullcontext(pool(world)), **options)  # type: ignore[arg-type, return-value]


def test_reports_come_in_the_order_asked_whatever_their_sizes(pool: Pools) -> None:
    told: list[str] = []
    config = row("single", "dense").config
    reports = run(pool, config, "fsdp2-tp2", "single", "tp2", "fsdp2", progress=lambda r: told.append(r.layout))
    assert [r.layout for r in reports] == ["fsdp2-tp2", "single", "tp2", "fsdp2"]
    assert told == ["single", "tp2", "fsdp2", "fsdp2-tp2"]  # by size
    assert all(r.passed and r.dtype == "float64" and r.steps == 3 for r in reports)
    assert reports[1].gradient == reports[1].parameter == reports[1].loss == 0.0


def test_json_of_one_and_of_several() -> None:
    report = Report(
        layout="tp2",
        dtype="float64",
        steps=3,
        loss=1e-16,
        grad_norm=2e-16,
        gradient=3e-15,
        parameter=4e-14,
        experts=True,
        replicas=True,
        owners=True,
        worst=("head.weight", 4e-14),
        first_difference=None,
        passed=True,
    )
    one = json.loads(as_json([report]))
    assert list(one) == KEYS
    assert one["worst"] == ["head.weight", 4e-14] and one["first_difference"] is None and one["passed"] is True
    both = json.loads(as_json([report, replace(report, passed=False, first_difference="layers.1")]))
    assert [r["first_difference"] for r in both] == [None, "layers.1"] and all(list(r) == KEYS for r in both)


def test_float32_passes_with_its_own_tolerance(pool: Pools) -> None:
    config = changed(row("single", "moe").config, "train.dtype", "float32")
    for report in run(pool, config, "fsdp2", "tp2"):
        assert report.passed and report.dtype == "float32"
        assert 1e-10 < report.gradient < 1e-4
    strict = run(pool, config, "tp2", tolerance=1e-12)[0]
    assert not strict.passed and strict.first_difference is not None


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_what_cannot_be_verified_is_refused(dtype: str) -> None:
    config = changed(row("single", "dense").config, "train.dtype", dtype)
    with pytest.raises(ConfigError, match=f"train.dtype={dtype} cannot be verified.*float64, float32"):
        verify(config, ["fsdp2"])


def outcome(**changes: Any) -> Outcome:
    w = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.0, 0.0])}
    good = Outcome(
        losses=[2.0, 1.0], norms=[3.0, 1.0], gradients=w, parameters=w, experts={}, owners=True, replicas=True, seen={}
    )
    return replace(good, **changes)


MISTAKES: dict[str, dict[str, Any]] = {
    "loss": {"losses": [2.0, 1.0 + 1e-9]},
    "grad_norm": {"norms": [3.0, 1.0 + 1e-9]},
    "gradient": {"gradients": {"a": torch.tensor([1.0, 2.1]), "b": torch.zeros(2)}},
    "parameter": {"parameters": {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.0, 1e-30])}},
    "owners": {"owners": False},
    "replicas": {"replicas": False},
}


def test_everything_right_passes() -> None:
    report = compare(row("fsdp2").config, outcome(), outcome(), True, 1e-10)
    assert report.passed and report.layout == "fsdp2" and report.worst[1] == 0.0


@pytest.mark.parametrize("field", [*MISTAKES, "experts"])
def test_each_mistake_alone_fails(field: str) -> None:
    report = compare(row("fsdp2").config, outcome(**MISTAKES.get(field, {})), outcome(), field != "experts", 1e-10)
    assert not report.passed
    value = getattr(report, field)
    assert value is False if isinstance(value, bool) else value > 1e-10
    others = [f for f in ("loss", "grad_norm", "gradient", "parameter") if f != field]
    assert all(getattr(report, f) == 0.0 for f in others)
    if field in ("gradient", "parameter"):
        assert report.worst == ({"gradient": "a", "parameter": "b"}[field], value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_fails(bad: float) -> None:
    parameters = {"a": torch.tensor([bad, 2.0]), "b": torch.zeros(2)}
    for changes in ({"losses": [bad, 1.0]}, {"norms": [3.0, bad]}, {"parameters": parameters}):
        assert not compare(row("fsdp2").config, outcome(**changes), outcome(), True, 1e-10).passed


def test_first_difference_is_the_first_output_or_else_the_last_gradient() -> None:
    kinds = [*((name, "activation") for name in "abc"), *((name, "gradient") for name in "cba")]
    seen = {kind: torch.ones(2) for kind in kinds}
    oracle = outcome(seen=seen)

    def of(*wrong: tuple[str, str]) -> str | None:
        return first_difference(outcome(seen={k: x * (2 if k in wrong else 1) for k, x in seen.items()}), oracle, 1e-10)

    assert of() is None
    assert of(("b", "activation"), ("c", "activation"), ("c", "gradient")) == "b"
    assert of(("b", "gradient"), ("a", "gradient")) == "b (gradient of its output)"
    other_shape = outcome(seen=seen | {("a", "activation"): torch.ones(3)})
    assert first_difference(other_shape, oracle, 1e-10) == "a"


def test_the_oracle_is_plain() -> None:
    config = one_rank(row("fsdp2-tp2", "moe", 3, 2, "full", train__compile="eager").config)
    train = config.train
    assert config.parallel == "single"
    assert (train.microbatches, train.recompute, train.compile, train.zero) == (1, "none", "none", 1)
    assert one_rank(config) == config


def test_a_users_own_model_and_recipe(pool: Pools) -> None:
    config = changed(plain.recipe(), "train.dtype", "float64")
    assert all(r.passed and r.experts for r in run(pool, config, "fsdp2", "ddp2", "pp2", "pp4"))


@pytest.mark.parametrize(
    ("recipe", "first"), [("wrong_value", "mix.1"), ("wrong_gradient", "mix.0 (gradient of its output)")]
)
@pytest.mark.parametrize("layout", ["fsdp2", "ddp2", "pp2", "pp4"])
def test_a_users_mistake_is_found_and_placed(pool: Pools, recipe: str, first: str, layout: str) -> None:
    """Also where it is on another rank than the one that judges: under pp2 the last, under pp4 one in the middle."""
    config = changed(load(f"{ROOT}/tests/tools/models.py:{recipe}").config, "train.dtype", "float64")
    report = run(pool, config, layout)[0]
    assert not report.passed and report.gradient > 1e-3
    assert report.first_difference == first
    assert report.worst[1] == max(report.gradient, report.parameter)


def test_a_model_that_breaks_on_one_rank_is_an_error(pool: Pools) -> None:
    config = row("fsdp2", "dense", model__builder="nowhere:build").config
    with pytest.raises(PoolError, match=r"model\.builder=nowhere:build cannot be imported"):
        run(pool, config, "fsdp2")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fivefold", "verify", *arguments], cwd=ROOT, text=True, timeout=100,
                          capture_output=True)  # fmt: skip


def test_the_command_with_a_file_passes_and_writes_json(tmp_path: Path) -> None:
    done = command("tests/parity/plain.py:recipe", "--parallel", "fsdp2", "pp2", "--json", str(tmp_path / "r.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") == 2
    reports = json.loads((tmp_path / "r.json").read_text())
    assert [r["layout"] for r in reports] == ["fsdp2", "pp2"] and all(list(r) == KEYS and r["passed"] for r in reports)


def test_the_command_fails_with_what_does_not_pass(tmp_path: Path) -> None:
    wanted = ("--parallel", "fsdp2", "--steps", "1", "--json", str(tmp_path / "r.json"))
    done = command("tests/tools/models.py:wrong_value", *wanted)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed" in done.stdout and "first difference in mix.1" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["passed"] is False and report["first_difference"] == "mix.1" and report["steps"] == 1


def test_a_parameter_that_a_layout_lacks_is_infinitely_wrong() -> None:
    missing = outcome(gradients={"a": torch.tensor([1.0, 2.0])})
    report = compare(row("fsdp2").config, missing, outcome(), True, 1e-10)
    assert not report.passed and report.gradient == float("inf") and report.worst == ("b", float("inf"))


def test_tolerances_are_the_documented_ones() -> None:
    assert tool.TOLERANCE == {"float64": 1e-10, "float32": 1e-4}
