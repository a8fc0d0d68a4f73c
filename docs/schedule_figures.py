"""Directives that draw and price schedules while the pages are built, so that no figure or number goes stale.

``{schedule} NAME`` draws a table to scale; ``{schedule-comparison}``, ``{schedule-advice}`` and ``{schedule-formulas}``
are tables over all named schedules, ``{schedule-memory}`` one of what memory buys, ``{schedule-published}`` one of
published bubbles beside simulated ones. Only words and formulas are written down here.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

from fivefold.config.errors import ConfigError
from fivefold.schedule import cost, draw, named
from fivefold.schedule.auto import auto
from fivefold.schedule.messages import messages
from fivefold.schedule.simulate import UNIT, simulate
from fivefold.schedule.table import Table, owners
from tests.schedule import zb_table

ROOT = Path(__file__).parents[1]
PP, MICROBATCHES, FEW = 4, 8, 4
"""The pipeline that all schedules are compared on, and as few microbatches as it has ranks."""
SLOW = 0.5
"""Time of a message over a slow link, in forwards of a stage."""
UNEQUAL = "F=1,I=1,W=0.5,comm=0.05"
"""About what a GPT of 1.5 billion parameters takes: Qi et al. 2023, table 9."""
LIMITS = (4, 5, 6, 8)
TEXT_WIDTH = 108
SMALLEST = 700
"""Pixels: a drawing shrinks to the page, but not below this; then it scrolls."""


class Formula(NamedTuple):
    """What is known in closed form, as Python: p ranks, m microbatches, v chunks, g the first round of microbatches."""

    idle: str
    """Idle time of the busiest rank, for W <= I <= F and F + I >= 2W."""
    of: str
    """makespan or span."""
    start: str
    """The fewest microbatches from which it holds."""
    peak: str
    """The most activations that any rank holds, each of one microbatch in one stage."""
    equal_times: bool = False
    """Whether the idle time is for F = I = W alone."""


FORMULAS = {
    "gpipe": Formula("(p-1)*(F+B)", "makespan", "1", "m"),
    "1f1b": Formula("(p-1)*(F+B)", "makespan", "1", "min(m, p)"),
    "interleaved": Formula("(p-1)*(F+B)", "makespan", "p", "min(m*v, (v-1)*g+2*p-1)"),
    "interleaved_split": Formula("(p-1)*(F+I-W)", "span", "p", "min(m*v, (v-1)*g+p)"),
    "looped_bfs": Formula("(p-1)*(F+B)", "makespan", "p", "m*v"),
    "zb_h1": Formula("(p-1)*(F+I-W)", "span", "p", "min(m, p)"),
    "zb_h2": Formula("(p-1)*(F+I-2*W)", "span", "2*p-1", "2*p-1"),
    "zb_v": Formula("0", "span", "2*p-1", "2*p", equal_times=True),
    "dualpipe_v": Formula("(p-1)*(F+I-W)", "span", "2*p", "2*p+1"),
}
ADVICE = {
    "gpipe": "To compare with: 1F1B's bubble, and the memory of every microbatch.",
    "1f1b": "The default. The least memory, any module, nothing deferred.",
    "interleaved": "A smaller bubble with backward in one piece, where links are fast enough for more messages.",
    "interleaved_split": "The default with several chunks: no other has a smaller bubble, and it holds what 1F1B does.",
    "looped_bfs": "Slow links, with memory for all microbatches: a message has a whole round to travel.",
    "zb_h1": "One chunk, or few layers: less than half of 1F1B's bubble in its memory, and no more messages.",
    "zb_h2": "Slow links, with memory for twice as many activations.",
    "zb_v": "Tied embeddings: the first and the last stage are on one rank. Memory is the same on all ranks.",
    "dualpipe_v": "As zb_v, with most backwards in one piece.",
    "auto": "Actions of unequal times, slow messages, or a memory limit of your own.",
}


class Price(NamedTuple):
    """What a table costs at given times."""

    bubble: float
    span_bubble: float
    peak: float
    """The most activations a rank holds, each of one microbatch in one stage."""
    chunks: int
    n_messages: int
    waiting: float
    """The most activations that wait on a rank for W alone."""


def build(
    name: str, pp: int, microbatches: int, chunks: int | None = None, costs: str = "", limit: float | None = None
) -> Table:
    """The table of a named schedule, or of a function in a file given from the repository's root.

    Args:
        costs: what auto plans with, as on the command line.
        limit: how many activations auto may let a rank hold.
    """
    if name == "auto":
        by_kind, comm = cost.read(costs, "cost")
        return auto(pp, microbatches, chunks or 1, cost=by_kind, comm=comm, limit=limit)
    path = name if name in named.NAMES else str(ROOT / name)
    return named.build(path, pp, microbatches, chunks)


def price(table: Table, by_kind: cost.Cost = UNIT, comm: float = 0.0) -> Price:
    """What ``table`` costs."""
    timeline = simulate(table, by_kind, comm)
    return Price(timeline.bubble, timeline.span_bubble, max(timeline.peak), len(owners(table)) // len(table),
                 len(messages(table)), max(timeline.deferred))  # fmt: skip


def figure(
    name: str, pp: int, microbatches: int, chunks: int | None = None, costs: str = "", limit: float | None = None
) -> str:
    """The HTML of a drawing, what it does not show, and the same drawing in characters to unfold."""
    table = build(name, pp, microbatches, chunks, costs, limit)
    by_kind, comm = cost.read(costs, "cost")
    title = f"{name.rpartition(':')[2]}, {pp} ranks, {microbatches} microbatches"
    title += f", {costs}" if costs else ""
    title += f", limit {limit:g}" if limit else ""
    found = price(table, by_kind, comm)
    waits = f", up to {found.waiting:g} of them only for W" if found.waiting else ""
    caption = f"A rank holds up to {found.peak:g} activations{waits}. {found.n_messages} messages."
    alternative = f"{title}: the actions of each rank over time, to scale. Bubble {found.bubble:.1%}. {caption}"
    picture = draw.svg(table, by_kind, comm, title=title)
    width = float(picture.partition('width="')[2].partition('"')[0])
    style = f"width: 100%; height: auto; max-width: {width:.0f}px; min-width: {min(width, SMALLEST):.0f}px"
    picture = picture.replace("<svg ", f'<svg aria-label="{escape(alternative)}" style="{style}" ', 1)
    text = escape(draw.text(table, by_kind, comm, width=TEXT_WIDTH))
    return (
        f'<figure class="schedule"><div tabindex="0">{picture}</div><figcaption>{escape(caption)}</figcaption>'
        f"<details><summary>As text</summary><pre>{text}</pre></details></figure>"
    )


def comparison() -> str:
    """Every named schedule on one pipeline, in Markdown."""
    rows = [
        f"| schedule | chunks | splits | bubble | $m = {FEW}$ | slow links | memory | messages |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in named.NAMES:
        table, few = (build(name, PP, m) for m in (MICROBATCHES, FEW))
        found, slow = price(table), price(table, comm=SLOW)
        bubble = f"{found.bubble:.1%}"
        if found.bubble - found.span_bubble > 1e-9:
            bubble += f" ({found.span_bubble:.1%})"
        splits = "yes" if named.SCHEDULES[name].splits else "no"
        rows.append(
            f"| `{name}` | {found.chunks} | {splits} | {bubble} | {price(few).bubble:.1%} | {slow.bubble:.1%} "
            f"| {found.peak / found.chunks:g} | {found.n_messages} |"
        )
    return "\n".join(rows)


def advice() -> str:
    """When to use which named schedule, in Markdown."""
    rows = [f"| `{name}` | {ADVICE[name]} |" for name in named.NAMES]
    return "\n".join(["| schedule | when to use it |", "|---|---|", *rows])


def formulas() -> str:
    """What is known of each schedule in closed form, in Markdown."""
    rows = ["| schedule | idle time | of the | from $m$ | activations |", "|---|---|---|---|---|"]
    for name, formula in FORMULAS.items():
        where = ", if $F = I = W$" if formula.equal_times else ""
        rows.append(
            f"| `{name}` | {tex(formula.idle)}{where} | {formula.of} | {tex(formula.start)} | {tex(formula.peak)} |"
        )
    return "\n".join(rows)


def tex(formula: str) -> str:
    """A formula as mathematics that stays on one line."""
    return "${" + formula.replace("*", "").replace("min(", r"\min(") + "}$"


def memory() -> str:
    """What a limit on memory costs under auto, beside the named schedules of one chunk, in Markdown."""
    by_kind, comm = cost.read(UNEQUAL, "cost")
    rows = ["| schedule | activations of a rank | bubble |", "|---|---|---|"]
    tables = {f"`{name}`": build(name, PP, MICROBATCHES) for name in ("1f1b", "zb_h1", "zb_h2")}
    tables |= {f"`auto`, limit {n}": build("auto", PP, MICROBATCHES, costs=UNEQUAL, limit=n) for n in LIMITS}
    for name, table in tables.items():
        found = price(table, by_kind, comm)
        rows.append(f"| {name} | {found.peak:g} | {found.bubble:.1%} |")
    return "\n".join(rows)


def published() -> str:
    """Bubble rates as published and as simulated, in Markdown; the tests hold them together."""
    cells: dict[tuple[str, int, int], dict[str, str]] = {}
    for row in zb_table.rows():
        case = cells.setdefault((row.model, row.pp, row.microbatches), {})
        case[row.schedule] = f"{row.published:.4f} {row.timeline.span_bubble:.4f}"
    schedules = list(next(iter(cells.values())))
    rows = [f"| model, $p$, $m$ | {' | '.join(schedules)} |", "|---" * (1 + len(schedules)) + "|"]
    rows += [f"| {', '.join(map(str, case))} | {' | '.join(rates.values())} |" for case, rates in cells.items()]
    return "\n".join(rows)


class ScheduleDirective(SphinxDirective):
    """``{schedule} NAME``: a drawing."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {
        "pp": directives.positive_int,
        "microbatches": directives.positive_int,
        "chunks": directives.positive_int,
        "cost": directives.unchanged,
        "limit": float,
    }

    def run(self) -> list[nodes.Node]:
        given = {"pp": PP, "microbatches": MICROBATCHES, **self.options}
        given["costs"] = given.pop("cost", "")
        try:
            html = figure(self.arguments[0], **given)
        except ConfigError as error:
            raise self.error(" ".join(error.problems)) from error
        return [nodes.raw("", html, format="html")]


WRITERS = {
    "comparison": comparison, "advice": advice, "formulas": formulas, "memory": memory, "published": published,
}  # fmt: skip


def _written_by(write: Callable[[], str]) -> type[SphinxDirective]:
    """A directive that stands for the Markdown that ``write`` returns."""

    class Directive(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            return self.parse_text_to_nodes(write())

    return Directive


def setup(app: Any) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("schedule", ScheduleDirective)
    for name, write in WRITERS.items():
        app.add_directive(f"schedule-{name}", _written_by(write))
    return {"parallel_read_safe": True}
