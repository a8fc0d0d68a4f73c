"""Full runs as plain functions that return a ``RunConfig``, and where a run comes from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pydantic import ValidationError

from ..config import fields, locate
from ..config.base import Part
from ..config.errors import ConfigError, nearest
from ..config.overrides import validated
from ..config.run import RunConfig
from .deepseek import deepseek_v2_lite, deepseek_v3
from .demo import moe_demo
from .llama3 import llama3_8b, llama3_70b, llama3_405b
from .long_context import long_demo, long_demo_2048
from .tiny import dense_tiny, moe_tiny

RECIPES: Final[Mapping[str, Callable[[], RunConfig]]] = MappingProxyType(
    {
        f.__name__: f
        for f in (
            moe_tiny,
            dense_tiny,
            moe_demo,
            long_demo,
            long_demo_2048,
            llama3_8b,
            llama3_70b,
            llama3_405b,
            deepseek_v2_lite,
            deepseek_v3,
        )
    }
)
"""The recipes that come with the package, by name."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A configuration and the name that leads to it."""

    name: str
    """A registered name, or ``/path/file.py:function``."""
    config: RunConfig
    """What it says."""


def load(spec: str) -> Recipe:
    """The recipe ``spec``: a registered name, ``path/file.py:function``, or a run's folder or ``config.json``.

    A saved run is read with the types of the recipe it came from, so that a model of one's own keeps its class.

    Raises:
        ConfigError: if there is no such recipe, or what it returns is not valid.
    """
    path = Path(spec)
    if path.suffix == ".json" or (path / "config.json").is_file():
        return _saved(path / "config.json" if path.is_dir() else path)
    if ":" in spec or path.suffix == ".py":
        name = locate.absolute(spec)
        return Recipe(name=name, config=_call(spec, locate.function(spec, "recipe")))
    if spec not in RECIPES:
        close = nearest(spec, RECIPES)
        hint = f" Did you mean {close}?" if close else ""
        raise ConfigError([f"recipe={spec} is not a recipe.{hint} Use {choices()}."])
    return Recipe(name=spec, config=_call(spec, RECIPES[spec]))


def save(path: str | Path, recipe: str, config: RunConfig) -> None:
    """Write ``config`` and the name of its recipe to the file ``path``; ``load`` reads it again."""
    text = json.dumps({"recipe": recipe, "config": config.model_dump(mode="json")}, indent=2)
    Path(path).write_text(text + "\n", encoding="utf-8")


def restore(name: str, values: Mapping[str, Any]) -> Recipe:
    """The configuration that was saved as ``values``, read with the types of the recipe ``name`` it came from.

    Raises:
        ConfigError: if the recipe is gone, or a value does not fit it.
    """
    recipe = load(name)
    update: dict[str, Any] = {}
    problems: list[str] = []
    for group, value, found in validated(recipe.config, values):
        update[group] = value
        problems += found
    if problems:
        raise ConfigError(problems)
    return Recipe(name=name, config=recipe.config.model_copy(update=update))


def choices() -> str:
    """What may stand for a recipe, in words."""
    return f"one of {', '.join(RECIPES)}, path/file.py:function, or the config.json of a run"


def _call(spec: str, function: Callable[..., Any]) -> RunConfig:
    try:
        config = function()
    except ValidationError as error:
        part = fields.part_named(error.title)
        messages = fields.problems(error, part, "", {}).values() if part else [str(error)]
        raise ConfigError([f"recipe={spec}, {error.title}: {message}" for message in messages]) from error
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError([f"recipe={spec} fails: {said}. Correct the function."]) from error
    if not isinstance(config, RunConfig):
        raise ConfigError([f"recipe={spec} returns a {type(config).__name__}. Return a RunConfig."])
    if problems := _problems(config):
        raise ConfigError([f"recipe={spec}: {problem}" for problem in problems])
    return config


def _problems(config: RunConfig) -> list[str]:
    """What no validation has seen: ``model_copy`` takes any value."""
    kinds = dict.fromkeys(RunConfig.model_fields, (Part, "a group of fields")) | {"parallel": (str, "a layout")}
    found = [
        f"{name}={getattr(config, name)!r} is not {words}. Leave it out of the copy."
        for name, (kind, words) in kinds.items()
        if not isinstance(getattr(config, name), kind)
    ]
    if found:
        return found
    return [problem for _, _, problems in validated(config, _values(config)) for problem in problems]


def _values(part: Part) -> dict[str, Any]:
    """The values of ``part``, also under names that are no field, which ``model_dump`` passes over."""
    held = ((name, value) for name, value in part if name in type(part).model_fields or not hasattr(type(part), name))
    return {name: _values(value) if isinstance(value, Part) else value for name, value in held}


def _saved(path: Path) -> Recipe:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        name, values = str(saved["recipe"]), dict(saved["config"])
    except OSError as error:
        raise ConfigError([f"recipe={path} cannot be read: {error.strerror}. Use {choices()}."]) from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError([f"recipe={path} is not a saved run: it needs the keys recipe and config."]) from None
    try:
        return restore(name, values)
    except ConfigError as error:
        raise ConfigError([f"recipe={path}: {problem}" for problem in error.problems]) from None
