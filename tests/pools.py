"""One pool of ranks per world size for the whole test run: start-up costs more than most cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fivefold.mesh.pool import Pool

CASE_LIMIT_S = 60.0


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """``pool(world).run(case, *args)``; the pools start when first asked for and end with the session."""
    from fivefold.mesh.pool import Pool  # here: tests that need no ranks should not wait for torch

    pools: dict[int, Pool] = {}

    def of(world: int) -> Pool:
        if world not in pools:
            pools[world] = Pool(world, timeout_s=CASE_LIMIT_S)
        return pools[world]

    yield of
    for each in pools.values():
        each.close()
