"""Context parallelism counted, not timed: the bytes that attention sends, and the bytes of activations that live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.autograd.graph import get_gradient_edge

from fivefold.config.context import METHODS, costs
from fivefold.config.dims import ParallelDims
from fivefold.config.model import DecoderConfig
from fivefold.config.run import RunConfig
from fivefold.mesh.pool import Pool
from fivefold.mesh.pool_worker import RankContext
from fivefold.observe.recorder import FlightRecorder
from fivefold.train.batch import Batch, Batches
from fivefold.train.state import TrainState

from .live import Live
from .steps import make_state
from .table import Table
from .work import UniformRows, on_one_row

METHODS_OF = {"llama": tuple(m for m in METHODS if m != "latent"), "dsv3": METHODS}
SHORT = 256
"""Tokens of the row whose bytes are counted; bytes grow with it exactly."""
GOAL = 1.10
"""Peak of a rank times ``cp`` over one rank's peak: activations should fall as 1/cp within 10 %."""


def _first_step(config: RunConfig, context: RankContext, recorder: FlightRecorder) -> tuple[TrainState, Batch]:
    state = make_state(config, context.mesh(config.parallel, recorder))
    batches = Batches(UniformRows(1, config.data.sequence_length), state.config, state.mesh)
    batch = batches.batch(batches.rows(1))
    batches.close()
    return state, batch


# ---- bytes that attention sends --------------------------------------------------------------------------------------


def attention_bytes(context: RankContext, config: RunConfig) -> tuple[float, float]:
    """Bytes that this rank sends over ``cp`` for one attention layer and row: in forward and in backward."""
    recorder = FlightRecorder()
    state, batch = _first_step(config, context, recorder)
    recorder.clear()
    state.executor.step(batch.microbatches)
    assert isinstance(config.model, DecoderConfig)
    sent = {"forward": 0, "backward": 0}
    for event in recorder.events:
        if event.axis == "cp" and event.scope.module.endswith("attention"):
            sent[event.scope.phase] += event.sent
    return sent["forward"] / config.model.n_layers, sent["backward"] / config.model.n_layers


def measure_bytes(layouts: Sequence[str], say: Callable[[str], None]) -> Table:
    """A row for each model, layout and method."""
    table = Table(f"Bytes that a rank sends for one attention layer and row of {SHORT} tokens, float32",
                  ("model", "layout", "method", "forward", "backward", "closed form of both", "equal"))  # fmt: skip
    for layout in layouts:
        dims = ParallelDims.parse(layout)
        with Pool(dims.world) as pool:
            for model, methods in METHODS_OF.items():
                for method in methods:
                    say(f"bytes: {model} {layout} {method}")
                    config = on_one_row(model, layout, method, SHORT)
                    ranks, closed = pool.run(attention_bytes, config), costs(config, dims)[method].sent_bytes
                    equal = all(sum(both) == closed for both in ranks)
                    table.add(model, layout, method, *(f"{x:,.0f}" for x in (*ranks[0], closed)),
                              "yes" if equal else "NO")  # fmt: skip
    return table


# ---- bytes of activations --------------------------------------------------------------------------------------------


def counted(model: str, layout: str, method: str, length: int, recompute: str = "none") -> RunConfig:
    """A run whose parameters stay gathered between microbatches."""
    config = on_one_row(model, layout, method, length)
    train = config.train.model_copy(update={"recompute": recompute, "zero": 1, "small_buffer": 0})
    return config.model_copy(update={"train": train})


def peak_bytes(context: RankContext, config: RunConfig) -> int:
    """Peak bytes of tensors on this rank in a microbatch, beyond what lives before it.

    It is the second of a step: parameters are gathered and stay so, and the sums of gradients live already. So what is
    counted is activations, what attention has in hand, and the gradients of one matrix at a time.

    Args:
        config: of ``counted``.
    """
    with Live() as live:
        state, batch = _first_step(config, context, FlightRecorder())
        (stage,), (microbatch,) = state.stages.values(), batch.microbatches
        stage.begin()
        for _ in range(2):
            before = live.peak = live.now
            loss = stage.forward(None, microbatch)
            edge, seed = get_gradient_edge(loss), torch.ones_like(loss)
            del loss
            stage.backward(edge, seed)
            del edge
    return live.peak - before


def measure_memory(models: Sequence[str], lengths: Sequence[int], ranks: Sequence[int],
                   say: Callable[[str], None]) -> Table:  # fmt: skip
    """A row for each model, method and way of recomputing, and length."""
    columns = [title for n in ranks[1:] for title in (f"cp{n} MiB", f"x{n} / cp1")]
    table = Table("Peak bytes of activations of the rank that has most, one row, float32",
                  ("model", "recompute", "tokens", "method", "cp1 MiB", *columns, "goal"))  # fmt: skip
    pools = {n: Pool(n) for n in ranks}
    try:
        for model in models:
            for recompute in ("none", "full"):
                for length in lengths:
                    largest = partial(_largest, pools, model, recompute, length, say)
                    one = largest(1, METHODS_OF[model][0])
                    for method in METHODS_OF[model]:
                        found = {n: largest(n, method) for n in ranks if n > 1}
                        cells = [cell for n, x in found.items() for cell in (_mib(x), f"{n * x / one:.3f}")]
                        goal = "" if method == "all_gather" else f"{GOAL:.2f}"
                        table.add(model, recompute, f"{length:,}", method, _mib(one), *cells, goal,
                                  data={"bytes": {1: one, **found}})  # fmt: skip
    finally:
        for pool in pools.values():
            pool.close()
    return table


def _largest(pools: dict[int, Pool], model: str, recompute: str, length: int, say: Callable[[str], None], n: int,
             method: str) -> int:  # fmt: skip
    say(f"memory: {model} {recompute} {length} cp{n} {method}")
    config = counted(model, f"cp{n}" if n > 1 else "single", method, length, recompute)
    return max(pools[n].run(peak_bytes, config))


def _mib(n: int) -> str:
    return f"{n / 2**20:.1f}"
