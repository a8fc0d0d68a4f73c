"""Messages from one rank to another, started now and waited for later: what the pipeline's executor moves.

Two ranks match each other's messages by order, on every transport: what one sends first, the other receives first. NCCL
knows nothing else, and over gloo all messages of an axis bear one tag.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .axis import Axis
from .transport import Handle, report


class _Message:
    """A send or receive under way. Over gloo a wait keeps to the group's present time limit, and not to its first."""

    def __init__(self, work: dist.Work | None, axis: Axis) -> None:
        assert work is not None
        self._work, self._axis = work, axis

    def wait(self) -> None:
        if self._axis.native:
            self._work.wait()
        else:
            assert self._axis.group is not None
            self._work.wait(self._axis.group._get_backend(torch.device("cpu")).options._timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed()


def send(x: Tensor, axis: Axis, to: int, *, tag: int = 0) -> Handle:
    """Start sending contiguous ``x`` to place ``to`` of the axis; the handle keeps ``x`` alive.

    Args:
        tag: tells messages apart that must not wait for each other, where the transport can.
    """
    event = report("send", axis, "S", x, x.numel(), 0, None)
    work = dist.isend(x, axis.ranks[to], axis.group, tag)
    return Handle([_Message(work, axis)], lambda: x, (x,), event)


def receive(out: Tensor, axis: Axis, source: int, *, tag: int = 0) -> Handle:
    """Start receiving contiguous ``out`` from place ``source`` of the axis."""
    event = report("receive", axis, "S", out, 0, out.numel(), None)
    work = dist.irecv(out, axis.ranks[source], axis.group, tag)
    return Handle([_Message(work, axis)], lambda: out, (out,), event)
