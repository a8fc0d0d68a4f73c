"""What is promised to be bit-equal on a CPU, and what ``train.deterministic`` refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fivefold.recipes import load
from tests.train.repeat import three_steps

PROGRAM = """
import torch
from fivefold.mesh.process import make_deterministic
make_deterministic()
torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
"""


@pytest.mark.parametrize("recipe", ["moe_tiny", "dense_tiny"])
def test_two_runs_of_a_layout_are_bit_equal(pool, recipe):
    config = load(recipe).config
    train = config.train.model_copy(update={"dtype": "float32", "microbatches": 2, "small_buffer": 300})
    config = config.model_copy(update={"parallel": "fsdp2-tp2", "train": train})
    (loss, norm, weights), (again, norm_again, weights_again) = (pool(4).run(three_steps, config)[0] for _ in range(2))
    assert loss == again
    assert norm == norm_again
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


def test_an_operator_without_a_deterministic_form_is_refused_by_name():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert "put_" in done.stderr
    assert "does not have a deterministic implementation" in done.stderr
