"""The executor: runs this rank's actions of a schedule's table, in order.

Gradient accumulation on one rank is the table of one stage, run by the same code as any pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..mesh.run import Run
from ..schedule.table import Action, Table, last_backwards
from .data import Stage


class Executor:
    """Runs a table over the stages this rank holds.

    Args:
        table: actions of every rank; this rank runs ``table[pp.rank]``.
        stages: this rank's stages by number.
        run: the rank's mesh and stores.
    """

    def __init__(self, table: Table, stages: dict[int, Stage], run: Run) -> None:
        self.order, self.stages, self.run = table[run.mesh.pp.rank], stages, run
        self.n_stages = 1 + max(a.stage for order in table for a in order)
        self._last = last_backwards(self.order)

    def step(self, microbatches: Sequence[Any]) -> Tensor:
        """Forward and backward of every microbatch; gradients end up summed over their data axes.

        Returns:
            The sum of this rank's losses, 0 where another rank holds the last stage. P over ddp, fsdp, cp; I over tp.
        """
        for stage in self.stages.values():
            stage.begin()
        loss = torch.zeros((), device=self.run.mesh.device, dtype=torch.float32)
        held: dict[tuple[int, int], Tensor] = {}
        for action in self.order:
            stage = self.stages[action.stage]
            with self.run.recorder.at(stage=action.stage, microbatch=action.microbatch):
                if action.kind == "F":
                    y = stage.forward(None, microbatches[action.microbatch])
                    held[action.stage, action.microbatch] = y
                    loss = loss + y.detach()
                else:
                    self._backward(action, stage, held.pop((action.stage, action.microbatch)))
        for stage in self.stages.values():
            stage.finish()
        return loss

    def _backward(self, action: Action, stage: Stage, y: Tensor) -> None:
        stage.last_backward = action in self._last
        with self.run.recorder.at(phase="backward"):
            y.backward()
            stage.end_backward()
        stage.last_backward = False

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Any]) -> Tensor:
        """The sum of this rank's losses without backward, gathered parameters kept between microbatches."""
        loss = torch.zeros((), device=self.run.mesh.device, dtype=torch.float32)
        for stage in self.stages.values():
            for microbatch in microbatches:
                loss = loss + stage.forward(None, microbatch)
        return loss
