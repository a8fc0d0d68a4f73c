"""What the engine stores: values, rows, padding, dtypes, frozen and unused parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fivefold.mesh.pool import Pool
from tests.parity.grid import Row, changed, row

from . import cases

Pools = Callable[[int], Pool]
STORED = [
    row("single"),
    row("fsdp2", "moe", 3),
    row("tp2", "moe_q"),
    row("ddp2", "dense"),
    row("fsdp2-tp2", "moe"),
    row("fsdp4", "dense"),
    row("fsdp2-tp2", "moe", train__small_buffer=300),
    row("fsdp2", "dense", train__dtype="float32"),
    row("fsdp2", "moe", train__dtype="bfloat16"),
    row("tp2", "dense", model__tied=True),
]


@pytest.mark.parametrize("row", STORED, ids=str)
def test_what_is_stored_and_gathered(pool: Pools, row: Row) -> None:
    ranks: list[cases.Stored] = pool(row.world).run(cases.stored, row.config)
    for r in ranks:
        assert r.wrong == []
        assert r.capacity - r.elements == r.padding >= 0
        assert all(start % width == 0 and stop % width == 0 and start < stop for _, start, stop, width in r.pieces)
        assert len({name for name, *_ in r.pieces}) == len(r.pieces)  # one interval of each parameter
        assert r.bytes_before == r.bytes_after == 0
        assert r.bytes_gathered == r.whole_bytes
    assert row.world == 1 or any(r.whole_bytes for r in ranks) or row.layout == "ddp2"


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("compute", ["float64", "bfloat16"])
@pytest.mark.parametrize("layout", ["single", "ddp2", "fsdp2", "tp2", "ddp2-fsdp2"])
def test_two_dtypes_unused_and_frozen_in_one_unit(pool: Pools, layout: str, compute: str, microbatches: int) -> None:
    config = row(layout).config
    ranks = pool(config.dims.world).run(cases.mixed, layout, compute, microbatches)
    values = {name: cases.initial(name) for name in ("wide", "narrow", "still")}
    rounded = {name: v.to(getattr(torch, compute)).double() for name, v in values.items()}
    rounded["narrow"] = values["narrow"].float().double()
    factor = sum(1.0 + d + 10 * m for d in range(config.dims.data) for m in range(microbatches))
    factor = factor * config.dims.tp * rounded["still"].sum()  # tp ranks each add a part, here the same one
    for r in ranks:
        assert r.dtypes == {"wide": compute, "narrow": "float32", "idle": compute, "still": compute}
        assert r.buffers == 3
        close = 1e-12 if compute == "float64" else 2e-2
        for name, other in (("wide", "narrow"), ("narrow", "wide")):
            want = factor * rounded[other]
            limit = 1e-6 if name == "narrow" and compute == "float64" else close  # a float32 gradient
            assert (r.gradients[name] - want).abs().max() <= limit * want.abs().max()
        assert not r.gradients["idle"].any()
        assert (r.reduced > 0) == (layout != "single")


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2", "ddp2-fsdp2"])
@pytest.mark.parametrize("zero", [1, 3])
def test_unused_parameters_decay_alike(pool: Pools, layout: str, zero: int) -> None:
    one = pool(1).run(cases.unused_after, row("single", "plain", zero).config, 3)[0]
    config = row(layout, "plain", zero, 2).config
    for found in pool(config.dims.world).run(cases.unused_after, config, 3):
        assert found.keys() == one.keys() and len(one) == 4
        assert all(torch.equal(found[name], one[name]) for name in one)
    still = pool(1).run(cases.unused_after, changed(row("single", "plain").config, "optim.weight_decay", 0.0), 3)[0]
    assert all(torch.equal(still[name], one[name]) == name.endswith("bias") for name in one)  # a bias does not decay
