"""What ranks store, added up over the pipeline: every parameter once, and a tied one where it is used."""

from __future__ import annotations

import pytest

from fivefold.config import counts
from fivefold.config.overrides import apply, split
from fivefold.recipes import RECIPES
from fivefold.tools.footprint import footprint

TABLE = 37 * 16
"""Elements of an embedding of the tiny models."""


@pytest.mark.parametrize(
    ("line", "stages"),
    [
        ("single", [(0,)]),
        ("pp2", [(0,), (1,)]),
        ("pp4", [(0,), (1,), (2,), (3,)]),
        ("pp2 --pipeline.chunks 2", [(0, 2), (1, 3)]),
        ("pp2 --pipeline.schedule zb_v", [(0, 3), (1, 2)]),
        ("single --pipeline.chunks 3", [(0, 1, 2)]),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recipe", ["dense_tiny", "moe_tiny"])
def test_every_parameter_is_stored_once(recipe: str, tied: bool, line: str, stages: list[tuple[int, ...]]) -> None:
    layout, *words = line.split()
    given = split(words)[1] | {"parallel": layout, "model.tied": str(tied).lower(), "train.microbatches": "4"}
    config, wrong = apply(RECIPES[recipe](), given)
    assert wrong == []
    found = footprint(config)
    assert [place.stages for place in found] == stages
    assert sum(place.n_parts for place in found) == 6
    apart = tied and not any({0, sum(map(len, stages)) - 1} <= set(held) for held in stages)
    assert sum(place.stored_bytes for place in found) == 4 * (counts.parameters(config.model) + apart * TABLE)
    assert all(place.optimizer_bytes == 2 * place.stored_bytes for place in found)


def test_zero_is_resolved() -> None:
    config = RECIPES["dense_tiny"]()
    for layout, whole in (("fsdp4", False), ("pp2-fsdp4", True)):
        for place in footprint(config.model_copy(update={"parallel": layout})):
            flat = place.gradient_bytes - place.stored_bytes
            assert flat == (4 * place.stored_bytes if whole else 0)
