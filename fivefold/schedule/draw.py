"""A schedule as the papers draw it, to scale: a line per rank, time to the right, each action with its microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from types import MappingProxyType
from typing import Final

from .cost import UNIT, Cost
from .simulate import Timeline, simulate
from .table import Action, Table, owners

NAMES: Final = MappingProxyType(
    {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"},
)
FILLS: Final = MappingProxyType(
    {"F": ("#8fb8f0", "#d3e4fb"), "B": ("#7cc796", "#cdeed7"), "I": ("#74cfcf", "#cdf1f0"), "W": ("#f2b866", "#fce5c2")}
)
"""Of a rank's first chunk and of its others: dark text is readable on each of them."""
SMALLEST: Final = 8
"""An action this many times shorter than the longest still gets room for its label; a shorter one is drawn to scale."""
CHARACTER: Final = 6.6
"""Width in pixels of a character of 11 pixels in a monospaced font."""
HEIGHT: Final = 22
GAP: Final = 3


def text(table: Table, cost: Cost = UNIT, comm: float = 0.0, *, width: int | None = None) -> str:
    """The table in characters: ``F3`` is the forward of microbatch 3, dashes say how long, dots that the rank idles.

    Args:
        comm: time of a message between ranks.
        width: characters a line may have; a longer drawing goes on below. None: lines as long as it takes.
    """
    timeline, label = simulate(table, cost, comm), _labels(table)
    cell = max(len(label(a)) for order in table for a in order) + 2
    scale = cell / _unit(timeline)
    began = min(timeline.start.values())
    heads = [f"rank {rank} " for rank in range(len(table))]
    margin = max(map(len, heads))
    rows = []
    for order in table:
        row = ""
        for action in order:
            begin, end = (round((t - began) * scale) for t in (timeline.start[action], timeline.end[action]))
            row += _idle(len(row), begin, cell) + f" {label(action)} ".ljust(end - begin, "-")[: end - begin]
        rows.append(row)
    longest = max(map(len, rows))
    rows = [row + _idle(len(row), longest, cell) for row in rows]
    step = max(1, longest) if width is None else max(cell, (width - margin) // cell * cell)
    blocks = [
        "\n".join((head.ljust(margin) + row[at : at + step]).rstrip() for head, row in zip(heads, rows))
        for at in range(0, longest, step)
    ]
    return "\n\n".join([*blocks, legend(table)])


def svg(table: Table, cost: Cost = UNIT, comm: float = 0.0, *, title: str = "") -> str:
    """The table as a picture of its own: a box per action, its kind by letter and colour, later chunks paler.

    It has a light ground of its own, so that it is readable on pages of any colour; each box tells its action and times
    when pointed at.

    Args:
        comm: time of a message between ranks.
        title: a heading.
    """
    timeline, label, chunk = simulate(table, cost, comm), _labels(table), _chunks(table)
    longest = max(len(label(a)) for order in table for a in order)
    scale = (longest * CHARACTER + 7) / _unit(timeline)
    left = 12 + len(f"rank {len(table) - 1}") * CHARACTER + 8
    top = 34 if title else 12
    lines = [legend(table), _times(timeline)]
    origin = left - min(timeline.start.values()) * scale
    width = max(left + timeline.makespan * scale + 12, 24 + CHARACTER * max(map(len, [*lines, title])))
    below = top + len(table) * (HEIGHT + GAP)
    height = below + 18 * len(lines) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}" role="img" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="11" '
        'fill="#1a1a1a">',
        f"<title>{escape(title or 'Pipeline schedule')}</title>",
        f'<rect width="{width:.0f}" height="{height}" rx="6" fill="#fbfbf9"/>',
    ]
    if title:
        parts.append(f'<text x="12" y="22" font-size="13" font-weight="bold">{escape(title)}</text>')
    for rank, order in enumerate(table):
        y = top + rank * (HEIGHT + GAP)
        parts.append(f'<text x="12" y="{y + 15}">rank {rank}</text>')
        for action in order:
            parts += _box(action, rank, label(action), chunk[action.stage] > 0, timeline, origin, y, scale)
    parts += [f'<text x="12" y="{below + 18 * i + 15}">{escape(line)}</text>' for i, line in enumerate(lines)]
    return "\n".join([*parts, "</svg>\n"])


def legend(table: Table) -> str:
    """What the letters of a drawing mean."""
    kinds = {a.kind for order in table for a in order}
    words = [f"{kind} {name}" for kind, name in NAMES.items() if kind in kinds]
    chunks = max(_chunks(table)) + 1
    if chunks == 2:
        words.append("small letters: the rank's second chunk")
    elif chunks > 2:
        words.append("after the microbatch: the rank's chunk, a the first")
    return ", ".join(words)


def _box(
    action: Action, rank: int, label: str, later: bool, timeline: Timeline, origin: float, y: int, scale: float
) -> Iterator[str]:
    """One action's rectangle, and its label if that fits; time 0 is drawn at ``origin``."""
    start, end = timeline.start[action], timeline.end[action]
    x, width = origin + start * scale, (end - start) * scale
    name = f"{action}: {NAMES[action.kind]} of microbatch {action.microbatch} on stage {action.stage}, rank {rank}"
    yield (
        f'<g><title>{escape(f"{name}, {start:g} to {end:g}")}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
        f'height="{HEIGHT}" fill="{FILLS[action.kind][later]}" stroke="#4a4a4a" stroke-width="0.7"/>'
    )
    if len(label) * CHARACTER <= width:
        yield f'<text x="{x + width / 2:.2f}" y="{y + 15}" text-anchor="middle">{escape(label)}</text>'
    yield "</g>"


def _times(timeline: Timeline) -> str:
    """The two bubbles in a line."""
    return (
        f"makespan {timeline.makespan:g}, bubble {timeline.bubble:.1%}; "
        f"longest span of a rank {timeline.span:g}, bubble {timeline.span_bubble:.1%}"
    )


def _unit(timeline: Timeline) -> float:
    """The time that gets the width of a label: of the shortest action, unless that is very short."""
    lengths = [timeline.end[a] - timeline.start[a] for a in timeline.end]
    longest = max(lengths)
    return max(min((n for n in lengths if n > 0), default=1.0), longest / SMALLEST) if longest else 1.0


def _idle(begin: int, end: int, cell: int) -> str:
    """Columns in which a rank idles: a dot in the middle of each label's width."""
    return "".join("." if column % cell == cell // 2 else " " for column in range(begin, end))


def _chunks(table: Table) -> list[int]:
    """Which of its rank's chunks each stage is."""
    owner = owners(table)
    return [owner[:stage].count(rank) for stage, rank in enumerate(owner)]


def _labels(table: Table) -> Callable[[Action], str]:
    """Kind and microbatch; small letters for the second of two chunks, a letter behind for one of more."""
    chunk = _chunks(table)
    chunks = max(chunk) + 1

    def label(action: Action) -> str:
        name, which = f"{action.kind}{action.microbatch}", chunk[action.stage]
        if chunks <= 2:
            return name.lower() if which else name
        return name + (chr(ord("a") + which) if chunks <= 26 else f":{which}")

    return label
