"""torch.compile around a part: the part itself stays as it is, only the call goes through the compiler."""

from __future__ import annotations

import torch
from torch import nn

from .data import Call


def compiled(part: nn.Module, backend: str) -> Call:
    """``part`` compiled by ``backend`` (eager, aot_eager or inductor); ``none`` leaves it.

    Blocks of one shape share one graph. Where a part leaves the graph (a host sync for an expert route), the pieces
    around are compiled.
    """
    if backend == "none":
        return part
    return torch.compile(part.forward, backend=backend, dynamic=False)
