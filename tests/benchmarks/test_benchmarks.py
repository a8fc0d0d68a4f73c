"""The benchmarks measure what they say, and run. No time is asserted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import engine, steps
from benchmarks.__main__ import main
from benchmarks.contest import Spread, ratio
from fivefold.mesh.pool import Pool

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("model", ["llama", "dsv3"])
def test_both_sides_do_the_same_work(pool: Pools, model: str) -> None:
    pool(1).run(steps.check_same, model)


def test_both_engines_compute_the_same_gradients(pool: Pools) -> None:
    worst = pool(2).run(engine.check_gradients, "small")
    assert max(worst) < engine.TOLERANCE


def test_ratios_are_of_the_same_round() -> None:
    assert ratio([2.0, 6.0, 20.0], [1.0, 2.0, 4.0]) == Spread(3.0, 2.5, 4.0)
    assert ratio([3.0], [2.0]) == Spread(1.5, 1.5, 1.5)


def test_a_section_prints_a_table_and_writes_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--only", "bytes", "--quick", "--json", str(tmp_path / "out.json")]) == 0
    assert "| llama | fsdp2" in capsys.readouterr().out
    (table,) = json.loads((tmp_path / "out.json").read_text())["bytes"]
    assert {row["traffic"] for row in table["rows"]} == {"parameters", "gradients", "statistics"}
    assert all(row["equal"] == "yes" for row in table["rows"])
