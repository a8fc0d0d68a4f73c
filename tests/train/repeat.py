"""A case for the pool: a few steps, so that two runs of them can be held against each other."""

from __future__ import annotations

from torch import Tensor

from fivefold.config.run import RunConfig
from fivefold.mesh.pool_worker import RankContext
from fivefold.tools.verify import run_steps


def three_steps(context: RankContext, config: RunConfig) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and final parameters."""
    outcome = run_steps(config, context.mesh(config.parallel), 3)
    return outcome.losses, outcome.norms, outcome.parameters
