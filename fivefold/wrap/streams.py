"""Where the engine's gathers and reductions run: on CUDA beside the computation, on CPU in the transport's threads."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class Streams:
    """A stream for parameter gathers and one for gradient reductions; on a device without streams, nothing."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._gather = torch.cuda.Stream(device) if cuda else None
        self._reduce = torch.cuda.Stream(device) if cuda else None

    def gather(self) -> AbstractContextManager[object]:
        """Run the block's kernels on the gather stream, after everything queued on the current one so far.

        A buffer that is filled there was freed by a computation queued earlier, so the wait keeps its memory safe.
        """
        return self._after_current(self._gather)

    def reduce(self, *used: Tensor) -> AbstractContextManager[object]:
        """Run the block's kernels on the reduce stream, after the current one; ``used`` live until they are done."""
        if self._reduce is not None:
            for x in used:
                x.record_stream(self._reduce)
        return self._after_current(self._reduce)

    def join_reduce(self) -> None:
        """Make the current stream wait for every reduction."""
        if self._reduce is not None:
            torch.cuda.current_stream(self._reduce.device).wait_stream(self._reduce)

    @staticmethod
    def _after_current(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        return torch.cuda.stream(stream)
