"""Peak memory of this process, and snapshots of CUDA's allocator."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

HISTORY_ENTRIES = 100_000
"""Allocations and frees a snapshot remembers, each with its Python stack: a few hundred bytes each."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one rank's device."""

    active_bytes: int
    """Peak of what was in use: of tensors on CUDA, of the process's resident set on a CPU."""
    reserved_bytes: int | None
    """Peak of what the allocator held, fragments included; None on a CPU."""
    retries: int = 0
    """How often, since the process began, the allocator found no room and had to free its cache first."""


class MemoryWatch:
    """Peak memory since the last ``reset``; on a CPU since the process began, for its peak cannot be reset."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._retries = self.read().retries

    def read(self) -> MemoryUse:
        """The peaks so far."""
        if self.device.type != "cuda":
            return MemoryUse(_peak_resident_bytes(), None)
        stats = torch.cuda.memory_stats(self.device)
        return MemoryUse(
            stats.get("active_bytes.all.peak", 0),
            stats.get("reserved_bytes.all.peak", 0),
            stats.get("num_alloc_retries", 0),
        )

    def values(self) -> dict[str, int]:
        """The peaks under their names in the metrics."""
        use = self.read()
        reserved = {} if use.reserved_bytes is None else {"memory_reserved_bytes": use.reserved_bytes}
        return {"memory_bytes": use.active_bytes, **reserved}

    def warning(self) -> str | None:
        """What to say if the allocator had to retry since the last call."""
        use = self.read()
        rose, self._retries = use.retries - self._retries, use.retries
        if rose <= 0:
            return None
        total = torch.cuda.get_device_properties(self.device).total_memory
        return (
            f"The CUDA allocator found no room and freed its cache {rose} times since the last report, which is slow "
            f"(peak in use {use.active_bytes / 2**30:.1f} GiB, reserved {(use.reserved_bytes or 0) / 2**30:.1f} GiB of "
            f"{total / 2**30:.1f} GiB). Use more microbatches, recompute or more sharding."
        )

    def reset(self) -> None:
        """Measure peaks from now on. Does nothing on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)


def _peak_resident_bytes() -> int:
    try:  # ru_maxrss also counts what the process was before exec, such as a large parent
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def record_history(on: bool) -> None:
    """Start or stop remembering allocations with their stacks, for the next snapshot. Does nothing without CUDA."""
    if torch.cuda.is_initialized():
        torch.cuda.memory._record_memory_history("all" if on else None, stacks="python", max_entries=HISTORY_ENTRIES)


def write_snapshot(path: str | Path) -> bool:
    """Write what CUDA's allocator holds, and its history if recorded, for pytorch.org/memory_viz.

    The viewer's format is a pickle. We only ever write it; nothing here reads one.

    Returns:
        Whether there was a CUDA allocator to write about.
    """
    if not torch.cuda.is_initialized():
        return False
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
    return True


@contextmanager
def oom_snapshot(path: str | Path) -> Iterator[None]:
    """Write a snapshot if the block runs out of CUDA memory; the error goes on, with a note of where to look."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        try:
            if write_snapshot(path):
                error.add_note(f"CUDA memory snapshot: {path} (drop it on pytorch.org/memory_viz)")
        except OSError as failure:
            error.add_note(f"no CUDA memory snapshot: {failure}")
        raise
