"""``fivefold recipes``: what can be trained by name."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from ..config import counts
from ..config.model import DecoderConfig
from ..recipes import RECIPES
from .common import console, short

SUMMARY = "list the recipes"
EXAMPLES = ("fivefold recipes",)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", metavar="FILE", help="write the list to FILE as well")


def run(args: argparse.Namespace, given: Mapping[str, str]) -> int:
    """Print the table."""
    rows = [_row(name) for name in RECIPES]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("recipe", "parameters", "active", "layout", ""):
        right = heading in ("parameters", "active")
        table.add_column(heading, justify="right" if right else "left", no_wrap=bool(heading))
    for row in rows:
        sizes = [short(row[key]) if row[key] else "" for key in ("parameters", "active_parameters")]
        table.add_row(row["name"], *sizes, row["parallel"], row["about"])
    console().print(table, highlight=False)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


def _row(name: str) -> dict[str, Any]:
    function = RECIPES[name]
    config = function()
    decoder = config.model if isinstance(config.model, DecoderConfig) else None
    return {
        "name": name,
        "parameters": counts.parameters(decoder) if decoder else None,
        "active_parameters": counts.active_parameters(decoder) if decoder else None,
        "parallel": config.parallel,
        "about": (inspect.getdoc(function) or "").split("\n")[0],
    }
