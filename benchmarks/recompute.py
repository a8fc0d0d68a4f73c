"""What each way of recomputing keeps, repeats and sends again: ``python -m benchmarks.recompute``.

Counted, not timed, on one rank of ``fsdp2-tp2`` in this process's pool: bytes of activations alive between forward and
backward, FLOPs of a step's matmuls and attention, and collectives that a recompute repeats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

from fivefold.config.run import RunConfig
from fivefold.data.synthetic import Synthetic
from fivefold.mesh.pool import Pool
from fivefold.mesh.pool_worker import RankContext
from fivefold.observe.recorder import FlightRecorder
from fivefold.recipes import load
from fivefold.train.batch import Batches
from fivefold.train.state import build_state

from .live import Live

LAYOUT = "fsdp2-tp2"
MODES = ("none", "every-2", "ops", "full")


@dataclass(frozen=True)
class Cost:
    """One mode's counts, of one rank and one step."""

    kept_bytes: int
    flops: int
    collectives: int
    repeated: int
    repeated_bytes: int


def measure(context: RankContext, config: RunConfig) -> Cost:
    """Run one microbatch forward, look at what is alive, then backward."""
    recorder = FlightRecorder()
    mesh = context.mesh(LAYOUT, recorder)
    state = build_state(config, mesh)
    stage = state.stages[0]
    source = Synthetic(config.model.vocab_size, config.data.sequence_length, config.data.batch_size, 0)
    batches = Batches(source, config, mesh)
    microbatch = batches.batch(batches.rows(1)).microbatches[0]
    batches.close()
    stage.begin()
    for buffer in stage.buffers:
        buffer.unshard()  # so that gathered parameters do not count as activations
    recorder.clear()
    flops = FlopCounterMode(display=False)
    with flops:
        with Live() as live:
            loss = stage.forward(None, microbatch)
            kept = live.now
        stage.backward(get_gradient_edge(loss), torch.ones_like(loss), last=True)
    stage.finish()
    activations = [e for e in recorder.events if e.scope.phase in ("forward", "backward", "recompute")]
    again = [e for e in activations if e.scope.phase == "recompute"]
    return Cost(kept, flops.get_total_flops(), len(activations), len(again), sum(e.sent for e in again))


def main() -> None:
    """Print the table."""
    config = load("moe_demo").config
    data = config.data.model_copy(update={"batch_size": 8})
    config = config.model_copy(update={"parallel": LAYOUT, "data": data})
    costs = {}
    with Pool(4, timeout_s=120) as pool:
        for mode in MODES:
            train = config.train.model_copy(
                update={"recompute": mode, "dtype": "float32", "zero": 1, "small_buffer": 0}
            )
            costs[mode] = pool.run(measure, config.model_copy(update={"train": train}))[0]
    table = Table(
        title="moe_demo, fsdp2-tp2, 4 sequences of 256 a rank, fp32: one rank, one step", title_justify="left"
    )
    for column in ("train.recompute", "kept MiB", "of none", "FLOPs of none", "collectives repeated", "KiB sent again"):
        table.add_column(column, justify="right")
    plain = costs["none"]
    for mode, c in costs.items():
        table.add_row(mode, f"{c.kept_bytes / 2**20:.1f}", f"{c.kept_bytes / plain.kept_bytes:.2f}",
                      f"{c.flops / plain.flops:.3f}", f"{c.repeated} of {plain.collectives}",
                      f"{c.repeated_bytes / 1024:,.0f}")  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
