"""How a mistake is planted in a run, and what it must look like from outside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor

from fivefold.config.run import RunConfig
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool_worker import RankContext
from fivefold.tools import verify
from fivefold.tools.verify import Report

from .grid import Row

Plant = Callable[[Mesh], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A planted mistake."""

    name: str
    plant: Plant
    """Makes the mistake on a rank of this mesh while entered."""
    row: Row
    """The smallest row that covers it."""
    wrong: tuple[str, ...]
    """Fields of the report that must show it; errors that must be over the tolerance, booleans that must be false."""
    right: tuple[str, ...] = ()
    """Fields that must not show it: what a test of these alone would miss."""
    worst: str = ""
    """Part of the name of the worst parameter."""
    first: str = ""
    """Beginning of the first difference; ``none`` where every part's output and its gradient are right."""
    raises: str = ""
    """Part of the message with which the package itself refuses it; there is no report then."""


MUTATIONS: dict[str, Mutation] = {}
"""By name; filled by the modules that plant."""


def mutation(
    at: Row, *wrong: str, right: tuple[str, ...] = (), worst: str = "", first: str = "", raises: str = ""
) -> Callable[[Plant], Plant]:
    """Register the decorated function as a mutation that must be found in row ``at``."""

    def register(plant: Plant) -> Plant:
        name = getattr(plant, "__name__", "")
        assert name not in MUTATIONS, name
        MUTATIONS[name] = Mutation(name=name, plant=plant, row=at, wrong=wrong, right=right, worst=worst, first=first,
                                   raises=raises)  # fmt: skip
        return plant

    return register


def planted(context: RankContext, plant: Plant, config: RunConfig, steps: int, tolerance: float,
            documents: bool = True) -> Report | None:  # fmt: skip
    """One rank's part of verifying ``config`` with a mistake in every run but the oracle's."""
    real = verify.run_steps

    def run_steps(config: RunConfig, mesh: Mesh, *args: Any, **kwargs: Any) -> verify.Outcome:
        if config == verify.one_rank(config):
            return real(config, mesh, *args, **kwargs)
        with plant(mesh):
            return real(config, mesh, *args, **kwargs)

    with patch.object(verify, "run_steps", run_steps):
        return verify.verify_rank(context, config, steps, tolerance, documents)


def own_value(x: Tensor, axis: Any) -> Tensor:
    """A sum over ranks that is not one."""
    return x
