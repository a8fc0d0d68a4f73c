"""From a configuration to a model's parts: calls the builder it names, and checks what comes back."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..config import locate
from ..config.errors import ConfigError
from ..config.model import ModelConfig
from ..mesh.parameter import spec_of
from ..mesh.run import Run


def build_parts(run: Run, config: ModelConfig, names: Sequence[str] | None = None, seed: int = 0, *,
                layout_free: bool = False) -> dict[str, nn.Module]:  # fmt: skip
    """The named parts that ``config.builder`` makes, first to last.

    Args:
        names: the parts of this rank's stages; None builds all.
        seed: of the first values that plain modules draw for themselves.
        layout_free: whether those depend on the seed and the part's name alone, and not on which other parts are
            built. Such a part is built twice; parts on ``meta``, whose values come later, are not.

    Raises:
        ConfigError: if the builder cannot be found, or returns anything but an ordered mapping of names to modules.
    """
    if names is not None and (problems := _misfits(run, config, names)):
        raise ConfigError([f"model.builder={config.builder} {p}" for p in problems])
    parts = _build(run, config, names, seed)
    if layout_free:
        for name, part in parts.items():
            if any(not p.is_meta for p in part.parameters()):
                alone = _build(run, config, [name], seed ^ zlib.crc32(name.encode()))[name]
                with torch.no_grad():
                    for p, q in zip(part.parameters(), alone.parameters(), strict=True):
                        if not p.is_meta:
                            p.copy_(q)
    return parts


def _misfits(run: Run, config: ModelConfig, names: Sequence[str]) -> list[str]:
    """Why the parts ``names`` cannot be built apart from the others.

    Found on the whole model without memory; a builder that fails so is trusted.
    """
    try:
        with torch.device("meta"):
            parts = dict(locate.function(config.builder, "model.builder")(run, config, None))
            users: dict[int, list[tuple[str, nn.Parameter]]] = {}
            for name, part in parts.items():
                for p in part.parameters():
                    users.setdefault(id(p), []).append((name, p))
    except Exception:
        return []
    declared = config.part_costs(1)
    if declared is not None and list(parts) != list(declared):
        return [f"returns the parts {', '.join(parts)}, but {type(config).__name__}.part_costs names "
                f"{', '.join(declared)}. Name the same parts in the same order."]  # fmt: skip
    found = []
    for shared in users.values():
        parts_of = [name for name, _ in shared]
        if len({name in names for name in parts_of}) == 2 and not spec_of(shared[0][1]).tied:
            found.append(f"shares one parameter between the parts {' and '.join(map(repr, parts_of))}, which are on "
                         "different ranks of pp: each would train its own. Declare both with "
                         "fivefold.mesh.parameter.parameter and mark them with tie, or use pp=1.")  # fmt: skip
    return found


def _build(run: Run, config: ModelConfig, names: Sequence[str] | None, seed: int) -> dict[str, nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = locate.function(config.builder, "model.builder")(run, config, names)
    if problems := _problems(parts, names):
        raise ConfigError([f"model.builder={config.builder} {p}" for p in problems])
    return dict(parts)


def _problems(parts: object, names: Sequence[str] | None) -> list[str]:
    wanted = "Return a dict of part names to torch.nn.Module, in the order they run"
    if not isinstance(parts, Mapping):
        return [f"returned a {type(parts).__name__}, not a dict. {wanted}."]
    if not parts and names != []:
        return [f"returned no parts. {wanted}."]
    found: list[str] = []
    for name, part in parts.items():
        if not isinstance(name, str):
            found.append(f"returned a part named {name!r}, not a str. {wanted}.")
        if not isinstance(part, nn.Module):
            found.append(f"returned a {type(part).__name__} as part {name!r}. {wanted}.")
    if names is not None and list(parts) != list(names):
        found.append(f"returned the parts {list(parts)} for names={list(names)}. Build those alone, in that order.")
    return found
