"""What this machine has, found without importing torch or starting CUDA: a parent that forks its ranks must not."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pynvml


def gpu_count(visible: str | None = None) -> int:
    """GPUs that this process's ranks can use.

    Args:
        visible: value of ``CUDA_VISIBLE_DEVICES``, or None when it is not set.
    """
    if not torch_has_cuda():
        return 0
    try:
        pynvml.nvmlInit()
        present = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0
    if visible is None:
        return present
    count = 0
    for word in visible.split(","):  # CUDA stops at the first entry that is no device
        if word.strip().lstrip("-").isdigit() and not 0 <= int(word) < present:
            break
        count += bool(word.strip())
    return min(count, present)


def torch_has_cuda() -> bool:
    """Whether the installed PyTorch was built with CUDA, as its version file says."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    found = re.search(r"^cuda\b[^=\n]*=\s*(.+)$", version.read_text(encoding="utf-8"), re.MULTILINE)
    return found is not None and found[1].strip() != "None"
