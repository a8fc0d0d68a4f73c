"""Shapes, offsets, padding and specs of parameters; the axis that each is stored over."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fivefold.config.dims import ParallelDims
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.parameter import Init, attach, parameter, spec_of, tie

DIMS = ParallelDims(pp=2, ddp=2, fsdp=2, cp=2, tp=4, ep=4, etp=2)


def meshes() -> list[Mesh]:
    return [Mesh(DIMS, rank, connect=False) for rank in range(DIMS.world)]


def test_shards_tile_the_whole() -> None:
    """Each element is on as many ranks as the other axes have places."""
    held = torch.zeros(8, 12, 5)
    for mesh in meshes():
        p = parameter(mesh, (8, 12, 5), ("ep", "etp", None), Init())
        assert p.device.type == "meta"
        assert p.requires_grad
        (a, b, c), (i, j, k) = p.shape, spec_of(p).offset
        assert (a, b, c) == (2, 6, 5)
        held[i : i + a, j : j + b, k : k + c] += 1
    assert held.unique().tolist() == [DIMS.world / 8]


def test_padding_rounds_up_and_leaves_the_whole_shape() -> None:
    for mesh in meshes():
        p = parameter(mesh, (37, 8), ("tp", None), Init(), pad=True)
        assert p.shape == (10, 8)
        assert spec_of(p).offset == (10 * mesh.tp.rank, 0)
        assert spec_of(p).global_shape == (37, 8)


def test_a_dim_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dim of 37 in \(37, 8\) is not divisible by tp=4"):
        parameter(meshes()[0], (37, 8), ("tp", None), Init())
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        parameter(meshes()[0], (8, 8), ("tp",), Init())


def test_decay_is_for_matrices_unless_told() -> None:
    mesh = Mesh.single()
    assert spec_of(parameter(mesh, (4, 4), (None, None), Init())).decay
    assert not spec_of(parameter(mesh, (4,), (None,), Init())).decay
    assert not spec_of(parameter(mesh, (4, 4), (None, None), Init(), decay=False)).decay
    assert spec_of(parameter(mesh, (4,), (None,), Init(), decay=True)).decay


@pytest.mark.parametrize(
    ("sharding", "axis"),
    [
        ((None, None), "fsdp+cp+tp"),
        (("tp", None), "fsdp+cp"),
        ((None, "tp"), "fsdp+cp"),
        (("ep", None), "efsdp"),
        (("ep", "etp"), "efsdp"),
        ((None, "etp"), "efsdp"),
    ],
)
def test_storage_axis(sharding: tuple[str | None, ...], axis: str) -> None:
    mesh = meshes()[0]
    spec = spec_of(parameter(mesh, (8, 8), sharding, Init()))
    assert spec.storage_axis(mesh).name == axis
    assert spec.sparse == (axis == "efsdp")


def test_an_expert_axis_counts_at_size_one() -> None:
    mesh = Mesh(ParallelDims(fsdp=2, tp=2), connect=False)
    spec = spec_of(parameter(mesh, (8, 8), ("ep", None), Init()))
    assert spec.storage_axis(mesh) is mesh.efsdp
    assert mesh.efsdp.size == 4


def test_a_plain_parameter_is_held_whole() -> None:
    spec = spec_of(nn.Parameter(torch.ones(3, 2)))
    assert (spec.sharding, spec.global_shape, spec.offset, spec.decay) == ((None, None), (3, 2), (0, 0), True)


def test_tie_takes_the_others_name() -> None:
    p = tie(parameter(Mesh.single(), (4, 2), ("tp", None), Init(std=0.5)), "embedding.weight")
    assert spec_of(p).tied
    assert spec_of(p).init_name == "embedding.weight"
    assert spec_of(p).init.std == 0.5
    q = attach(nn.Parameter(torch.ones(4, 2)), spec_of(p))
    assert spec_of(q) is spec_of(p)


def test_a_tie_of_values_that_differ_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the parameter to tie to embed.weight has values already. Declare both with"):
        tie(nn.Parameter(torch.ones(2)), "embed.weight")
