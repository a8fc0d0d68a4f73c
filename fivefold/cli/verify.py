"""``fivefold verify``: prove that layouts compute what one rank computes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ..config.errors import ConfigError
from ..schedule.plan import check_run, warnings
from .common import add_recipe, configure, console, file_problems, stop_on, warn

if TYPE_CHECKING:
    from ..tools.verify import Report

SUMMARY = "prove that layouts compute what one rank computes"
EXAMPLES = (
    "fivefold verify moe_tiny --parallel fsdp2-tp2",
    "fivefold verify dense_tiny --parallel ddp2 fsdp4 tp2 --train.zero 1 --train.microbatches 2 --json report.json",
    "fivefold verify moe_tiny --parallel cp2 --context.method latent --no-documents",
    "fivefold verify my_model.py:recipe --parallel fsdp2",
)
DTYPES = ("float64", "float32")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_recipe(parser)
    add = parser.add_argument
    add("--parallel", metavar="LAYOUT", nargs="+", action="extend", help="layouts to compare with one rank")
    add("--dtype", metavar="DTYPE", default="float64", help="float64 (default) or float32")
    add("--steps", metavar="N", default="3", help="optimizer steps (default: 3)")
    add("--no-documents", dest="documents", action="store_false",
        help="rows of one document each, and not of one to four")  # fmt: skip
    add("--json", metavar="FILE", help="write the report to FILE as well")


def run(args: argparse.Namespace, given: Mapping[str, str]) -> int:
    """Verify every layout and print one row each; the status is 1 when one does not pass."""
    fixed = {"train.dtype": args.dtype, "train.steps": args.steps, "train.device": "cpu"}
    # a run of a few steps has no room for the recipe's schedule
    short = {"optim.warmup_steps": "0", "optim.decay_steps": "none"}
    recipe, problems = configure(args, {**short, **given, **fixed})
    layouts = args.parallel or [recipe.config.parallel]
    cases = [recipe.config.model_copy(update={"parallel": layout}) for layout in layouts]
    problems += [problem for case in cases for problem in check_run(case)]
    if args.dtype == "bfloat16":
        problems.append("dtype=bfloat16 cannot be verified: rounding hides mistakes. Use float64 or float32.")
    problems += file_problems("json", args.json)
    stop_on(problems)
    warn(text for case in cases for text in warnings(case))

    from ..mesh.pool import PoolError
    from ..tools import verify

    out = console()
    rows = "" if args.documents else ", one document a row"
    out.print(f"{recipe.name} against one rank, {args.dtype}, {args.steps} steps{rows}", highlight=False)
    try:
        reports = verify.verify(recipe.config, layouts, documents=args.documents)
    except PoolError as error:
        if error.kind == ConfigError.__name__:  # what only building the model could tell
            raise ConfigError(error.said.splitlines()) from None
        print(f"error: {error}", file=sys.stderr)
        return 1
    _print(reports, out)
    if args.json:
        Path(args.json).write_text(verify.as_json(reports) + "\n", encoding="utf-8")
    return 0 if all(report.passed for report in reports) else 1


def _print(reports: list[Report], out: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("layout", "loss", "grad norm", "gradient", "parameter", "experts", "replicas", "owners", ""):
        table.add_column(heading)
    for report in reports:
        errors = [f"{e:.1e}" for e in (report.loss, report.grad_norm, report.gradient, report.parameter)]
        flags = ["equal" if ok else "[red]differ[/]" for ok in (report.experts, report.replicas)]
        owners = "one each" if report.owners else "[red]not one each[/]"
        verdict = "[green]passed[/]" if report.passed else "[red]failed[/]"
        table.add_row(report.layout, *errors, *flags, owners, verdict)
    out.print(table, highlight=False)
    for report in reports:
        if not report.passed:
            name, error = report.worst
            out.print(f"{report.layout}: worst parameter {name} ({error:.1e})", highlight=False)
            if report.first_difference:
                out.print(f"{report.layout}: first difference in {report.first_difference}", highlight=False)
