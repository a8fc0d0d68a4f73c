"""The embedding over a vocabulary split among ranks, its gradient at once or deferred."""

from __future__ import annotations

import pytest
import torch

from fivefold.mesh.init import initial_values
from fivefold.mesh.parameter import Init
from tests.layers.split_embedding import rows_of_a_table

TOKENS = torch.tensor([[0, 6, 6, 3], [2, 1, 0, 5]])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_and_gradients_of_each_rank(pool, world):
    """Every token is on one rank; a row that another rank holds gets no gradient here; what waits is equal bit for bit.

    Seven rows do not divide among two or four ranks: the last has padding, which stays zero.
    """
    results = pool(world).run(rows_of_a_table, TOKENS)
    whole = initial_values(Init(std=1.0), 0, "embed.weight", torch.arange(35).view(7, 5))
    assert torch.equal(torch.cat([y for y, *_ in results], 1), whole[TOKENS])
    size = (2, 4 // world, 5)
    g = torch.cat([torch.arange(40.0 / world).view(size).double() + rank for rank in range(world)], 1)
    expected = torch.zeros(8, 5, dtype=torch.float64).index_add_(0, TOKENS.flatten(), g.flatten(0, 1))
    assert torch.equal(torch.cat([at_once for _, at_once, *_ in results])[:7], expected[:7])
    for _, at_once, deferred, jobs in results:
        assert torch.equal(deferred, at_once) and jobs == 1
    assert not torch.cat([at_once for _, at_once, *_ in results])[7:].any()
