"""What the engine says of parts that do not do what a part must."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fivefold.mesh.mesh import Mesh
from fivefold.mesh.run import Run
from fivefold.wrap.data import Stage


class Returns(nn.Module):
    """A part that returns what it was given."""

    def __init__(self, what):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.what = what

    def forward(self, x, microbatch):
        return self.what


@pytest.mark.parametrize(("what", "kind"), [(None, "NoneType"), ((torch.ones(1),), "tuple"), (3.0, "float")])
def test_a_part_that_returns_no_tensor_is_named(what, kind):
    stage = Stage({"first": Returns(torch.ones(1)), "second": Returns(what)}, Run(Mesh.single()))
    with pytest.raises(TypeError, match=rf"part 'second' returned a {kind}\. Return a tensor"):
        stage.forward(None, None)
