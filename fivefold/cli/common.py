"""What the commands that take a recipe share: its configuration, the ranks they run on, how numbers are printed."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from .. import recipes
from ..config import overrides
from ..config.errors import ConfigError

RECIPE_HELP = "a name `fivefold recipes` lists, path/file.py:function, or the folder or config.json of a run"
EPILOG = "Every field can be set: --group.field value. `fivefold {command} RECIPE --help` lists them."


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks that something else (``torchrun``) has started, and which of them this process is."""

    rank: int
    world: int
    local_rank: int
    local_world: int


def started_ranks() -> Ranks | None:
    """The ranks the environment describes, or None when this process has to start its own."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    names = {"rank": "RANK", "world": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_world": "LOCAL_WORLD_SIZE"}
    fallback = {"LOCAL_RANK": "RANK", "LOCAL_WORLD_SIZE": "WORLD_SIZE"}
    values = {key: os.environ.get(name, os.environ[fallback.get(name, name)]) for key, name in names.items()}
    return Ranks(**{key: int(value) for key, value in values.items()})


def hold_off(ranks: Ranks | None) -> None:
    """Let a rank of several finish checking its configuration: one that is done makes the launcher stop the others."""
    if ranks is not None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def go_on(ranks: Ranks | None) -> None:
    """Let a rank be stopped again."""
    if ranks is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """The argument that names a recipe, and the help that lists its fields."""
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help=RECIPE_HELP)
    parser.add_argument("-h", "--help", action="store_true", help="show this help, and with a recipe all its fields")


def configure(args: argparse.Namespace, given: Mapping[str, str]) -> tuple[recipes.Recipe, list[str]]:
    """The recipe with the overrides ``given``, and what is wrong with them.

    Raises:
        ConfigError: if there is no recipe to apply them to.
    """
    recipe = recipes.load(args.recipe)
    config, problems = overrides.apply(recipe.config, given)
    return replace(recipe, config=config), problems


def stop_on(problems: list[str]) -> None:
    """Raise when there are ``problems``, each of them once.

    Raises:
        ConfigError: with all of them.
    """
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def file_problems(key: str, name: str | None) -> list[str]:
    """Why a file that the option ``key`` asks for cannot be written, known before the work is done."""
    if name is None or (Path(name).parent.is_dir() and not Path(name).is_dir()):
        return []
    where = Path(name).parent
    return [f"{key}={name} cannot be written: {where} is not a folder, or {name} is one. Use a file's path."]


def warn(warnings: Iterable[str], ranks: Ranks | None = None) -> None:
    """Print each of ``warnings`` once, on the first of several started ranks only."""
    if ranks is None or ranks.rank == 0:
        for text in dict.fromkeys(warnings):
            print(f"warning: {text}", file=sys.stderr, flush=True)


def console() -> Console:
    """Where tables go: the terminal at its width, a file or pipe at 120 columns."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def short(number: float) -> str:
    """``number`` with three or more digits and a unit of thousands: 671.03 B."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:,.2f} {name}"
    return f"{number:,.0f}"


def binary(size: float) -> str:
    """``size`` bytes with a binary unit: 1.50 GiB."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size:,.0f} B"
