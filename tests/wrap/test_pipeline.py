"""The executor over ranks: bit-equal gradients, memory, messages, other tables in mid run, and what goes wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from fivefold.config.parts import PipelineConfig
from fivefold.config.run import RunConfig
from fivefold.mesh.pool import Pool, PoolError
from fivefold.observe.spans import Span
from fivefold.schedule.named import NAMES, build
from fivefold.schedule.simulate import simulate
from fivefold.schedule.table import Action, Table, needs, owners, split_backwards
from fivefold.tools.compare import relative_error
from tests.parity.grid import row
from tests.parity.pipelines import OWN

from . import pipeline_cases as cases

Pools = Callable[[int], Pool]
UPSIDE_DOWN = f"{OWN}:upside_down"


@pytest.fixture(scope="module")
def alone(pool: Pools) -> Callable[[RunConfig], cases.Stepped]:
    """The same microbatches on one rank by the same executor: gradient accumulation."""
    found: dict[str, cases.Stepped] = {}

    def of(config: RunConfig) -> cases.Stepped:
        one = config.model_copy(update={"parallel": "single", "pipeline": PipelineConfig()})
        key = one.model_dump_json()
        if key not in found:
            found[key] = pool(1).run(cases.stepped, one)[0]
        return found[key]

    return of


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", [*NAMES, UPSIDE_DOWN], ids=lambda s: s.rpartition("/")[2])
def test_every_schedule_gives_one_ranks_gradients_bit_for_bit(
    pool: Pools, alone: Callable[[RunConfig], cases.Stepped], schedule: str, recompute: str
) -> None:
    """On 2 and 4 ranks, experts on every stage: a stage adds its microbatches up in one order, whatever the table."""
    for layout, model in (("pp2", "moe_q"), ("pp4", "moe")):
        config = row(layout, model, 1, 4, recompute, schedule).config
        one = alone(config)
        ranks: list[cases.Stepped] = pool(config.dims.world).run(cases.stepped, config)
        assert sum(r.loss for r in ranks) == one.loss > 0
        assert sum(r.loss != 0 for r in ranks) == 1
        for name, gradient in one.gradients.items():
            assert torch.equal(ranks[0].gradients[name], gradient), name


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_split", "zb_v", "looped_bfs"])
def test_a_tied_embedding_is_equal_to_rounding(
    pool: Pools, alone: Callable[[RunConfig], cases.Stepped], schedule: str
) -> None:
    """Two uses of one matrix may be added up in another order; all else stays bit-equal."""
    config = row("pp2", "dense", 1, 4, "none", schedule, True).config
    one = alone(config)
    found: cases.Stepped = pool(2).run(cases.stepped, config)[0]
    for name, gradient in one.gradients.items():
        limit = 1e-15 if name == "embed.weight" else 0.0
        assert relative_error(found.gradients[name], gradient) <= limit, name


@pytest.mark.parametrize("model", ["moe_q", "dense"])
def test_recompute_defers_the_same_weight_gradients_once(pool: Pools, model: str) -> None:
    """As many jobs wait with recompute as without: all matrices' but the router's, for every microbatch."""
    jobs = [[r.jobs for r in pool(2).run(cases.stepped, row("pp2", model, 1, 3, mode, "zb_h1").config)]
            for mode in ("none", "full", "ops", "every-2")]  # fmt: skip
    assert jobs[0] == jobs[1] == jobs[2] == jobs[3] and min(jobs[0]) > 0
    if model == "dense":  # q, k, v, out, gate, up, down of each layer, and embedding or head
        assert jobs[0] == [3 * (7 * 3 + 1), 3 * (7 * 2 + 1)]
    whole = pool(2).run(cases.stepped, row("pp2", model, 1, 3, "none", "1f1b").config)
    assert [r.jobs for r in whole] == [0, 0]


def test_the_table_may_change_from_step_to_step(pool: Pools) -> None:
    """The stages stay where they are; the losses and the parameters do not know."""
    config = row("pp2-fsdp2", "moe", 1, 6, "full", "1f1b").config
    steady, same = pool(4).run(cases.trained, config, ("1f1b",) * 4)[0]
    losses, found = pool(4).run(cases.trained, config, ("gpipe", "zb_h2", f"{OWN}:weights_last", "zb_h1"))[0]
    assert losses == steady and all(torch.equal(found[name], same[name]) for name in same)


# ---- memory ----------------------------------------------------------------------------------------------------------

HELD = [("pp2", "1f1b"), ("pp4", "1f1b"), ("pp4", "gpipe"), ("pp4", "zb_h1"), ("pp4", "zb_h2"), ("pp4", "zb_v"),
        ("pp2", "dualpipe_v"), ("pp2", "interleaved_split"), ("pp2", "looped_bfs")]  # fmt: skip


@pytest.mark.parametrize(("layout", "name"), HELD)
def test_what_a_rank_holds_is_what_the_simulation_says(pool: Pools, layout: str, name: str) -> None:
    """Activations are freed by B, or by W where that waits; messages are not kept beyond the two under way."""
    n, world = 8, int(layout[2:])
    expected = simulate(build(name, world, n)).peak
    found: list[cases.Memory] = pool(world).run(cases.memory, layout, name, n)
    assert tuple(m.peak for m in found) == expected
    for m in found:
        assert m.left == 0
        assert m.received <= m.peak
        assert m.sent <= 3  # two under way and the one just posted


@pytest.mark.parametrize("name", NAMES)
def test_hand_made_stages_give_one_ranks_gradients(pool: Pools, name: str) -> None:
    """By torch's own autograd over the whole chain."""
    table = build(name, 3, 5)
    ranks = pool(3).run(cases.run_parts, "pp3", name, 5)
    found = {stage: g for of in ranks for stage, g in of.items()}
    assert sorted(found) == list(range(len(owners(table))))
    weights = [cases.Part(None, s, 9, cases.unchanged).weight for s in sorted(found)]  # type: ignore[arg-type]
    for mb in cases.microbatches(5):
        y = mb.tokens
        for w in weights:
            y = y @ w.t()
        y.square().sum().backward()
    for s, w in enumerate(weights):
        assert w.grad is not None and relative_error(found[s], w.grad) < 1e-13


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "schedule"), [("pp2", "1f1b"), ("pp4", "interleaved"), ("pp4", "zb_v"),
                                                  ("pp2-tp2", "zb_h1"), ("pp2-fsdp2", "dualpipe_v"),
                                                  ("pp4", "gpipe")])  # fmt: skip
def test_the_messages_are_those_derived_in_their_order(pool: Pools, layout: str, schedule: str) -> None:
    """Each once, in the global order, with its bytes; what activations are like is told in the first step alone."""
    config = row(layout, "moe", 1, 3, "none", schedule).config
    ranks: list[cases.Posted] = pool(config.dims.world).run(cases.posted, config)
    for r in ranks:
        assert r.seen == r.derived and r.seen
        assert r.first == len(r.seen) + r.forms
    sent = [sum(n for op, n, *_ in r.seen if op == "send") for r in ranks]
    received = [sum(n for op, n, *_ in r.seen if op == "receive") for r in ranks]
    assert sum(sent) == sum(received)
    stages = len(owners(build(schedule, config.dims.pp, 3)))
    crossings = sum(a != b for a, b in pairwise(owners(build(schedule, config.dims.pp, 3))))
    assert crossings <= stages - 1
    evaluated = [m for r in ranks for m in r.evaluated]
    assert len(evaluated) == 2 * crossings * 3 * (config.dims.world // config.dims.pp)  # one way, both ends
    assert len([m for r in ranks for m in r.seen]) == 2 * len(evaluated)


# ---- the timeline ----------------------------------------------------------------------------------------------------


def check_order(table: Table, ranks: dict[int, list[Span]]) -> None:
    """Each rank runs its actions in the table's order, none before those it needs have ended anywhere."""
    n, split = len(owners(table)), split_backwards(table)
    span = {Action(s.kind, s.stage, s.microbatch): s for of in ranks.values() for s in of if s.kind in "FBIW"}  # type: ignore[arg-type]
    for rank, order in enumerate(table):
        ran = [s.name for s in sorted(ranks[rank], key=lambda s: s.begin) if s.kind in "FBIW"]
        assert ran == [str(a) for a in order]
        for before, after in pairwise(order):
            assert span[before].end <= span[after].begin
        for action in order:
            for needed in needs(action, n, split):
                assert span[needed].end <= span[action].begin + 1e-6, (needed, action)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h2", "zb_v"])
def test_actions_run_as_the_simulation_plays_them(pool: Pools, name: str) -> None:
    """With stages that sleep, so that ranks do not contend for a core. Clocks of one host agree between processes."""
    table = build(name, 4, 6)
    ranks = {rank: [Span(*s) for s in found] for rank, found in pool(4).run(cases.spans, "pp4", name, 6, 0.002)}
    check_order(table, ranks)
    simulated = simulate(table)
    for rank, order in enumerate(table):  # a rank's own actions never overlap, so both have one order
        assert order == sorted(order, key=lambda a: simulated.start[a])
        assert all(s.begin <= s.end for s in ranks[rank])
        assert [s.kind for s in ranks[rank]].count("step") == 1


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shape", r"stage 0 returned torch\.float64 of shape \(2, 2\), after torch\.float64 of shape \(2, 3\) for a "
                  "microbatch of the same shape. Return the same shape and dtype for both"),
        ("dtype", r"stage 0 returned torch\.float32 of shape \(2, 3\), after torch\.float64 of shape \(2, 3\) for"),
        ("complex", r"stage 0 returned torch\.complex128 of shape \(2, 3\)\. Return one of torch\.float32, torch\."),
        ("dims", r"stage 0 returned torch\.float64 of shape \(2, 3, 1, 1, 1, 1, 1, 1, 1\)\. .* with at most 8 dims"),
    ],
)  # fmt: skip
def test_an_output_that_changes_or_cannot_travel_is_named(what: str, said: str) -> None:
    with Pool(2, timeout_s=20) as own, pytest.raises(PoolError, match=said) as caught:
        own.run(cases.changing, "pp2", what)
    assert caught.value.kind == "TypeError" and caught.value.rank == 0


def test_microbatches_may_differ_in_shape(pool: Pools) -> None:
    one = pool(1).run(cases.of_other_sizes, "single")[0]
    first, _ = pool(2).run(cases.of_other_sizes, "pp2")
    assert len(one) == len(first) == 2


LIMIT_S = 1.0


@pytest.mark.parametrize(
    ("name", "where", "said"),
    [  # what each rank says of the neighbour it waits for, from the first rank on; None where it sleeps
        ("1f1b", (2, 1), [r"rank 0 waited at B0\.1 for the gradient from B1\.1 of rank 1: ",
                          r"rank 1 waited at B1\.1 for the gradient from B2\.1 of rank 2", None]),
        ("1f1b", (0, 1), [None, r"rank 1 waited at F1\.1 for the activation from F0\.1 of rank 0",
                          r"rank 2 waited at F2\.1 for the activation from F1\.1 of rank 1"]),
        ("gpipe", (1, 0), [r"rank 0 waited at F0\.2 for rank 1 to take its result: ", None,
                           r"rank 2 waited at F2\.0 for the activation from F1\.0 of rank 1"]),
    ],
)  # fmt: skip
def test_a_rank_that_hangs_is_named_by_those_who_wait(name: str, where: Any, said: list[str | None]) -> None:
    with Pool(3, timeout_s=30) as own:
        found: list[cases.Stuck] = own.run(cases.absent, "pp3", name, 6, where, LIMIT_S, 2.5)
    for stuck, expected in zip(found, said, strict=True):
        if expected is not None:
            assert stuck.waited_s < 20  # and not the group's 30
            assert re.match(expected, stuck.message), stuck.message
            assert stuck.at.replace(", waiting", "") in stuck.message  # what its progress tells others meanwhile


@pytest.mark.parametrize("where", [(2, 1), (0, 1)])
def test_a_rank_that_dies_is_named_at_once(where: Any) -> None:
    with Pool(3, timeout_s=30) as own, pytest.raises(PoolError) as caught:
        own.run(cases.absent, "pp3", "1f1b", 6, where, 20.0, 0.0)
    assert caught.value.kind == "death" and caught.value.rank == where[0]
    (neighbour,) = [line for line in str(caught.value).splitlines() if line.startswith("rank 1 failed too")]
    assert "MessageError: rank 1 waited at " in neighbour
    assert f"of rank {where[0]}: " in neighbour or f"for rank {where[0]} to take its result: " in neighbour
