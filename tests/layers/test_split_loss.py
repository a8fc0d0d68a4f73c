"""The loss over a vocabulary split among ranks."""

from __future__ import annotations

import pytest
import torch

from tests.layers.split_loss import loss_of_four_logits


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_loss_of_four_logits(pool, world):
    results = pool(world).run(loss_of_four_logits)
    expected = torch.arange(4.0, dtype=torch.float64).softmax(0) - torch.tensor([0, 0, 0, 1.0])
    assert [round(loss, 7) for loss, _ in results] == [0.4401897] * world
    gradient = torch.tensor([g for _, part in results for g in part], dtype=torch.float64)
    assert (gradient - expected).abs().max() < 1e-15
