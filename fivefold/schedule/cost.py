"""What an action costs: the prices of the four kinds, from a mapping, a function or text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from ..config.errors import ConfigError
from .table import KINDS, Action

Cost = Mapping[str, float] | Callable[[Action], float]
"""The time of an action in any unit: by kind (a missing B costs I + W), or by action, as when stages differ."""

UNIT: Final[Mapping[str, float]] = MappingProxyType({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})
"""A backward as long as two forwards: each of its two matrix products is as large as the forward's one."""

SMALLEST: Final = 1e-30
"""Of a time that is not 0: sums and ratios of times between this and ``LARGEST`` are finite."""
LARGEST: Final = 1e30


def price(cost: Cost) -> Callable[[Action], float]:
    """The cost of an action as a function."""
    if callable(cost):
        return cost
    by_kind = {"B": cost["I"] + cost["W"], **cost} if "B" not in cost else cost
    return lambda action: by_kind[action.kind]


def read(text: str, key: str) -> tuple[dict[str, float], float]:
    """The prices and the time of a message in ``F=1,I=1,W=1,comm=0.1``; what is left out is as in ``UNIT``, or 0.

    Args:
        key: what the text is called in messages.
    Returns: the cost of each kind, B being I + W unless given; and of a message between ranks.
    Raises:
        ConfigError: if a name is none of these or given twice, or its number is negative, not finite or beyond bounds.
    """
    found: dict[str, float] = {}
    problems = []
    choices = ", ".join([*KINDS, "comm"])
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, number = (part.strip() for part in entry.partition("="))
        if not equals or name not in (*KINDS, "comm"):
            problems.append(f"{key}={text} has {entry}. Use NAME=NUMBER with a name in [{choices}], as F=1,I=1,W=1.")
        elif name in found:
            problems.append(f"{key}={text} gives {name} twice. Give it once.")
        else:
            found[name] = _number(number)
            if found[name] != 0 and not SMALLEST <= found[name] <= LARGEST:
                problems.append(
                    f"{key}={text} has {entry}. Use 0, or a number from {SMALLEST:g} to {LARGEST:g}, as {name}=1."
                )
    by_kind = {kind: found.get(kind, UNIT[kind]) for kind in ("F", "I", "W")}
    by_kind["B"] = found.get("B", by_kind["I"] + by_kind["W"])
    if not problems and not all(by_kind[kind] > 0 for kind in ("F", "B", "I")):
        problems.append(f"{key}={text} makes an action free. Use F, B and I above 0.")
    if problems:
        raise ConfigError(problems)
    return by_kind, found.get("comm", 0.0)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
