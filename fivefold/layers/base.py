"""What all layers share: a table of how parameters are cut, and the way to declare them."""

from __future__ import annotations

from typing import ClassVar, cast

from torch import nn

from ..mesh.parameter import Init, parameter
from ..mesh.run import Run
from ..ops.linear import WeightGradQueue


class Layer(nn.Module):
    """A module whose ``SHARDING`` names, for each parameter, the axis that cuts each of its dims."""

    SHARDING: ClassVar[dict[str, tuple[str | None, ...]]] = {}

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.tp = run.mesh.tp

    @property
    def queue(self) -> WeightGradQueue | None:
        """Where weight gradients wait while the schedule splits backward; None computes them at once."""
        return cast("WeightGradQueue | None", self.run.queue)

    def declare(self, name: str, shape: tuple[int, ...], init: Init, *, pad: bool = False, decay: bool | None = None) -> None:
        """Make parameter ``name`` of the whole ``shape``, cut as ``SHARDING`` says.

        Raises:
            KeyError: if ``SHARDING`` does not name it.
        """
        p = parameter(self.run.mesh, shape, self.SHARDING[name], init, pad=pad, decay=decay)
        self.register_parameter(name, p)
