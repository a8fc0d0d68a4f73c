"""What all layers share: a table of how parameters are cut, and the way to declare them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, cast

import torch
from torch import nn

from ..config.dims import AXES
from ..mesh.parameter import Init, parameter
from ..mesh.run import Run
from ..ops.linear import WeightGradQueue


class Layer(nn.Module):
    """A module whose ``SHARDING`` names, for each parameter, the axis that cuts each of its dims."""

    SHARDING: ClassVar[dict[str, tuple[str | None, ...]]] = {}
    recomputes: ClassVar[bool] = True
    """Whether, as a part, its activations may be computed again in backward."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.tp = run.mesh.tp

    @property
    def queue(self) -> WeightGradQueue | None:
        """Where weight gradients wait while the schedule splits backward; None computes them at once."""
        return cast("WeightGradQueue | None", self.run.queue)

    def declare(self, name: str, shape: tuple[int, ...], init: Init, *, pad: bool = False, decay: bool | None = None,
                embedding: bool = False) -> None:  # fmt: skip
        """Make parameter ``name`` of the whole ``shape``, cut as ``SHARDING`` says.

        Raises:
            ValueError: if ``SHARDING`` does not name it, with one known axis or None a dim, or a dim does not divide.
        """
        cuts, where = self.SHARDING.get(name), f"{type(self).__name__}.SHARDING"
        if cuts is None:
            raise ValueError(f"{where} does not name {name!r}. Add it, with an axis or None for each dim of {shape}")
        if len(cuts) != len(shape) or not {*cuts} <= {*AXES, None}:
            raise ValueError(f"{where}[{name!r}]={cuts} does not fit the dims of {shape}. Give each dim None or one of "
                             f"{', '.join(AXES)}")  # fmt: skip
        p = parameter(self.run.mesh, shape, cuts, init, pad=pad, decay=decay, embedding=embedding)
        self.register_parameter(name, p)


def inside(run: Run, name: str) -> AbstractContextManager[None]:
    """While entered, the recorder reports under ``name`` inside the module it reports under now.

    Nothing in a compiled graph: there the name of each block would be a constant of a graph of its own.
    """
    if torch.compiler.is_compiling() or not run.recorder.on:
        return nullcontext()
    return run.recorder.at(module=f"{run.recorder.scope.module}.{name}".lstrip("."))
