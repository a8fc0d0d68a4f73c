"""How attention reaches keys that other ranks of ``cp`` hold: the methods by name.

A method is a function of the rank's :class:`~fivefold.mesh.run.Run` that returns a :class:`.base.ContextAttention`.
"""

from __future__ import annotations

from collections.abc import Callable

from ...config import locate
from ...config.errors import ConfigError
from ...mesh.run import Run
from .base import ContextAttention
from .blockwise import AllGatherAttention, LatentRing, RingAttention
from .local import LocalAttention
from .ulysses import Ulysses

METHODS: dict[str, Callable[[Run], ContextAttention]] = {
    "ring": RingAttention,
    "all_gather": AllGatherAttention,
    "ulysses": Ulysses,
    "latent": LatentRing,
}


def context_attention(run: Run) -> ContextAttention:
    """The method that ``run.context`` names, or points to as ``path/file.py:function``; none at size 1.

    Raises:
        ConfigError: if a user's function returns no method.
    """
    if run.mesh.cp.size == 1:
        return LocalAttention()
    if run.context in METHODS:
        return METHODS[run.context](run)
    own = locate.function(run.context, "context.method")(run)
    if not isinstance(own, ContextAttention):
        raise ConfigError([f"context.method={run.context} returns {own!r}, which has no prepare and attend. Return an "
                           "object with both."])  # fmt: skip
    return own
