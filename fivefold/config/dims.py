"""A layout: how many ranks each parallel axis has. Prints and parses as ``pp2-fsdp4-tp2-ep8``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields

from .errors import ConfigError, divisors, nearest

DENSE = ("pp", "ddp", "fsdp", "cp", "tp")
"""Axes of the dense mesh, slowest link first. Their product is the number of ranks."""
SPARSE = ("pp", "ddp", "efsdp", "ep", "etp")
"""The same ranks read for the experts: ``efsdp*ep*etp = fsdp*cp*tp``."""
AXES = (*DENSE, "ep", "etp")
"""The axes a layout string may name, in the order it prints them."""


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Sizes of the parallel axes; every axis of size 1 is absent.

    Raises:
        ConfigError: if a size is below 1, or ``ep*etp`` does not divide ``fsdp*cp*tp``.
    """

    pp: int = 1
    """Pipeline stages."""
    ddp: int = 1
    """Replicas of the parameters, each with its part of the batch."""
    fsdp: int = 1
    """Ranks that split the batch and store a share of every parameter."""
    cp: int = 1
    """Ranks that split every sequence."""
    tp: int = 1
    """Ranks that split every weight matrix, and the tokens between blocks."""
    ep: int = 1
    """Ranks that split the experts."""
    etp: int = 1
    """Ranks that split each expert's matrices."""

    def __post_init__(self) -> None:
        problems = [
            f"{f.name}={getattr(self, f.name)} is below 1. Use a whole number from 1, or leave {f.name} out."
            for f in fields(self)
            if getattr(self, f.name) < 1
        ]
        if not problems and self.inner % (self.ep * self.etp):
            problems.append(self._expert_problem())
        if problems:
            raise ConfigError(problems)

    def _expert_problem(self) -> str:
        of = f"fsdp*cp*tp={self.inner} (fsdp={self.fsdp}, cp={self.cp}, tp={self.tp})"
        if self.inner % self.ep:
            return f"ep={self.ep} does not divide {of}. Use ep in {divisors(self.inner)}, or change fsdp, cp or tp."
        if self.inner % self.etp:
            return f"etp={self.etp} does not divide {of}. Use etp in {divisors(self.inner)}, or change fsdp, cp or tp."
        legal = divisors(self.inner // self.ep)
        return f"ep*etp={self.ep * self.etp} does not divide {of}. With ep={self.ep} use etp in {legal}."

    @property
    def inner(self) -> int:
        """Ranks of one replica of one pipeline stage: what the sparse axes divide among themselves."""
        return self.fsdp * self.cp * self.tp

    @property
    def efsdp(self) -> int:
        """Ranks that share the storage of one expert slice."""
        return self.inner // (self.ep * self.etp)

    @property
    def data(self) -> int:
        """Ranks among which the sequences of the batch are divided: ``ddp*fsdp``."""
        return self.ddp * self.fsdp

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(getattr(self, a) for a in DENSE)

    def size(self, axis: str) -> int:
        """Size of ``axis``, one of the dense or sparse axes."""
        return int(getattr(self, axis))

    def __str__(self) -> str:
        return "-".join(f"{a}{self.size(a)}" for a in AXES if self.size(a) > 1) or "single"

    @classmethod
    def parse(cls, layout: str, world: int | None = None) -> ParallelDims:
        """The layout that ``layout`` names; ``fsdp*`` takes the ranks of ``world`` that the other axes leave over.

        Raises:
            ConfigError: if the string is not a layout, or ``world`` ranks do not fit it.
        """
        sizes: dict[str, int] = {}
        problems: list[str] = []
        fill = False
        for word in [] if layout == "single" else layout.split("-"):
            match = re.fullmatch(r"([a-z]+)(\d+|\*)", word)
            if not match or match[1] not in AXES or (match[2] == "*" and match[1] != "fsdp"):
                problems.append(_bad_word(layout, word))
            elif match[1] in sizes or (match[1] == "fsdp" and fill):
                problems.append(f"parallel={layout} names {match[1]} twice. Name each axis once.")
            elif match[2] == "*":
                fill = True
            else:
                sizes[match[1]] = int(match[2])
        if problems:
            raise ConfigError(problems)
        if fill:
            sizes["fsdp"] = _left_over(layout, sizes, world)
        dims = cls(**sizes)
        if world is not None and dims.world != world:
            raise ConfigError([_wrong_world(layout, dims, world)])
        return dims


def _bad_word(layout: str, word: str) -> str:
    name = re.match(r"[A-Za-z]*", word)
    close = nearest(name[0].lower() if name else "", AXES)
    hint = f" Did you mean {close}{re.sub(r'[^0-9]', '', word) or '2'}?" if close else ""
    return (
        f"parallel={layout} has '{word}', which is not an axis and a size.{hint} "
        f"Use single, or axes of {', '.join(AXES)} each with a size, joined by '-': pp2-fsdp4-tp2."
    )


def _left_over(layout: str, sizes: dict[str, int], world: int | None) -> int:
    others = math.prod(n for a, n in sizes.items() if a in DENSE)
    if world is None:
        raise ConfigError([f"parallel={layout} leaves fsdp to the number of ranks, which is not known here. "
                           "Give fsdp a size, or start the command under torchrun."])  # fmt: skip
    if others == 0 or world % others:
        product = f"the axes given multiply to {others}, which does not divide the {world} ranks that were started"
        raise ConfigError([f"parallel={layout}: {product}. Use axes whose product is in {divisors(world)}."])
    return world // others


def _wrong_world(layout: str, dims: ParallelDims, world: int) -> str:
    others = dims.world // dims.fsdp
    fix = f" Start {dims.world} ranks"
    fix += f", or use fsdp{world // others}." if world % others == 0 else f", or change the layout to {world} ranks."
    product = "*".join(f"{a}{dims.size(a)}" for a in DENSE if dims.size(a) > 1) or "single"
    return f"parallel={layout} needs {dims.world} ranks ({product}), but {world} were started.{fix}"
