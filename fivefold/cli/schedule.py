"""``fivefold schedule``: draw a pipeline schedule, price it, and list its messages; no model, no ranks."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table as Grid

from ..config.errors import ConfigError
from ..schedule import draw, named
from ..schedule.auto import auto
from ..schedule.cost import read
from ..schedule.messages import messages
from ..schedule.simulate import Timeline, simulate
from ..schedule.table import Table, owners
from .common import console, file_problems, stop_on, warn

SUMMARY = "draw a pipeline schedule, its bubble, memory and messages"
EXAMPLES = (
    "fivefold schedule 1f1b --pp 4 --microbatches 8",
    "fivefold schedule zb_v --pp 4 --microbatches 8 --cost F=1,I=1.1,W=0.8,comm=0.05 --svg zb_v.svg",
    "fivefold schedule auto --pp 4 --microbatches 8 --cost F=1,I=1,W=0.6 --limit 6",
    "fivefold schedule my_schedule.py:table --pp 2 --microbatches 4",
)
LISTED = 400
"""Messages printed; ``--json`` writes all."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command's arguments, read."""

    name: str
    pp: int
    microbatches: int
    chunks: int | None
    cost: Mapping[str, float]
    comm: float
    limit: float | None


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    own = "or path/file.py:function, called as function(pp, microbatches, chunks)"
    add("name", metavar="NAME", nargs="?", help=f"one of {', '.join(named.NAMES)}; {own}")
    add("--pp", metavar="N", default="4", help="ranks (default: 4)")
    add("--microbatches", metavar="N", default="8", help="microbatches of a step (default: 8)")
    add("--chunks", metavar="N", help="stages of a rank (default: the schedule's own)")
    add(
        "--cost",
        metavar="PRICES",
        default="",
        help="time of each action, and comm of a message between ranks (default: F=1,I=1,W=1,comm=0; B is I+W)",
    )
    add("--limit", metavar="X", help="activations of a microbatch in a stage that a rank may hold, for auto")
    add("--svg", metavar="FILE", help="draw it into FILE as well")
    add("--json", metavar="FILE", help="write everything to FILE as well")


def run(args: argparse.Namespace, given: Mapping[str, str]) -> int:
    """Print the grid, its times, the memory of each rank and the messages."""
    request = _request(args)
    table = _table(request)
    timeline = simulate(table, request.cost, request.comm)
    warn(named.warnings(table, request.pp, request.microbatches, key="microbatches"))
    heading = _heading(request, table)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(f"{heading}\n")
    print(draw.text(table, request.cost, request.comm, width=width))
    _print_times(timeline)
    _print_memory(table, timeline)
    _print_messages(table, width or 120)
    if args.svg:
        Path(args.svg).write_text(draw.svg(table, request.cost, request.comm, title=heading), encoding="utf-8")
    if args.json:
        Path(args.json).write_text(json.dumps(_everything(request, table, timeline), indent=1) + "\n", encoding="utf-8")
    return 0


def _request(args: argparse.Namespace) -> Request:
    """The arguments as numbers.

    Raises:
        ConfigError: with all that is wrong with them.
    """
    problems: list[str] = []
    name = args.name or ""
    if not name:
        problems.append(f"NAME is missing. Use one of [{', '.join(named.NAMES)}], or path/file.py:function.")
    pp = _whole("pp", args.pp, problems)
    microbatches = _whole("microbatches", args.microbatches, problems)
    chunks = None if args.chunks is None else _whole("chunks", args.chunks, problems)
    if name and (chunks is None or chunks > 0):
        problems += named.problems_of(name, chunks, key="schedule", chunks_key="chunks")
    cost, comm = {}, 0.0
    try:
        cost, comm = read(args.cost, "cost")
    except ConfigError as error:
        problems += error.problems
    limit = None
    if args.limit is not None and name != "auto" and (name in named.NAMES or ":" in name):
        problems.append(f"limit={args.limit} has no effect on schedule={name}. Leave it out, or use auto.")
    elif args.limit is not None:
        limit = _positive("limit", args.limit, problems)
    problems += file_problems("svg", args.svg) + file_problems("json", args.json)
    stop_on(problems)
    return Request(name=name, pp=pp, microbatches=microbatches, chunks=chunks, cost=cost, comm=comm, limit=limit)


def _whole(key: str, text: str, problems: list[str]) -> int:
    """A number of at least 1, or 0 and one more problem."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        problems.append(f"{key}={text} is not a whole number above 0. Use 1 or more.")
        return 0
    return number


def _positive(key: str, text: str, problems: list[str]) -> float | None:
    """A finite number above 0, or None and one more problem."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        problems.append(f"{key}={text} is not a number above 0. Use the number of pp ranks, or more.")
        return None
    return number


def _table(request: Request) -> Table:
    if request.name == "auto":
        return auto(
            request.pp, request.microbatches, request.chunks or 1, cost=request.cost, comm=request.comm,
            limit=request.limit, limit_key="limit", chunks_key="chunks",
        )  # fmt: skip
    return named.build(
        request.name, request.pp, request.microbatches, request.chunks, key="schedule", chunks_key="chunks"
    )


def _chunks(table: Table) -> int:
    """The most stages of a rank."""
    owner = owners(table)
    return max(map(owner.count, owner))


def _heading(request: Request, table: Table) -> str:
    kinds = {action.kind for order in table for action in order}
    prices = " ".join(f"{kind}={price:g}" for kind, price in request.cost.items() if kind in kinds)
    comm = f" comm={request.comm:g}" if request.comm else ""
    sizes = f"pp={request.pp}, microbatches={request.microbatches}, chunks={_chunks(table)}"
    return f"{request.name}: {sizes}, {prices}{comm}"


def _print_times(timeline: Timeline) -> None:
    grid = Grid(box=None, padding=(0, 2, 0, 0), show_header=False)
    grid.add_row("makespan", f"{timeline.makespan:g}", f"bubble {timeline.bubble:.1%}", "all ranks wait for the last")
    grid.add_row("span", f"{timeline.span:g}", f"bubble {timeline.span_bubble:.1%}", "of the slowest rank; none waits")
    print()
    console().print(grid, highlight=False)


def _print_memory(table: Table, timeline: Timeline) -> None:
    title = "Most activations, each of a microbatch in a stage"
    grid = Grid(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left")
    for heading in ("rank", "stages", "held at once", "of these only for W"):
        grid.add_column(heading, justify="left" if heading == "stages" else "right")
    owner = owners(table)
    for rank, (peak, deferred) in enumerate(zip(timeline.peak, timeline.deferred)):
        stages = ", ".join(str(stage) for stage, place in enumerate(owner) if place == rank)
        grid.add_row(str(rank), stages, f"{peak:g}", f"{deferred:g}")
    print()
    console().print(grid, highlight=False)


def _print_messages(table: Table, width: int) -> None:
    found = messages(table)
    if not found:
        print("\nNo messages.")
        return
    print(f"\n{len(found)} messages, each rank posting its own in this order (producer, ranks):")
    words = [f"{m.producer} {m.source}>{m.target}" for m in found[:LISTED]]
    column = max(map(len, words))
    per_line = max(1, (width + 2) // (column + 2))
    for at in range(0, len(words), per_line):
        print("  ".join(word.ljust(column) for word in words[at : at + per_line]).rstrip())
    if len(found) > LISTED:
        print(textwrap.fill(f"and {len(found) - LISTED} more: --json FILE writes all of them.", width))


def _everything(request: Request, table: Table, timeline: Timeline) -> dict[str, Any]:
    """What the command found, for other programs; times in the unit of the costs."""
    return {
        "schedule": request.name,
        "pp": request.pp,
        "microbatches": request.microbatches,
        "chunks": _chunks(table),
        "cost": dict(request.cost),
        "comm": request.comm,
        "owners": owners(table),
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "span": timeline.span,
        "span_bubble": timeline.span_bubble,
        "peak": timeline.peak,
        "deferred": timeline.deferred,
        "ranks": [
            [{"action": str(a), "start": timeline.start[a], "end": timeline.end[a]} for a in order] for order in table
        ],
        "messages": [
            {"producer": str(m.producer), "consumer": str(m.consumer), "source": m.source, "target": m.target}
            for m in messages(table)
        ],
    }
