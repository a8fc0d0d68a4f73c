"""The parameters of a rank's parts: which there are, who uses each, and which of them can share a buffer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ..mesh.axis import Axis
from ..mesh.parameter import ParamSpec, spec_of
from ..mesh.run import Run

Key = tuple[Axis, str, bool, torch.dtype | None]
"""What parameters in one buffer have in common: storage axis, name if another rank has it too (it is then alone, so
that both ranks have the same buffer; empty for all others), trainable, own compute dtype."""


@dataclass(frozen=True)
class Entry:
    """A parameter as modules declare it."""

    name: str
    """Name it is stored under: its own, or that which tied parameters share."""
    parameter: nn.Parameter
    spec: ParamSpec
    uses: list[tuple[nn.Module, str]]
    """Modules of this rank that have it, and as which attribute."""
    original: bool
    """Whether this is the one copy that counts, in the gradient norm and wherever parameters are saved."""


@dataclass
class Entries:
    """All parameters of a rank's parts, each once."""

    groups: dict[str, dict[Key, list[Entry]]] = field(default_factory=dict)
    """By the part that owns them, then by what decides their buffer."""
    borrowed: dict[str, list[str]] = field(default_factory=dict)
    """The earlier parts whose parameters a part uses too."""


def collect(parts: Mapping[str, nn.Module], run: Run, elsewhere: Collection[str] = ()) -> Entries:
    """The entries of ``parts``, which are all parts of this rank, in order.

    A parameter that two parts share, or that both tie to one name, belongs to the first and is borrowed by the second.

    Args:
        elsewhere: names of tied parameters that another rank of the pipeline has too.
    """
    found, known = Entries(), dict[object, tuple[str, Entry]]()
    for part_name, part in parts.items():
        groups = found.groups[part_name] = {}
        for prefix, module in part.named_modules():
            for attribute, p in module._parameters.items():
                if p is None:
                    continue
                spec = spec_of(p)
                own_name = ".".join(w for w in (part_name, prefix, attribute) if w)
                identity = spec.init_name if spec.tied else id(p)
                if identity in known:
                    owner, entry = known[identity]
                    entry.uses.append((module, attribute))
                    if owner != part_name and owner not in found.borrowed.setdefault(part_name, []):
                        found.borrowed[part_name].append(owner)
                    continue
                name = spec.init_name or own_name
                entry = Entry(name, p, spec, [(module, attribute)], name == own_name)
                known[identity] = part_name, entry
                tied = name if name in elsewhere else ""
                key = (spec.storage_axis(run.mesh), tied, p.requires_grad, spec.dtype)
                groups.setdefault(key, []).append(entry)
    return found
