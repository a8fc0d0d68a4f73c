"""What the engine says of parts that do not do what a part must."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from fivefold.mesh.mesh import Mesh
from fivefold.mesh.run import Run
from fivefold.schedule.table import Action
from fivefold.wrap.data import Stage
from fivefold.wrap.pipeline import Executor


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


class Applies(nn.Module):
    """A part that applies a function, after a weight of its own."""

    def __init__(self, fn):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.fn = fn

    def forward(self, x, microbatch):
        return self.fn(self.weight if x is None else x)


def gradients(cuts, *fns):
    """Loss, and each part's gradient, of one microbatch through stages on one rank, cut before the parts ``cuts``."""
    run = Run(Mesh.single())
    parts = {str(i): Applies(fn) for i, fn in enumerate(fns)}
    bounds = [0, *cuts, len(fns)]
    stages = {s: Stage({str(i): parts[str(i)] for i in range(a, b)}, run, zero=1) for s, (a, b) in
              enumerate(pairwise(bounds))}  # fmt: skip
    table = [[Action("F", s, 0) for s in stages] + [Action("B", s, 0) for s in reversed(stages)]]
    loss = Executor(table, stages, run).step([None])
    return loss, [shard.value.grad for stage in stages.values() for shard in stage.shards]


@pytest.mark.parametrize("cuts", [(), (1,), (1, 2)])
def test_a_part_may_change_what_it_is_given_in_place(cuts):
    loss, grads = gradients(cuts, lambda w: w * w, lambda x: x.mul_(3), lambda x: x.add_(1).sum())
    assert loss == 3 * (4 + 9) + 2
    assert torch.equal(grads[0], torch.tensor([12.0, 18.0]))  # 3 * 2w


def test_a_change_in_place_of_what_backward_needs_is_refused():
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients((1,), lambda w: w.exp(), lambda x: x.mul_(3).sum())


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x: x, r"the last part returned torch\.float32 of shape \(2,\) as the loss\. Return a scalar"),
        (lambda x: x.sum().long(), r"the last part returned torch\.int64 of shape \(\) as the loss\. Return a scalar"),
    ],
)
def test_what_is_no_loss_is_named(fn, said):
    with pytest.raises(TypeError, match=said):
        gradients((), lambda w: w * w, fn)


def test_what_could_not_travel_is_refused_on_one_rank_too():
    with pytest.raises(TypeError, match=r"stage 0 returned torch\.bool of shape \(2,\)\. Return one of torch\.float32"):
        gradients((1,), lambda w: w > 0, lambda x: x.sum())
