"""From a configuration to a model's parts: finds the builder a configuration names, and checks what it returns."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..config.errors import ConfigError
from ..config.model import ModelConfig
from ..mesh.run import Run

FORM = "Use module:function or path/file.py:function"


def find_builder(reference: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``path/file.py:function`` names.

    Raises:
        ConfigError: if there is none.
    """
    place, _, name = reference.partition(":")
    if not place or not name:
        raise ConfigError([f"model.builder={reference} does not name a function. {FORM}."])
    try:
        module = _load(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, FileNotFoundError) as error:
        raise ConfigError([f"model.builder={reference} cannot be imported ({error}). {FORM}."]) from error
    builder = getattr(module, name, None)
    if not callable(builder):
        raise ConfigError([f"model.builder={reference} names no function ({place} has no {name} to call). {FORM}."])
    return builder


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve(strict=True))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_parts(run: Run, config: ModelConfig, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The named parts that ``config.builder`` makes, first to last.

    Args:
        names: the parts of this rank's stages; None builds all.

    Raises:
        ConfigError: if the builder cannot be found, or returns anything but an ordered mapping of names to modules.
    """
    parts = find_builder(config.builder)(run, config, names)
    if problems := _problems(parts, names):
        raise ConfigError([f"model.builder={config.builder} {p}" for p in problems])
    return dict(parts)


def _problems(parts: object, names: Sequence[str] | None) -> list[str]:
    wanted = "Return a dict of part names to torch.nn.Module, in the order they run"
    if not isinstance(parts, Mapping):
        return [f"returned a {type(parts).__name__}, not a dict. {wanted}."]
    if not parts and names != []:
        return [f"returned no parts. {wanted}."]
    found = [f"returned a part named {k!r}, not a str. {wanted}." for k in parts if not isinstance(k, str)]
    found += [f"returned a {type(p).__name__} as part {k!r}. {wanted}." for k, p in parts.items() if not isinstance(p, nn.Module)]  # fmt: skip
    if names is not None and list(parts) != list(names):
        found.append(f"returned the parts {list(parts)} where names={list(names)} were asked for. Build those only, in that order.")  # fmt: skip
    return found
