"""Schedules by name: the package's own, and a user's function."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ..config import locate
from ..config.errors import ConfigError, nearest
from . import streams
from .auto import auto
from .simulate import simulate
from .table import Table, check, read


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What there is to know about a named schedule before its table is made."""

    make: Callable[..., Table]
    """Called with ``pp`` and ``microbatches``, and ``chunks`` unless the schedule has just one count of them."""
    summary: str
    chunks: int = 1
    """Stages of a rank unless asked otherwise."""
    any_chunks: bool = False
    """Whether another count of chunks is legal."""
    splits: bool = False
    """Whether it has I and W beside or instead of B."""


SCHEDULES: Final = MappingProxyType(
    {
        "gpipe": Schedule(make=streams.gpipe, summary="all forwards, then all backwards"),
        "1f1b": Schedule(make=streams.one_f_one_b, summary="each backward as soon as it can run"),
        "interleaved": Schedule(
            make=streams.interleaved, summary="1F1B over several chunks a rank: a smaller bubble", chunks=2,
            any_chunks=True,
        ),
        "interleaved_split": Schedule(
            make=streams.interleaved_split, summary="interleaved, with weight gradients deferred into the bubble",
            chunks=2, any_chunks=True, splits=True,
        ),
        "looped_bfs": Schedule(
            make=streams.looped_bfs, summary="all microbatches through a chunk before the next chunk",
            chunks=2, any_chunks=True,
        ),
        "zb_h1": Schedule(
            make=streams.zb_h1, summary="1F1B with weight gradients in the bubble, in 1F1B's memory", splits=True
        ),
        "zb_h2": Schedule(make=streams.zb_h2, summary="no bubble between steps, in twice the memory", splits=True),
        "zb_v": Schedule(
            make=streams.zb_v, summary="two chunks in a V: no bubble between steps, in 1F1B's memory", chunks=2,
            splits=True,
        ),
        "dualpipe_v": Schedule(
            make=streams.dualpipe_v, summary="two chunks in a V, forwards beside backwards to overlap", chunks=2,
            splits=True,
        ),
        "auto": Schedule(
            make=auto, summary="weight gradients placed by cost, under a memory limit", any_chunks=True, splits=True
        ),
    }
)  # fmt: skip
NAMES: Final = tuple(SCHEDULES)


LARGEST = 500_000
"""Forwards of a table: seconds of planning, and many times what large runs have."""


def build(
    name: str,
    pp: int,
    microbatches: int,
    chunks: int | None = None,
    *,
    key: str = "pipeline.schedule",
    chunks_key: str = "pipeline.chunks",
) -> Table:
    """The table of a named schedule, or of a user's function, checked.

    Args:
        name: one of :data:`NAMES`, or ``path/file.py:function`` or ``module:function``, which is called with ``pp``,
            ``microbatches`` and ``chunks`` (1 unless given) and returns a table.
        chunks: stages of each rank; None: the schedule's own default.
        key: what the name is called in messages.
        chunks_key: what the chunks are called.
    Raises:
        ConfigError: if there is no such schedule, it does not take that many chunks, or its table cannot run.
    """
    problems = problems_of(name, chunks, key=key, chunks_key=chunks_key)
    size = pp * microbatches * (chunks or (SCHEDULES[name].chunks if name in SCHEDULES else 1))
    if not problems and size > LARGEST:
        problems = [f"A table of pp*chunks*microbatches={size} forwards is too large to plan (pp={pp}, microbatches="
                    f"{microbatches}). Use at most {LARGEST}."]  # fmt: skip
    if problems:
        raise ConfigError(problems)
    if name not in SCHEDULES:
        return _own(name, pp, microbatches, chunks or 1, key)
    schedule = SCHEDULES[name]
    if schedule.any_chunks:
        return schedule.make(pp, microbatches, chunks or schedule.chunks)
    return schedule.make(pp, microbatches)


def problems_of(
    name: str, chunks: int | None, *, key: str = "pipeline.schedule", chunks_key: str = "pipeline.chunks"
) -> list[str]:
    """What is wrong with a name and a chunk count, before any table is made."""
    if name not in SCHEDULES:
        if ":" in name:
            return []
        close = nearest(name, NAMES)
        hint = f"Did you mean {close}? " if close else ""
        return [f"{key}={name} is not a schedule. {hint}Use one of [{', '.join(NAMES)}], or path/file.py:function."]
    schedule = SCHEDULES[name]
    if chunks is None or chunks == schedule.chunks or (schedule.any_chunks and chunks >= 1):
        return []
    if schedule.any_chunks:
        return [f"{chunks_key}={chunks} is not a number of stages ({key}={name}). Use 1 or more."]
    others = [other for other, entry in SCHEDULES.items() if entry.any_chunks] if chunks >= 1 else []
    change = f", or {key} in [{', '.join(others)}]" if others else ""
    return [f"{chunks_key}={chunks} is not {schedule.chunks}, the only chunk count of {key}={name}. "
            f"Use {chunks_key}={schedule.chunks}{change}."]  # fmt: skip


def warnings(
    schedule: str | Table,
    pp: int,
    microbatches: int,
    chunks: int | None = None,
    *,
    key: str = "train.microbatches",
) -> list[str]:
    """What a legal table is still worth a word about: fewer microbatches than ranks, and the bubble that leaves.

    Args:
        schedule: a name, as for :func:`build`, or a table.
        key: what the number of microbatches is called.
    """
    if microbatches >= pp:
        return []
    table = build(schedule, pp, microbatches, chunks) if isinstance(schedule, str) else schedule
    return [f"{key}={microbatches} is below pp={pp}: a bubble of {simulate(table).bubble:.1%} at unit costs. "
            f"Use {key}={pp} or more to shrink it."]  # fmt: skip


def _own(name: str, pp: int, microbatches: int, chunks: int, key: str) -> Table:
    """The table of a user's function."""
    make = locate.function(name, key)
    given = f"(pp={pp}, microbatches={microbatches}, chunks={chunks})"
    try:
        value = make(pp, microbatches, chunks)
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {' '.join(str(error).split())} ({last.filename}, line {last.lineno})"
        raise ConfigError([f"{key}={name} raises {said} when called with {given}. Correct it."]) from error
    table, problems = read(value)
    problems = problems or check(table, pp=pp, microbatches=microbatches)
    if problems:
        raise ConfigError([f"{key}={name} returns a table that cannot run {given}. {text}" for text in problems])
    return table
