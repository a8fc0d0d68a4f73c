"""Fivefold trains large language models on any mix of five parallelisms, and proves that a layout computes what one
device computes.

``from fivefold import RunConfig, ParallelDims, Mesh, verify, train``: two load at once, three with torch.
``train`` is the package of the training run; ``train.run(config)`` runs this process's rank.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .config.dims import ParallelDims
from .config.run import RunConfig

if TYPE_CHECKING:
    from . import train
    from .mesh.mesh import Mesh
    from .tools.verify import verify

__version__ = "0.1.0"
__all__ = ["Mesh", "ParallelDims", "RunConfig", "train", "verify"]


def __getattr__(name: str) -> Any:
    """Load what needs torch when it is first asked for: the command line must not wait for it to report a mistake."""
    homes = {"Mesh": ".mesh.mesh", "verify": ".tools.verify"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(homes[name], __name__), name)
