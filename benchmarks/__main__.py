"""``python -m benchmarks``: every measurement in one run, as Markdown tables and, with ``--json``, as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # before torch is imported, here and in what is started

import torch

from fivefold.schedule.named import NAMES

from . import collectives, context, engine, pipeline, simulation, startup, steps, traffic
from .table import Table
from .work import MODELS

Say = Callable[[str], None]


def _steps(quick: bool, say: Say) -> Iterator[Table]:
    if quick:
        yield steps.measure(["llama"], ["single", "fsdp2"], rounds=2, steps=1, say=say)
    else:
        yield steps.measure(list(MODELS), list(steps.GOALS), rounds=9, steps=3, say=say)


def _engine(quick: bool, say: Say) -> Iterator[Table]:
    if quick:
        yield engine.measure([2], ["small"], rounds=2, steps=1, say=say)
    else:
        yield engine.measure([2, 4], list(engine.SHAPES), rounds=9, steps=3, say=say)


def _pipeline(quick: bool, say: Say) -> Iterator[Table]:
    if quick:
        yield pipeline.measure([2], ["1f1b", "zb_v"], rounds=2, steps=1, say=say)
    else:
        yield pipeline.measure([2, 4], list(pipeline.SCHEDULES), rounds=9, steps=1, say=say)


def _simulation(quick: bool, say: Say) -> Iterator[Table]:
    if quick:
        yield simulation.measure([8], ["1f1b", "zb_v"], rounds=1, say=say)
    else:
        yield simulation.measure([8, 16], list(NAMES), rounds=3, say=say)


def _collectives(quick: bool, say: Say) -> Iterator[Table]:
    yield collectives.measure([2] if quick else [2, 4], rounds=3 if quick else 15, say=say)


def _bytes(quick: bool, say: Say) -> Iterator[Table]:
    yield traffic.measure(traffic.QUICK if quick else traffic.CASES, say)


def _startup(quick: bool, say: Say) -> Iterator[Table]:
    yield startup.measure(1 if quick else 5, say)


SECTIONS = {"steps": _steps, "engine": _engine, "pipeline": _pipeline, "simulation": _simulation,
            "context": context.measure, "collectives": _collectives, "bytes": _bytes, "startup": _startup}  # fmt: skip


def _load() -> str:
    """Processes that wanted a core in the last minute: what else the machine was doing."""
    return f"{os.getloadavg()[0]:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen sections and print their tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Fivefold beside plain PyTorch.")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="one section; may be given again")
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds: whether it runs, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables to FILE too")
    args = parser.parse_args(arguments)

    def say(text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()

    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load average {_load()} before this run", flush=True)
    found: dict[str, list[Table]] = {}
    for name in args.only or SECTIONS:
        found[name] = list(SECTIONS[name](args.quick, lambda text, name=name: say(f"{name}: {text}")))
        say("")
        for table in found[name]:
            print(f"\n{table}", flush=True)
    print(f"\nload average {_load()} after it")
    if args.json:
        tables = {name: [{"title": t.title, "rows": t.data} for t in each] for name, each in found.items()}
        args.json.write_text(json.dumps(tables, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
