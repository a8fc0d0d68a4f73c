"""From a configuration to its pipeline: which stage holds which parts, on which rank, and what each rank does when."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..config.check import batch, check, layout
from ..config.errors import ConfigError
from ..config.run import RunConfig
from . import named
from .auto import auto
from .cost import Cost, read
from .simulate import simulate
from .split import balanced, cut
from .table import Table, owners

MEASURED_STEPS = 3
"""Steps after which the schedule auto, without given costs, has measured them."""


@dataclass(frozen=True)
class Plan:
    """The stages of a run and their schedule."""

    table: Table
    """What each ``pp`` rank does, in order."""
    owners: tuple[int, ...]
    """The ``pp`` rank of each stage."""
    parts: tuple[tuple[str, ...], ...] | None
    """The names of each stage's parts; None for one stage of all parts, whatever they are called."""

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages that ``pp`` rank ``rank`` holds, ascending."""
        return tuple(stage for stage, owner in enumerate(self.owners) if owner == rank)

    @property
    def ends(self) -> tuple[int, int]:
        """The ``pp`` ranks of the first and of the last stage."""
        return self.owners[0], self.owners[-1]

    def names(self, rank: int) -> tuple[str, ...] | None:
        """The names of all parts on ``pp`` rank ``rank``, in order; None for all parts of the model."""
        return None if self.parts is None else tuple(n for stage in self.stages(rank) for n in self.parts[stage])


def schedule_name(config: RunConfig) -> str:
    """The schedule of ``config``: the one it names, or 1f1b, or interleaved_split with several chunks."""
    return config.pipeline.schedule or ("1f1b" if (config.pipeline.chunks or 1) == 1 else "interleaved_split")


def measures(config: RunConfig) -> bool:
    """Whether the schedule is made from what the first steps of the run take: auto without ``pipeline.costs``."""
    return schedule_name(config) == "auto" and not config.pipeline.costs


def first_schedule(config: RunConfig) -> str:
    """The schedule that the run starts with.

    It is the run's own, but for one that :func:`measures`: that starts with one that splits backward, on which
    costs can be measured (or, under a ``pipeline.memory_limit`` that is too low for it, with one of its own at unit
    costs), and goes on with the table that :func:`replanned` makes.
    """
    if measures(config):
        return "zb_h1" if (config.pipeline.chunks or 1) == 1 else "interleaved_split"
    return schedule_name(config)


def plan(config: RunConfig) -> Plan:
    """The pipeline of ``config`` as it starts, the same on every rank that asks.

    Raises:
        ConfigError: with all :func:`problems`, if there are any.
    """
    found, made = _plan(config)
    if made is None or found:
        raise ConfigError(found)
    return made


def replanned(config: RunConfig, cost: Cost, comm: float) -> Table:
    """The table of schedule auto for ``cost`` and ``comm``, which were measured, with the stages where they are.

    Args:
        cost, comm: times of an action and of a message between ranks, in any one unit; the same on every rank.
    """
    pipeline, pp = config.pipeline, config.dims.pp
    return auto(pp, config.train.microbatches, pipeline.chunks or 1, cost=cost, comm=comm, limit=pipeline.memory_limit,
                placement="loop")  # fmt: skip


def check_run(
    config: RunConfig,
    *,
    world: int | None = None,
    gpus: int | None = None,
    local_world: int | None = None,
    run: bool = True,
) -> list[str]:
    """What forbids ``config``, its pipeline included, one message each; the arguments are those of ``config.check``."""
    dims, wrong = layout(config.parallel, world)
    sized = config if wrong else config.model_copy(update={"parallel": str(dims)})
    found = check(config, world=world, gpus=gpus, local_world=local_world, run=run) + problems(sized)
    return list(dict.fromkeys(found))


def problems(config: RunConfig) -> list[str]:
    """What forbids the pipeline of ``config``, one message each; a layout that does not parse is not among them."""
    unsized = bool(layout(config.parallel)[1])
    return [*_idle(config), *_no_schedule(config)] if unsized else _plan(config)[0]


def warnings(config: RunConfig) -> list[str]:
    """What is legal but surely not meant: fewer microbatches than ``pp`` ranks, with the bubble that this leaves; or a
    run that ends before the schedule auto has measured."""
    pp, microbatches, steps = config.dims.pp, config.train.microbatches, config.train.steps
    found = named.warnings(plan(config).table, pp, microbatches) if microbatches < pp else []
    if measures(config) and pp > 1 and steps <= MEASURED_STEPS:
        found.append(
            f"train.steps={steps} ends before pipeline.schedule=auto has measured its costs ({MEASURED_STEPS} "
            f"steps): the run keeps {first_schedule(config)}. Give pipeline.costs or more train.steps."
        )
    return found


def _plan(config: RunConfig) -> tuple[list[str], Plan | None]:
    """All problems, and the plan where there are none."""
    costs, wrong = _part_costs(config)
    pp, pipeline = config.dims.pp, config.pipeline
    bad = _no_schedule(config)
    known = named.SCHEDULES.get(schedule_name(config))
    n_stages = pp * (pipeline.chunks or (known.chunks if known else 1))
    if costs is not None and n_stages > len(costs) and not bad:  # its table may be too large to make
        bad.append(_too_many(config, n_stages, list(costs)))
    found = [*_idle(config), *wrong, *bad]
    if config.train.microbatches > config.data.batch_size:  # the table could be endless
        return [*found, *batch(config, config.dims)], None
    if bad:
        return found, None
    try:
        table = _table(config)
    except ConfigError as error:
        return [*found, *error.problems], None
    owner = tuple(owners(table))
    found += _cut_problems(config, len(owner), costs, bool(wrong))
    if found or costs is None or len(owner) == 1:
        return found, Plan(table, owner, None)
    counts = pipeline.stages or balanced(list(costs.values()), len(owner))
    return [], Plan(table, owner, cut(list(costs), counts))


def _table(config: RunConfig) -> Table:
    """The table that the run starts with.

    Raises:
        ConfigError: if there is no such schedule, or not for this layout.
    """
    pipeline, pp, microbatches = config.pipeline, config.dims.pp, config.train.microbatches
    chunks, limit = pipeline.chunks or 1, pipeline.memory_limit
    if schedule_name(config) == "auto" and pipeline.costs:
        cost, comm = read(pipeline.costs, "pipeline.costs")
        return auto(pp, microbatches, chunks, cost=cost, comm=comm, limit=limit)
    table = named.build(first_schedule(config), pp, microbatches, pipeline.chunks)
    if measures(config) and limit is not None and max(simulate(table).peak) > limit:
        return _halved(auto(pp, microbatches, chunks, limit=limit, placement="loop"))
    return table


def _halved(table: Table) -> Table:
    """The same table with each B as its I and its W, so that their times can be measured."""
    return [
        [part for a in order for part in ((a._replace(kind="I"), a._replace(kind="W")) if a.kind == "B" else (a,))]
        for order in table
    ]


def _idle(config: RunConfig) -> list[str]:
    """Fields that only the schedule auto reads, given to another."""
    name, pipeline = schedule_name(config), config.pipeline
    limit = "" if pipeline.memory_limit is None else f"{pipeline.memory_limit:g}"
    return [
        f"pipeline.{field}={value} has no effect: only the schedule auto plans with it (pipeline.schedule={name}). "
        "Leave it out, or use pipeline.schedule=auto."
        for field, value in (("costs", pipeline.costs), ("memory_limit", limit))
        if value and name != "auto"
    ]


def _no_schedule(config: RunConfig) -> list[str]:
    """Why no table can be made, whatever the layout."""
    name, pipeline = schedule_name(config), config.pipeline
    found = named.problems_of(name, pipeline.chunks)
    if name == "auto":
        try:
            read(pipeline.costs, "pipeline.costs")
        except ConfigError as error:
            found += error.problems
    return found


def _part_costs(config: RunConfig) -> tuple[dict[str, float] | None, list[str]]:
    """The model's parts and their costs, and what is wrong with a user's own."""
    owner = f"{type(config.model).__name__}.part_costs"
    want = "Return every part's name in order with its cost, a number from 0, or None"
    try:
        costs: object = config.model.part_costs(config.data.sequence_length)
    except Exception as error:
        return None, [f"{owner} fails: {type(error).__name__}: {' '.join(str(error).split())}. {want}."]
    if costs is None:
        return None, []
    if not isinstance(costs, Mapping) or not costs:
        return None, [f"{owner} returns {costs!r}. {want}."]
    bad = [
        f"{owner} returns {name!r}: {cost!r}. {want}."
        for name, cost in costs.items()
        if not isinstance(name, str) or not isinstance(cost, int | float) or not 0 <= cost < math.inf
    ]
    return (None, bad) if bad else (dict(costs), [])


def _cut_problems(config: RunConfig, n_stages: int, costs: Mapping[str, float] | None, reported: bool) -> list[str]:
    """Why the model cannot be cut into ``n_stages``, as it is or as ``pipeline.stages`` asks."""
    counts = config.pipeline.stages
    key, sizes = _stages(config, n_stages)
    if costs is None:
        if reported or (n_stages == 1 and not counts):
            return []
        what = f"{key} cuts the model" if n_stages > 1 else f"pipeline.stages={_joined(counts)} counts parts"
        return [
            f"{what}, but {type(config.model).__name__} does not say what its parts are{sizes}. Define "
            "part_costs(sequence_length) in it: every part's name in order with its relative cost. Or use one stage: "
            "pp1, pipeline.chunks=1, no pipeline.stages."
        ]
    if n_stages > len(costs):
        return [_too_many(config, n_stages, list(costs))]
    even = _joined(balanced(list(costs.values()), n_stages))
    use = f"Use {n_stages} numbers that add up to {len(costs)}, such as {even}" if n_stages > 1 else f"Use {len(costs)}"
    if counts and len(counts) != n_stages:
        return [
            f"pipeline.stages={_joined(counts)} counts {len(counts)} stages, not the {n_stages} of {key}{sizes}. "
            f"{use}, or leave it out."
        ]
    if counts and sum(counts) != len(costs):
        return [
            f"pipeline.stages={_joined(counts)} adds up to {sum(counts)} parts, but the model has {len(costs)} "
            f"({_listed(list(costs))}). {use}, or leave it out."
        ]
    return []


def _too_many(config: RunConfig, n_stages: int, names: list[str]) -> str:
    """The message for more stages than parts, with the closest layouts that fit."""
    pp, n = config.dims.pp, len(names)
    key, sizes = _stages(config, n_stages)
    chunks = n_stages // pp
    fits = [f"pp from 1 to {n // chunks}" + (f" with pipeline.chunks={chunks}" if chunks > 1 else "")]
    fits = fits if n // chunks else []
    if chunks > 1 and n >= pp:
        fits.append(f"pipeline.chunks from 1 to {n // pp} with pp={pp}" if n // pp > 1 else f"one chunk with pp={pp}")
    are = "stages are" if n_stages % pp == 0 else f"makes {n_stages} stages,"
    return (
        f"{key} {are} more than the model's {n} parts ({_listed(names)}{sizes.replace(' (', '; ') or ')'}. "
        f"Use {', or '.join([*fits, 'a model of more layers'])}."
    )


def _stages(config: RunConfig, n_stages: int) -> tuple[str, str]:
    """What makes so many stages, as a message's key, and the sizes behind it."""
    pp = config.dims.pp
    if n_stages == pp:
        return f"pp={pp}", ""
    if n_stages % pp:
        return f"pipeline.schedule={schedule_name(config)}", f" (pp={pp})"
    return f"pp*chunks={n_stages}", f" (pp={pp}, chunks={n_stages // pp}, schedule {schedule_name(config)})"


def _joined(counts: tuple[int, ...]) -> str:
    return ",".join(map(str, counts))


def _listed(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 4 else [names[0], names[1], "...", names[-1]])
