"""What the engine moves and holds: every gather and reduction of a step is counted, with its bytes, dtype and order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from fivefold.config.run import RunConfig
from fivefold.mesh.pool import Pool
from tests.parity.grid import row

from . import cases

Pools = Callable[[int], Pool]
Events = list[dict[str, Any]]
PARTS = ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "head"]


def recorded(pool: Pools, config: RunConfig, steps: int = 1) -> list[cases.Traffic]:
    return pool(config.dims.world).run(cases.traffic, config, steps)


def of_phase(t: cases.Traffic, phase: str) -> Events:
    return [e for e in t.events if e["scope"]["phase"] == phase]


def gathers_per_step(unit: str, zero: int, microbatches: int, kept: tuple[str, ...]) -> int:
    """How often a unit is gathered: ZeRO 3 needs it for each forward and again for each backward, but for the last
    part, whose backward follows at once, and the embedding, whose backward reads no values."""
    if zero < 3 or unit in kept:
        return 1
    return microbatches * (1 if unit in ("head", "embed") else 2)


def check_traffic(t: cases.Traffic, zero: int, microbatches: int, kept: tuple[str, ...] = ()) -> None:
    """Calls and bytes of a step equal their closed forms, unit by unit."""
    gathers, reductions = Counter(), Counter()
    for unit, n, shard, item, trains in t.buffers:
        whole = n * shard
        if n > 1:
            times = gathers_per_step(unit, zero, microbatches, kept)
            gathers[unit, "all_gather", (n - 1) * whole * item // n] += times
        if n > 1 and trains:
            times = 1 if zero == 1 or unit in kept else microbatches
            reductions[unit, "reduce_scatter", (n - 1) * whole * t.reduce_bytes // n] += times
        if t.ddp > 1 and trains:
            reductions[unit, "all_reduce", 2 * (t.ddp - 1) * shard * t.reduce_bytes // t.ddp] += 1
    for phase, expected in (("gather", gathers), ("reduce", reductions)):
        found = Counter((e["scope"]["module"], e["op"], e["sent"]) for e in of_phase(t, phase))
        assert found == expected


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("layout", ["fsdp2", "ddp2", "tp2", "ddp2-fsdp2"])
def test_calls_and_bytes_of_the_engine(pool: Pools, layout: str, zero: int, microbatches: int) -> None:
    for t in recorded(pool, row(layout, "moe", zero, microbatches).config, steps=2):
        check_traffic(t, zero, microbatches)


@pytest.mark.parametrize("recompute", ["full", "ops"])
def test_recompute_gathers_no_parameters_again(pool: Pools, recompute: str) -> None:
    for t in recorded(pool, row("fsdp2", "dense", 3, 2, recompute).config):
        check_traffic(t, 3, 2)


def test_a_tied_embedding_and_small_parameters_move_once_a_step(pool: Pools) -> None:
    for t in recorded(pool, row("fsdp2", "dense", 3, 2, model__tied=True).config):
        check_traffic(t, 3, 2, kept=("embed",))
    for t in recorded(pool, row("fsdp2", "moe", 3, 2, train__small_buffer=10**6).config):
        assert {b[0] for b in t.buffers} == {"small"}
        check_traffic(t, 3, 2, kept=("small",))


def test_frozen_parameters_are_gathered_and_not_reduced(pool: Pools) -> None:
    for t in recorded(pool, row("fsdp2", "moe", 2, 1, model__builder="tests.parity.frozen:build").config):
        check_traffic(t, 2, 1)
        assert any(not trains for *_, trains in t.buffers)
        assert not any(e["scope"]["module"] in ("embed", "layers.0") for e in of_phase(t, "reduce"))


def test_the_bytes_are_those_of_all_parameters(pool: Pools) -> None:
    """ZeRO 1 on n ranks gathers and reduces (n-1)/n of everything, padding included, whatever the units."""
    config = row("fsdp4", "dense").config
    for t in recorded(pool, config):
        whole = sum(n * shard for _, n, shard, _, _ in t.buffers)
        for phase in ("gather", "reduce"):
            assert sum(e["sent"] for e in of_phase(t, phase)) == 3 * whole // 4 * 8
            assert sum(e["received"] for e in of_phase(t, phase)) == 3 * whole // 4 * 8


def first(events: Events, **wanted: str) -> int:
    """Place of the first event whose scope has these."""
    return next(i for i, e in enumerate(events) if all(e["scope"][k] == v for k, v in wanted.items()))


def computes(events: Events, part: str, phase: str) -> int:
    """Place of the first collective that a part itself calls in this phase."""
    scopes = [e["scope"] for e in events]
    return next(i for i, s in enumerate(scopes) if s["phase"] == phase and s["module"].startswith(part))


@pytest.mark.parametrize("zero", [1, 3])
def test_the_next_unit_is_gathered_before_this_one_computes(pool: Pools, zero: int) -> None:
    """A block's own collectives under tp show when it computes. Forward goes up, backward down."""
    for t in recorded(pool, row("fsdp2-tp2", "dense", zero).config):
        for unit, following in pairwise(PARTS[1:]):
            assert first(t.events, phase="gather", module=following) < computes(t.events, unit, "forward")
        for unit, below in pairwise(reversed(PARTS[1:-1])):
            buffers = sum(b[0] == below and b[1] > 1 for b in t.buffers)
            before = t.events[: computes(t.events, unit, "backward")]
            gathers = [e for e in before if e["scope"]["module"] == below and e["scope"]["phase"] == "gather"]
            assert len(gathers) == (2 if zero == 3 else 1) * buffers


def test_events_name_stage_and_microbatch(pool: Pools) -> None:
    for t in recorded(pool, row("fsdp2-tp2", "dense", 3, 2).config):
        for e in t.events:
            if e["scope"]["phase"] in ("forward", "backward"):
                assert e["scope"]["stage"] == 0 and e["scope"]["microbatch"] in (0, 1)
                assert e["scope"]["module"].startswith(tuple(PARTS))
        for phase in ("forward", "backward"):
            seen = Counter(e["scope"]["microbatch"] for e in of_phase(t, phase))
            assert seen[0] == seen[1] > 0


def test_reductions_run_beside_the_backward_before(pool: Pools) -> None:
    """A unit's reduction is posted before the unit below it computes its backward."""
    for t in recorded(pool, row("fsdp2-tp2", "dense", 3).config):
        for unit, below in zip(PARTS[2:-1], PARTS[1:-2], strict=True):
            assert first(t.events, phase="reduce", module=unit) < computes(t.events, below, "backward")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_is_gathered_while_a_part_runs(pool: Pools, zero: int) -> None:
    """ZeRO 3 holds the running unit alone (the next is on its way); the others keep what they gathered."""
    for t in recorded(pool, row("fsdp2", "moe", zero).config):
        for i, name in enumerate(PARTS):
            expected = [j <= i if zero < 3 else j == i for j in range(len(PARTS))]
            assert t.held[name] == expected


PRECISIONS = {
    "mixed": {"train__dtype": "bfloat16"},
    "pure": {"train__dtype": "bfloat16", "train__master_dtype": "bfloat16"},
    "bf16 sums": {"train__dtype": "bfloat16", "train__reduce_dtype": "bfloat16"},
    "plain": {"train__dtype": "float32"},
}
GATHERED = {"mixed": "bfloat16", "pure": "bfloat16", "bf16 sums": "bfloat16", "plain": "float32"}
REDUCED = {"mixed": "float32", "pure": "bfloat16", "bf16 sums": "bfloat16", "plain": "float32"}
MASTER = {"mixed": "float32", "pure": "bfloat16", "bf16 sums": "float32", "plain": "float32"}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", ["single", "ddp2", "fsdp2", "tp2", "fsdp2-tp2"])
def test_dtypes_are_those_asked_for(pool: Pools, layout: str, precision: str) -> None:
    """At the transport, in the optimizer and between parts; and training follows float64's losses within rounding."""
    config = row(layout, "moe", 3, 2, **PRECISIONS[precision]).config
    exact = recorded(pool, row("single", "moe").config, steps=3)[0].losses
    for t in recorded(pool, config, steps=3):
        assert {e["dtype"] for e in of_phase(t, "gather")} <= {GATHERED[precision]}
        assert {e["dtype"] for e in of_phase(t, "reduce")} <= {REDUCED[precision]}
        assert bool(of_phase(t, "reduce")) == (layout != "single")
        assert bool(of_phase(t, "gather")) == (layout not in ("single", "ddp2"))
        activations = [e for e in t.events if e["states"] in ("S(1)->R", "P->S(1)")]
        assert {e["dtype"] for e in activations} <= {GATHERED[precision]}
        assert bool(activations) == ("tp" in layout)
        assert t.state_dtypes == {MASTER[precision]}
        assert {t.dtypes[name] for name in PARTS[:-1]} == {GATHERED[precision]} and t.dtypes["head"] == "float32"
        limit = 1e-5 if precision == "plain" else 0.02
        assert all(abs(a - b) < limit * b for a, b in zip(t.losses, exact, strict=True))
