"""The one error a user's mistake raises, every problem at once, and the phrases its messages share."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence


class ConfigError(ValueError):
    """A configuration that cannot run; ``problems`` holds one message per mistake."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        """Keep the list when an error crosses processes; an exception's own way would pass the joined text."""
        return ConfigError, (self.problems,)


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The choice closest to ``word``, or None when nothing is close."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return found[0] if found else None


def divisors(n: int) -> list[int]:
    """All divisors of ``n``, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def not_multiple(key: str, value: int, factors: Mapping[str, int]) -> list[str]:
    """One message when ``value`` is not a multiple of the product of ``factors``, none when it is.

    Args:
        key: dotted name of the field that holds ``value``.
        factors: the axes or fields it has to be divided by, and their sizes.
    """
    product = math.prod(factors.values())
    if value % product == 0:
        return []
    below = value // product * product
    legal = f"{key}={below} or {below + product}" if below else f"{key}={product}"
    if len(factors) == 1:
        (name, _), rest = next(iter(factors.items())), ""
        change = f"{name} in {divisors(value)}"
    else:
        name, rest = "*".join(factors), f" ({', '.join(f'{n}={size}' for n, size in factors.items())})"
        change = f"change {', '.join(list(factors)[:-1])} or {list(factors)[-1]}"
    return [f"{key}={value} is not a multiple of {name}={product}{rest}. Use {legal}, or {change}."]
