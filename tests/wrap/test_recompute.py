"""What each recompute policy keeps and repeats, and that what leaves a part aside happens once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from benchmarks.live import Live
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool import Pool
from fivefold.mesh.run import Run
from fivefold.observe.recorder import FlightRecorder
from fivefold.train.state import build_state
from fivefold.wrap.recompute import SaveList, chosen, recompute
from tests.parity.grid import row

from . import cases

Pools = Callable[[int], Pool]


def kept_bytes(model: str, mode: str) -> int:
    """Bytes that one microbatch's forward leaves for its backward."""
    config = row("single", model, 1, 1, mode).config
    mesh = Mesh.single()
    stage = cases.stage_of(build_state(config, mesh))
    batches = cases.batches(config, mesh)
    (microbatch,) = batches.batch(batches.rows(1)).microbatches
    batches.close()
    stage.forward(None, microbatch)  # fills the microbatch's own cache
    with Live() as live:
        loss = stage.forward(None, microbatch)
        kept = live.now
    loss.backward()
    return kept


@pytest.mark.parametrize("model", ["moe", "dense"])
def test_kept_bytes_fall(model: str) -> None:
    none, every_2, ops, full = (kept_bytes(model, mode) for mode in ("none", "every-2", "ops", "full"))
    assert full < every_2 < none and full < ops < none
    assert full < 0.35 * none
    assert 0.4 * (none + full) < every_2 < 0.6 * (none + full)  # half of the blocks, more or less


@pytest.mark.parametrize(("mode", "expected"), [("none", []), ("full", [0, 1, 2, 3]), ("ops", [0, 1, 2, 3]),
                                                ("every-1", [0, 1, 2, 3]), ("every-2", [1, 3]), ("every-3", [2]),
                                                ("every-5", [])])  # fmt: skip
def test_which_blocks_recompute(mode: str, expected: list[int]) -> None:
    assert [i for i in range(4) if chosen(mode, i)] == expected


REPEATED = {
    ("dense", "none"): {},
    # the last sum of a block is its output, which nobody needs again
    ("dense", "full"): {"all_gather": 2 * 4, "reduce_scatter": 1 * 4},
    ("dense", "every-2"): {"all_gather": 2 * 2, "reduce_scatter": 1 * 2},
    ("dense", "ops"): {},
    ("moe", "ops"): {},
}


@pytest.mark.parametrize(("model", "mode"), REPEATED, ids=lambda x: x)
def test_collectives_that_are_repeated(pool: Pools, model: str, mode: str) -> None:
    for t in pool(2).run(cases.traffic, row("tp2", model, 3, 2, mode).config):
        events = [e for e in t.events if e["scope"]["phase"] == "recompute"]
        both = {op: 2 * n for op, n in REPEATED[model, mode].items()}  # 2 microbatches
        assert Counter(e["op"] for e in events) == both
        assert all(e["scope"]["module"].startswith("layers.") for e in events)


def test_recompute_of_experts_exchanges_no_counts(pool: Pools) -> None:
    for t in pool(2).run(cases.traffic, row("tp2", "moe", 3, 1, "full").config):
        again = [e for e in t.events if e["scope"]["phase"] == "recompute"]
        assert again and {e["op"] for e in again} <= {"all_gather", "reduce_scatter"}  # not the integer sum
        forward = Counter(e["dtype"] for e in t.events if e["scope"]["phase"] == "forward" and e["op"] == "all_reduce")
        assert forward["int64"] == 3  # one a layer of experts


def test_once_runs_in_forward_and_is_read_back_in_recompute() -> None:
    run, calls, store = Run(Mesh.single()), [], []

    def next_value() -> int:
        calls.append(len(calls))
        return calls[-1]

    assert [run.once(next_value) for _ in range(2)] == [0, 1]  # outside: every time
    with run.freeze(store, replay=False):
        forward = [run.once(next_value) for _ in range(3)]
    with run.freeze(store, replay=True):
        again = [run.once(next_value) for _ in range(3)]
    assert forward == again == [2, 3, 4] and len(calls) == 5
    with run.freeze(store, replay=True):  # a second recompute starts from the front
        assert run.once(next_value) == 2
    assert run.once(next_value) == 5


def test_freezing_nests_and_ends_with_an_error() -> None:
    run, outer, inner = Run(Mesh.single()), [], []
    with run.freeze(outer, replay=False):
        run.once(lambda: "a")
        with pytest.raises(ZeroDivisionError), run.freeze(inner, replay=False):
            run.once(lambda: inner.append("b") or 1 / 0)
        run.once(lambda: "c")
    assert (outer, inner) == (["a", "c"], ["b"])
    assert run.once(lambda: "d") == "d" and outer == ["a", "c"]


def test_a_recomputed_function_gives_the_same_gradient_and_runs_twice() -> None:
    run, ran, kept = Run(Mesh.single()), [], []
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        ran.append(1)
        kept.append(run.once(lambda: torch.rand(())))
        return (x.sin() * kept[-1]).exp()

    recompute(fn, run, x).sum().backward()
    value, x.grad = x.grad, None
    assert len(ran) == 2 and kept[0] is kept[1]
    (x.sin() * kept[0]).exp().sum().backward()
    assert torch.equal(value, x.grad)  # type: ignore[arg-type]


def test_the_recompute_runs_under_its_forwards_scope() -> None:
    recorder = FlightRecorder()
    run, seen = Run(Mesh.single(recorder=recorder)), []

    def fn(x: Tensor) -> Tensor:
        seen.append(recorder.scope)
        return x.sin().exp()

    with recorder.at(module="layers.3", phase="forward", microbatch=2):
        y = recompute(fn, run, torch.ones(2, requires_grad=True))
    with recorder.at(phase="backward"):
        y.sum().backward()
    forward, again = seen
    assert (forward.module, forward.phase, forward.microbatch) == ("layers.3", "forward", 2)
    assert (again.module, again.phase, again.microbatch) == ("layers.3", "recompute", 2)


def test_a_policy_of_ones_own_decides_operator_by_operator() -> None:
    seen: list[str] = []

    def policy() -> Callable[..., CheckpointPolicy]:
        def decide(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
            seen.append(str(op))
            return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

        return decide

    run, x = Run(Mesh.single()), torch.randn(3, 3, requires_grad=True)
    (value,) = torch.autograd.grad(recompute(lambda x: (x @ x).sin() @ x, run, x, policy=policy).sum(), x)
    (plain,) = torch.autograd.grad(((x @ x).sin() @ x).sum(), x)
    assert torch.equal(value, plain)
    assert seen[:3] == ["aten.mm.default", "aten.sin.default", "aten.mm.default"]


def test_the_save_list_keeps_every_second_matmul_and_decides_alike_in_recompute() -> None:
    class Context:
        is_recompute = False

    save, again = SaveList(), Context()
    again.is_recompute = True
    aten = torch.ops.aten
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    order = [aten.mm.default, aten.sin.default, aten.mm.default, aten.bmm.default, aten.clone.default, attention]
    forward = [save(Context(), op) == CheckpointPolicy.MUST_SAVE for op in order]
    assert forward == [True, False, False, True, False, True]
    assert [save(again, op) == CheckpointPolicy.MUST_SAVE for op in order] == forward
