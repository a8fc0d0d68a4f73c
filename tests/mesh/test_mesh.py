"""Coordinates, groups and joins of both readings of the ranks, against numpy; and the groups that really meet."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.dims import DENSE, SPARSE, ParallelDims
from fivefold.config.errors import divisors
from fivefold.mesh import axis as axis_module
from fivefold.mesh.axis import Axis, find
from fivefold.mesh.mesh import JOINS, Groups, Mesh
from fivefold.mesh.pool import Pool
from fivefold.observe.recorder import FlightRecorder

from . import cases

Pools = Callable[[int], Pool]
NAMES = [*((a,) for a in (*DENSE, *SPARSE[2:])), *JOINS]


@st.composite
def layouts(draw: st.DrawFn, largest: int) -> ParallelDims:
    """Any legal layout of at most ``largest`` ranks."""
    sizes: dict[str, int] = {}
    for axis in draw(st.permutations(DENSE)):
        sizes[axis] = draw(st.integers(1, max(1, min(6, largest // math.prod(sizes.values())))))
    inner = sizes["fsdp"] * sizes["cp"] * sizes["tp"]
    ep = draw(st.sampled_from(divisors(inner)))
    return ParallelDims(**sizes, ep=ep, etp=draw(st.sampled_from(divisors(inner // ep))))


def rows(dims: ParallelDims, names: tuple[str, ...]) -> list[list[int]]:
    """World ranks along a join, one row a group, by numpy."""
    axes = DENSE if set(names) <= set(DENSE) else SPARSE
    grid = np.arange(dims.world).reshape([dims.size(a) for a in axes])
    rest = [i for i, a in enumerate(axes) if a not in names]
    order = rest + [i for i, a in enumerate(axes) if a in names]
    return grid.transpose(order).reshape(-1, math.prod(dims.size(a) for a in names)).tolist()


class Planned(Groups):
    """Notes which groups are asked for, by ranks and use, in order, and creates none."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.order: list[tuple[tuple[int, ...], str]] = []

    def create(self, ranks: tuple[int, ...], use: str = "") -> None:
        if (ranks, use) not in self.order:
            self.order.append((ranks, use))

    def get(self, ranks: tuple[int, ...], use: str = "") -> dist.ProcessGroup:
        assert (ranks, use) in self.order
        assert self.rank in ranks
        return dist.ProcessGroup(dist.HashStore(), ranks.index(self.rank), len(ranks))


@settings(max_examples=200, deadline=None)
@given(layouts(largest=32))
def test_axes_of_every_rank(dims: ParallelDims) -> None:
    expected = {names: rows(dims, names) for names in NAMES}
    for rank in range(dims.world):
        mesh = Mesh(dims, rank, connect=False)
        for names in NAMES:
            axis = mesh.join(*names)
            row = next(r for r in expected[names] if rank in r)
            assert (axis.name, axis.size, axis.ranks) == ("+".join(names), len(row), tuple(row))
            assert axis.ranks[axis.rank] == rank
            assert axis.group is None
        assert mesh.efsdp.size * mesh.ep.size * mesh.etp.size == mesh.fsdp.size * mesh.cp.size * mesh.tp.size
        assert mesh.world.size == dims.world
        assert mesh.data_rank() == mesh.ddp.rank * dims.fsdp + mesh.fsdp.rank


@settings(max_examples=50, deadline=None)
@given(layouts(largest=24), st.booleans(), st.data())
def test_every_rank_creates_the_same_groups_in_the_same_order(
    dims: ParallelDims, native: bool, data: st.DataObject
) -> None:
    planned = [Planned(rank) for rank in range(dims.world)]
    ends = data.draw(st.sampled_from([None, (0, 0), (dims.pp - 1, 0), (dims.pp // 2, dims.pp - 1)]), label="ends")
    with patch.object(Axis, "native", native):
        meshes = [Mesh(dims, rank, groups=planned[rank], ends=ends) for rank in range(dims.world)]
    assert all(p.order == planned[0].order for p in planned)
    first, last = sorted(ends or (0, dims.pp - 1))
    pairs = [(row[first], row[last]) for row in rows(dims, ("pp",)) if first != last]  # who may share a parameter
    wanted = {(tuple(row), "") for names in NAMES for row in rows(dims, names) if len(row) > 1}
    wanted |= {(pair, "") for pair in pairs}
    if native:  # NCCL: messages of one group are one queue, so gradients need a group of their own
        wanted |= {(tuple(row), "back") for row in rows(dims, ("pp",)) if len(row) > 1}
    assert set(planned[0].order) == wanted
    assert len(planned[0].order) == len(wanted)
    for mesh in meshes:
        assert all((a.group is None) == (a.size == 1) for a in (*map(mesh.join, DENSE), mesh.tie, mesh.pp_back))
        assert (mesh.pp_back.group is mesh.pp.group) == (not native or mesh.pp.size == 1)


@settings(max_examples=50, deadline=None)
@given(layouts(largest=24), st.data())
def test_the_tie_joins_the_ends_of_each_pipeline(dims: ParallelDims, data: st.DataObject) -> None:
    """Two ranks, one of the first and one of the last stage, that share every other coordinate."""
    first, last = (data.draw(st.integers(0, dims.pp - 1)) for _ in range(2))
    for rank in range(dims.world):
        mesh = Mesh(dims, rank, connect=False, ends=(first, last))
        if first == last or mesh.pp.rank not in (first, last):
            assert (mesh.tie.size, mesh.tie.ranks, mesh.tie.rank) == (1, (rank,), 0)
        else:
            assert mesh.tie.ranks == tuple(sorted((mesh.pp.ranks[first], mesh.pp.ranks[last])))
            assert mesh.tie.ranks[mesh.tie.rank] == rank
        assert (mesh.pp_back.size, mesh.pp_back.rank, mesh.pp_back.ranks) == (
            mesh.pp.size, mesh.pp.rank, mesh.pp.ranks)  # fmt: skip


def test_attributes_are_the_axes() -> None:
    mesh = Mesh(ParallelDims(pp=2, ddp=2, fsdp=2, cp=2, tp=2, ep=4, etp=2), 13, connect=False)
    for name in (*DENSE, *SPARSE[2:]):
        assert getattr(mesh, name) is mesh.join(name)
    assert mesh.world is mesh.join(*DENSE)


def test_a_join_that_is_not_declared_names_the_declared_ones() -> None:
    with pytest.raises(KeyError, match=r"pp.*tp.*is not declared.*ddp\+fsdp.*fsdp\+cp\+tp"):
        Mesh.single().join("pp", "tp")


def test_a_single_rank_needs_no_groups() -> None:
    mesh = Mesh.single()
    assert mesh.groups == []
    assert {mesh.join(*names).size for names in NAMES} == {1}
    assert Mesh(ParallelDims()).groups == []


def test_groups_really_meet(pool: Pools) -> None:
    for layout in ("fsdp2-tp2-ep2", "ddp2-fsdp2-etp2", "pp2-cp2", "tp4-ep2-etp2"):
        for seen in pool(4).run(cases.axis_sums, layout):
            assert set(seen) == {"pp_back", "tie", *("+".join(names) for names in NAMES)}
            for name, (ranks, total) in seen.items():
                assert total == sum(ranks) if len(ranks) > 1 else True, name


@pytest.mark.parametrize(("layout", "ends"), [("pp2-fsdp2", (0, 1)), ("pp4", (3, 0)), ("pp4", (1, 2)), ("pp4", (2, 2))])
def test_ties_really_meet(pool: Pools, layout: str, ends: tuple[int, int]) -> None:
    joined = {ranks for seen in pool(4).run(cases.axis_sums, layout, ends)
              for ranks, total in [seen["tie"]] if total == sum(ranks)}  # fmt: skip
    pairs = [seen["tie"][0] for seen in pool(4).run(cases.axis_sums, layout, ends)]
    assert joined == set(pairs)
    assert sorted(r for pair in set(pairs) for r in pair) == [0, 1, 2, 3]
    assert max(map(len, pairs)) == (1 if ends[0] == ends[1] else 2)


def test_axes_over_the_same_ranks_share_a_group(pool: Pools) -> None:
    """``fsdp2-tp2``: fsdp, tp and the whole world, whatever the joins; a recorded mesh adds none."""
    assert pool(4).run(cases.groups_of, "fsdp2-tp2") == [(3, 3)] * 4
    assert pool(4).run(cases.groups_of, "tp4") == [(1, 1)] * 4
    assert pool(4).run(cases.groups_of, "pp2-tp2") == [(3, 3)] * 4  # pp, tp, the world; the tie is pp's own group
    assert pool(4).run(cases.groups_of, "pp4") == [(2, 2), (1, 1), (1, 1), (2, 2)]  # pp, and the tie of the ends


def test_one_group_for_each_use_of_the_same_ranks(pool: Pools) -> None:
    assert pool(2).run(cases.groups_by_use) == [(True, True, [1.0, 3.0])] * 2


def test_recorded_mesh_leaves_the_first_alone() -> None:
    mesh = Mesh(ParallelDims(tp=2), connect=False)
    recorder = FlightRecorder()
    recorded = mesh.recorded(recorder)
    assert recorded.recorder is recorded.tp.recorder is recorder
    assert not mesh.tp.recorder.on
    assert find(mesh.tp.key) is mesh.tp
    assert find(recorded.tp.key) is recorded.tp
    assert recorded.tp == mesh.tp


def test_a_key_tells_size_and_rank() -> None:
    """Compiled graphs on disk are shared by ranks and runs; only the key keeps them apart."""
    for rank in range(3):
        tp = Mesh(ParallelDims(tp=3), rank, connect=False).tp
        assert tp.key.split("/")[:3] == ["tp", "3", str(rank)]


def test_an_axis_is_found_while_its_mesh_lives() -> None:
    first, second = Axis("tp", 2, 0, (0, 1)), Axis("tp", 2, 0, (0, 1))
    key = second.key
    assert find(first.key) is first
    assert find(key) is second
    del second
    with pytest.raises(KeyError):
        find(key)
    assert find(first.key) is first
    assert first.key in axis_module._AXES
