"""The full grids against one rank: ``make parity``, or ``python -m tests.parity.full [--fresh] [--only TEXT]``.

Rows run in one pool per world size. Finished rows are kept in ``build/parity.jsonl`` under the row and a fingerprint of
the package's source, so that a run that was stopped goes on where it was, and a changed package starts over. The status
is 1 unless every row passes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import fivefold
from fivefold.config.context import METHODS, PLACEMENTS
from fivefold.mesh.pool import Pool, PoolError
from fivefold.observe.console import duration
from fivefold.schedule.named import NAMES
from fivefold.tools.verify import TOLERANCE, verify_rank

from . import contexts, pipelines
from .grid import EXTRAS, STEPS, Row, full

FINISHED = Path("build/parity.jsonl")
CASE_LIMIT_S = 300.0
ERRORS = ("loss", "grad_norm", "gradient", "parameter")

Result = dict[str, Any]
"""A row's report, with ``row``, ``fingerprint``, ``seconds``, and ``error`` where there is no report."""


def fingerprint() -> str:
    """Changes with every source file of the package and of the grid, and with torch."""
    digest = hashlib.sha256(version("torch").encode())
    package = Path(fivefold.__file__).parent
    names = ("grid.py", "pipelines.py", "contexts.py", "plain.py", "frozen.py", "own_table.py", "own_context.py")
    grid = [Path(__file__).with_name(name) for name in names]
    for path in sorted([*package.rglob("*.py"), *grid]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def finished(path: Path, stamp: str) -> dict[str, Result]:
    """Results of rows that ran on this source, by row; a line that was cut short is left out."""
    found: dict[str, Result] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            result = json.loads(line)
        except ValueError:
            continue
        if result["fingerprint"] == stamp:
            found[result["row"]] = result
    return found


def passed(result: Result) -> bool:
    """Whether the row's report says so."""
    return bool(result.get("passed"))


def run_row(pool: Pool, row: Row, stamp: str) -> Result:
    """Run one row; an error is a result too."""
    began = time.monotonic()
    try:
        arguments = row.config, STEPS, TOLERANCE["float64"], row.documents
        report = asdict(pool.run(verify_rank, *arguments, timeout_s=CASE_LIMIT_S)[0])
    except PoolError as error:
        report = {"error": str(error)}
    return {"row": str(row), "fingerprint": stamp, "seconds": time.monotonic() - began, **report}


def run_rows(rows: Sequence[Row], path: Path, stamp: str, console: Console) -> dict[str, Result]:
    """Run the rows that are not finished, telling and keeping each as it ends; the results of all, by row."""
    results = {name: r for name, r in finished(path, stamp).items() if passed(r)}  # what failed is tried again
    todo = [row for row in rows if str(row) not in results]
    if len(todo) < len(rows):
        console.print(f"{len(rows) - len(todo)} of {len(rows)} rows are finished already; --fresh runs them again")
    path.parent.mkdir(parents=True, exist_ok=True)
    began, done = time.monotonic(), 0
    with path.open("a") as file:
        for world in sorted({row.world for row in todo}):
            with Pool(world, timeout_s=CASE_LIMIT_S) as pool:
                for row in [row for row in todo if row.world == world]:
                    result = results[str(row)] = run_row(pool, row, stamp)
                    print(json.dumps(result), file=file, flush=True)
                    done += 1
                    left = (time.monotonic() - began) / done * (len(todo) - done)
                    console.print(f"{done:>4}/{len(todo)}  {describe(result)}  {duration(left)} left", highlight=False)
    return {str(row): results[str(row)] for row in rows}


def describe(result: Result) -> str:
    """One line about a row."""
    if "error" in result:
        return f"ERROR  {result['row']}: {result['error'].splitlines()[0]}"
    verdict = "ok    " if passed(result) else "FAILED"
    return f"{verdict} {result['row']:<60} worst {max(result[e] for e in ERRORS):.1e}  {result['seconds']:.1f} s"


def table(by: str, values: Iterable[str], rows: Sequence[Row], results: dict[str, Result]) -> Table:
    """A line per layout, or schedule: rows that passed, the largest errors among them all, and the time."""
    found = Table(box=None, padding=(0, 2, 0, 0))
    for heading in (by, "rows", "passed", *ERRORS, "seconds"):
        found.add_column(heading, justify="left" if heading == by else "right")
    for value in values:
        mine = [results[str(row)] for row in rows if getattr(row, by) == value]
        if mine:
            errors = [max((r[e] for r in mine if e in r), default=float("nan")) for e in ERRORS]
            found.add_row(value, str(len(mine)), str(sum(map(passed, mine))), *(f"{e:.1e}" for e in errors),
                          f"{sum(r['seconds'] for r in mine):.0f}")  # fmt: skip
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the grid and the extra rows, print the table, and return 1 unless every row passes."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.full", description="Every layout against one rank.")
    parser.add_argument("--fresh", action="store_true", help="run finished rows again")
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose name has this in it")
    parser.add_argument("--results", metavar="FILE", type=Path, default=FINISHED, help=f"default: {FINISHED}")
    args = parser.parse_args(arguments)
    console = Console(width=160)
    if args.fresh:
        args.results.unlink(missing_ok=True)
    grids = (*full(), *EXTRAS, *pipelines.full(), *pipelines.EXTRAS, *contexts.full(), *contexts.EXTRAS)
    rows = list(dict.fromkeys(grids))
    rows = [row for row in sorted(rows, key=Row.place) if args.only in str(row)]
    results = run_rows(rows, args.results, fingerprint(), console)
    layouts = dict.fromkeys(row.layout for row in rows)
    console.print(table("layout", layouts, rows, results), highlight=False)
    if any(row.schedule for row in rows):
        console.print(table("schedule", NAMES, rows, results), highlight=False)
    for by, values in (("method", METHODS), ("placement", PLACEMENTS)):
        if any(getattr(row, by) for row in rows):
            console.print(table(by, values, rows, results), highlight=False)
    failed = [result for result in results.values() if not passed(result)]
    for result in failed:
        console.print(f"\n{describe(result)}\n{result.get('error', result)}", highlight=False, markup=False)
    console.print(f"{len(rows) - len(failed)} of {len(rows)} rows equal one rank")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
