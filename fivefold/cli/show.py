"""``fivefold show``: what a run is and costs, before it runs; for any legal layout, on any machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ..config import context, counts, fields
from ..config.model import DecoderConfig
from ..config.run import RunConfig
from ..schedule.plan import Plan, check_run, first_schedule, plan, schedule_name
from ..schedule.simulate import simulate
from .common import add_recipe, binary, configure, console, short, stop_on

if TYPE_CHECKING:
    from ..tools.footprint import Footprint

SUMMARY = "show a run's configuration, size, and memory on each rank"
EXAMPLES = (
    "fivefold show deepseek_v3",
    "fivefold show llama3_8b --parallel fsdp16-tp4 --train.zero 2 --json show.json",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_recipe(parser)
    parser.add_argument("--parallel", metavar="LAYOUT", help="layout, such as fsdp2-tp2")
    parser.add_argument("--json", metavar="FILE", help="write everything to FILE as well")


def run(args: argparse.Namespace, given: Mapping[str, str]) -> int:
    """Print configuration, counts and bytes."""
    recipe, problems = configure(args, given)
    stop_on(problems + check_run(recipe.config, run=False))
    config = recipe.config
    sizes, out = _counts(config), console()
    _print_config(recipe.name, config, out)
    _print_counts(config, sizes, out)
    made = plan(config)
    pipeline = _pipeline(config, made)
    if len(made.owners) > 1:
        _print_pipeline(pipeline, out)
    methods = _context(config)
    if methods:
        _print_context(config, methods, out)
    places = footprint(config)
    _print_ranks(config, places, out)
    if args.json:
        shown = {
            "recipe": recipe.name,
            "config": config.model_dump(mode="json"),
            **sizes,
            "pipeline": pipeline,
            "context": methods,
            "ranks": [asdict(place) for place in places],
        }
        Path(args.json).write_text(json.dumps(shown, indent=2) + "\n", encoding="utf-8")
    return 0


def footprint(config: RunConfig) -> list[Footprint]:
    """What the ranks of each place on ``pp`` store."""
    from ..tools.footprint import footprint as measure

    return measure(config)


def _counts(config: RunConfig) -> dict[str, float | None]:
    model = config.model
    decoder = model if isinstance(model, DecoderConfig) else None
    return {
        "parameters": counts.parameters(decoder) if decoder else None,
        "active_parameters": counts.active_parameters(decoder) if decoder else None,
        "flops_per_token": model.flops_per_token(config.data.sequence_length),
        "kv_cache_bytes_per_token": counts.kv_cache_bytes(decoder) if decoder else None,
    }


def _print_config(name: str, config: RunConfig, out: Console) -> None:
    world = config.dims.world
    out.print(f"[bold]{name}[/]  {config.parallel}, {world:,} rank{'s' if world > 1 else ''}\n", highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for leaf in fields.leaves(config):
        if leaf.path != "parallel":
            table.add_row(leaf.path, leaf.value or "empty")
    out.print(table, highlight=False)


def _print_counts(config: RunConfig, sizes: Mapping[str, float | None], out: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    parameters, active = sizes["parameters"], sizes["active_parameters"]
    if parameters is not None and active is not None:
        table.add_row("parameters", short(parameters), f"{parameters:,}")
        table.add_row("active per token", short(active), f"{active:,}; embedding look-up left out, head counted")
    flops = sizes["flops_per_token"]
    if flops is not None:
        length = config.data.sequence_length
        about = f"forward and backward, causal, {length:,} tokens: 6 an active matrix element, and attention"
        table.add_row("FLOPs per token", f"{flops / 1e9:,.2f} GFLOP", about)
    cache = sizes["kv_cache_bytes_per_token"]
    if cache is not None:
        table.add_row("KV cache per token", binary(cache), f"{cache:,} bytes in bfloat16")
    out.print()
    out.print(table, highlight=False)


def _pipeline(config: RunConfig, made: Plan) -> dict[str, Any]:
    """The schedule and the stages, as they are written to a file."""
    timeline = simulate(made.table)
    costs = config.model.part_costs(config.data.sequence_length) or {}
    stages = [
        {"stage": stage, "place": owner, "parts": names, "cost": sum(costs[name] for name in names)}
        for stage, (owner, names) in enumerate(zip(made.owners, made.parts or ()))
    ]
    return {
        "schedule": schedule_name(config),
        "first_schedule": first_schedule(config),
        "microbatches": config.train.microbatches,
        "bubble": timeline.bubble,
        "activations": timeline.peak,
        "stages": stages,
    }


def _print_pipeline(pipeline: Mapping[str, Any], out: Console) -> None:
    name, first, n = pipeline["schedule"], pipeline["first_schedule"], pipeline["microbatches"]
    begins = f", beginning with {first} to measure" if first != name else ""
    bubble = f"bubble {pipeline['bubble']:.1%} where F, I and W each take 1 and B 2"
    out.print(f"\nPipeline: {name}{begins}, {n} microbatch{'es' if n > 1 else ''}, {bubble}", highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("stage", "pp rank", "share of cost", "parts"):
        table.add_column(heading, justify="right" if heading == "share of cost" else "left")
    total = sum(stage["cost"] for stage in pipeline["stages"]) or 1.0
    for stage in pipeline["stages"]:
        share = f"{stage['cost'] / total:.1%}"
        table.add_row(str(stage["stage"]), str(stage["place"]), share, _in_short(stage["parts"]))
    out.print(table, highlight=False)


def _in_short(names: Sequence[str]) -> str:
    """``names`` in order, of a run of layers only the first and the last."""
    runs: list[list[str]] = []
    for name in names:
        if runs and "." in name and name.rpartition(".")[0] == runs[-1][-1].rpartition(".")[0]:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1].rpartition('.')[2]}" for run in runs)


def _context(config: RunConfig) -> list[dict[str, Any]]:
    """What each method of context parallelism would cost, as it is written to a file; empty without ``cp``."""
    if config.dims.cp == 1 or not isinstance(config.model, DecoderConfig):
        return []
    rates = config.context.link_gb_per_s * 1e9, config.context.tflops * 1e12
    return [
        {"method": name, **asdict(cost), "seconds": cost.seconds(*rates), "chosen": name == context.method(config)}
        for name, cost in context.costs(config, config.dims).items()
    ]


def _print_context(config: RunConfig, methods: Sequence[Mapping[str, Any]], out: Console) -> None:
    rates = f"{config.context.link_gb_per_s:g} GB/s and {config.context.tflops:g} TFLOP/s"
    placement = config.context.placement
    out.print(f"\nContext: {placement} placement; one attention layer and row on a rank, at {rates}", highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("method", "sends", "operations", "of them extra", "estimate", ""):
        table.add_column(heading, justify="left" if heading in ("method", "") else "right")
    for m in methods:
        total = m["attention_flops"] + m["extra_flops"]
        extra, estimate = f"{m['extra_flops'] / total:.1%}", f"{m['seconds'] * 1e3:,.3f} ms"
        table.add_row(m["method"], binary(m["sent_bytes"]), f"{total / 1e9:,.1f} GFLOP", extra, estimate,
                      "chosen" * m["chosen"])  # fmt: skip
    out.print(table, highlight=False)


def _print_ranks(config: RunConfig, places: list[Footprint], out: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), title=f"Bytes on each rank, {config.parallel}", title_justify="left")
    for heading in ("pp rank", "ranks", "parameters", "gradients", "optimizer", "sum", "gathered at most", "padding"):
        table.add_column(heading, justify="left" if heading == "pp rank" else "right")
    alike: dict[tuple[int, ...], list[Footprint]] = {}
    for place in places:
        stored = (place.stored_bytes, place.gradient_bytes, place.optimizer_bytes)
        sizes = (*stored, sum(stored), place.gathered_bytes, place.padding_bytes)
        alike.setdefault(sizes, []).append(place)
    for sizes, group in alike.items():
        table.add_row(
            _ranges([place.place for place in group]), f"{sum(place.ranks for place in group):,}", *map(binary, sizes)
        )
    out.print()
    out.print(table, highlight=False)


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending ``numbers``, three or more in a row by the first and the last."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)
