"""The held-out loss by position, under any layout in local processes, as a table and as a picture.

It shows how far a model can read: past the length it was trained at, rotary positions turn queries and keys by angles
that no training step has seen, and the loss climbs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from ..config.errors import ConfigError
from ..config.run import RunConfig
from ..data.check import open_files
from ..data.check import problems as data_problems
from ..data.heldout import Windows
from ..mesh.pool import Pool
from ..mesh.pool_worker import RankContext
from ..schedule.plan import check_run, plan
from ..train.evaluate import PositionLoss, loss_by_position
from ..train.state import build_state
from .verify import forked_pool

COLOURS = ("#d1495b", "#e0a030", "#2a7f62", "#30638e")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 380, 64, 40, 20, 52
"""Pixels of the picture, and around its plot."""


def by_position(runs: Mapping[str, RunConfig], stride: int, *,
                pools: Callable[[int], Pool] = forked_pool) -> dict[str, PositionLoss]:  # fmt: skip
    """The loss by position of the models that ``runs`` start from, on rows that each lie inside one document.

    Args:
        runs: ``train.init_from`` names the weights, ``data.sequence_length`` how far to look.
        stride: tokens from the start of one row to that of the next in the same document.
        pools: makes the pool of so many ranks; by default forked from this process, which must not have run a torch
            operator yet.

    Raises:
        ConfigError: if a run cannot start, or no held-out document is long enough.
    """
    if problems := [problem for config in runs.values() for problem in _problems(config, stride)]:
        raise ConfigError(list(dict.fromkeys(problems)))
    found: dict[str, PositionLoss] = {}
    for world in {config.dims.world for config in runs.values()}:
        with pools(world) as pool:
            for name, config in runs.items():
                if config.dims.world == world:
                    found[name] = pool.run(measure_rank, config, stride)[0]
    return {name: found[name] for name in runs}


def _problems(config: RunConfig, stride: int) -> list[str]:
    data = config.data
    problems = check_run(config) or data_problems(data, config.model.vocab_size)
    if problems or Windows(open_files(data), data.sequence_length, stride).n_rows:
        return problems
    return [
        f"data.sequence_length={data.sequence_length} is not below the length of any held-out document "
        f"(data.files={','.join(data.files)}). Use a shorter data.sequence_length, or prepare longer documents."
    ]


def measure_rank(context: RankContext, config: RunConfig, stride: int) -> PositionLoss:
    """One rank's part of ``by_position``."""
    state = build_state(config, context.mesh(config.parallel, ends=plan(config).ends))
    return loss_by_position(state, Windows(open_files(config.data), config.data.sequence_length, stride))


def table(found: Mapping[str, PositionLoss], width: int) -> str:
    """Nats per target of each model in ``found``, a line for every ``width`` positions."""
    length = len(next(iter(found.values())).nats)
    names = [max(9, len(name)) for name in found]
    lines = ["positions  " + "  ".join(f"{name:>{n}}" for name, n in zip(found, names))]
    for start in range(0, length, width):
        stop = min(start + width, length)
        means = (f"{one.mean(start, stop):{n}.4f}" for one, n in zip(found.values(), names))
        lines.append(f"{f'{start}-{stop - 1}':>9}  " + "  ".join(means))
    return "\n".join(lines)


def picture(found: Mapping[str, PositionLoss], width: int, mark: int, title: str) -> str:
    """The table as an SVG: a line for each model in ``found``, a point for every ``width`` positions.

    Args:
        mark: a position to draw a line at, such as the length that was trained at.
    """
    length = len(next(iter(found.values())).nats)
    places = [(start, min(start + width, length)) for start in range(0, length, width)]
    lines = {name: [one.mean(*place) for place in places] for name, one in found.items()}
    values = [v for line in lines.values() for v in line if math.isfinite(v)]
    low, high = math.floor(min(values) * 4) / 4, math.ceil(max(values) * 4) / 4 + 0.25
    middles = [(start + stop) / 2 for start, stop in places]

    def x(position: float) -> float:
        return LEFT + position / length * (WIDTH - LEFT - RIGHT)

    def y(nats: float) -> float:
        return TOP + (high - nats) / (high - low) * (HEIGHT - TOP - BOTTOM)

    drawn = [_grid(low, high, length, mark, x, y)]
    for i, (name, line) in enumerate(lines.items()):
        points = " ".join(f"{x(p):.1f},{y(v):.1f}" for p, v in zip(middles, line) if math.isfinite(v))
        drawn.append(_line(points, name, COLOURS[i % len(COLOURS)], TOP + 16 + 18 * i))
    return _document(title, drawn)


def _grid(
    low: float, high: float, length: int, mark: int, x: Callable[[float], float], y: Callable[[float], float]
) -> str:
    step = next(s for s in (0.25, 0.5, 1.0, 2.0, 5.0, math.inf) if (high - low) / s <= 8)
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for i in range(math.ceil(low / step), math.floor(high / step) + 1):
        at = y(i * step)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{i * step:g}</text>')
    for i in range(5):
        at = length * i // 4
        parts.append(f'<text x="{x(at):.1f}" y="{floor + 18}" text-anchor="middle">{at:,}</text>')
    parts.append(f'<line x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="{TOP}" y2="{floor}" stroke="#888" '
                 'stroke-dasharray="4 4"/>')  # fmt: skip
    parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{floor}" y2="{floor}" stroke="#444"/>')
    parts.append(f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">position in the document'
                 "</text>")  # fmt: skip
    middle = (TOP + floor) // 2
    parts.append(f'<text x="16" y="{middle}" transform="rotate(-90 16 {middle})" text-anchor="middle">nats per token'
                 "</text>")  # fmt: skip
    return "".join(parts)


def _line(points: str, name: str, colour: str, at: int) -> str:
    left = WIDTH - RIGHT - 250
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        f'<line x1="{left}" x2="{left + 24}" y1="{at}" y2="{at}" stroke="{colour}" stroke-width="2.5"/>'
        f'<text x="{left + 32}" y="{at + 4}">{escape(name)}</text>'
    )


def _document(title: str, drawn: Sequence[str]) -> str:
    shown = escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{shown}" '
        'font-family="sans-serif" font-size="12" fill="#222">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
        f'<text x="{LEFT}" y="22" font-size="14">{shown}</text>{"".join(drawn)}</svg>\n'
    )
