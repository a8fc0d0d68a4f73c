"""The example of a schedule of one's own: it runs everywhere, earns what it is for, and trains like one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from fivefold.config.errors import ConfigError
from fivefold.recipes import load
from fivefold.schedule import named
from fivefold.schedule.simulate import simulate
from fivefold.tools.verify import verify
from tests.architecture.source import ROOT

if TYPE_CHECKING:
    from fivefold.mesh.pool import Pool

EAGER = f"{ROOT}/examples/eager_1f1b.py:eager_1f1b"


def test_it_runs_at_every_size() -> None:
    for pp in range(1, 9):
        for microbatches in range(1, 17):
            table = named.build(EAGER, pp, microbatches)  # which checks it
            held = [min(microbatches, 2 * (pp - 1 - rank) + 1) for rank in range(pp)]
            assert list(simulate(table).peak) == held


@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_it_has_the_bubble_of_1f1b_where_messages_are_free_and_a_smaller_one_where_they_are_not(
    microbatches: int,
) -> None:
    eager, plain = (named.build(name, 4, microbatches) for name in (EAGER, "1f1b"))
    assert simulate(eager).bubble == pytest.approx(simulate(plain).bubble)
    for comm in (0.25, 0.5, 1.0):
        assert simulate(eager, comm=comm).bubble < 0.97 * simulate(plain, comm=comm).bubble


def test_more_chunks_are_refused_in_its_own_words() -> None:
    with pytest.raises(
        ConfigError, match=r"eager_1f1b raises ValueError: eager_1f1b is a schedule of one chunk, not 2"
    ):
        named.build(EAGER, 4, 8, 2)


def test_a_layout_under_it_equals_one_rank(pool: Callable[[int], Pool]) -> None:
    config = load("moe_tiny").config
    optim = config.optim.model_copy(update={"warmup_steps": 0})
    train = config.train.model_copy(update={"dtype": "float64", "steps": 3, "microbatches": 4, "device": "cpu"})
    pipeline = config.pipeline.model_copy(update={"schedule": EAGER})
    config = config.model_copy(update={"train": train, "pipeline": pipeline, "optim": optim})
    (report,) = verify(config, ["pp2"], pools=lambda world: nullcontext(pool(world)))  # type: ignore[arg-type]
    assert report.passed
