"""Schedules as data: what an action is, what it waits for, and whether a table can run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice, pairwise
from numbers import Integral
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LISTED = 8
"""Actions that one message lists; the rest it counts."""


class Action(NamedTuple):
    """One unit of work on one stage for one microbatch. Prints as ``F0.3``: forward, stage 0, microbatch 3."""

    kind: Kind
    """F forward, B full backward; or its two halves: I the input's gradient, W the weights' gradients."""
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


Table = list[list[Action]]
"""``table[rank]`` lists that rank's actions in order."""


class Step(NamedTuple):
    """An action that can run, where, and the actions that it waited for."""

    rank: int
    action: Action
    needs: list[Action]


class Wait(NamedTuple):
    """A rank that cannot go on: what it is at, and what that lacks."""

    rank: int
    action: Action
    lacks: list[Action]

    def __str__(self) -> str:
        return f"rank {self.rank} waits at {self.action} for {', '.join(map(str, self.lacks))}"


def owners(table: Table) -> list[int]:
    """The ``pp`` rank of each stage, read off the table, so that a placement is never written twice.

    Raises:
        ValueError: if a stage is on two ranks, or the stages are not numbered from 0 without a gap.
    """
    problems = _placement(table)
    if problems:
        raise ValueError(" ".join(problems))
    owner = {a.stage: rank for rank, order in enumerate(table) for a in order}
    return [owner[stage] for stage in range(len(owner))]


def split_backwards(table: Table) -> frozenset[tuple[int, int]]:
    """The (stage, microbatch) pairs whose backward is an I and, later, a W."""
    return frozenset((a.stage, a.microbatch) for order in table for a in order if a.kind == "I")


def needs(action: Action, n_stages: int, split: frozenset[tuple[int, int]]) -> list[Action]:
    """The actions whose results ``action`` uses: of its own stage, and the neighbour's that sends it a tensor.

    Args:
        split: as :func:`split_backwards` gives it; it says whether the next stage's gradient comes from a B or an I.
    """
    kind, stage, m = action
    if kind == "F":
        return [Action("F", stage - 1, m)] if stage else []
    if kind == "W":
        return [Action("I", stage, m)]
    found = [Action("F", stage, m)]
    if stage + 1 < n_stages:
        found.append(Action("I" if (stage + 1, m) in split else "B", stage + 1, m))
    return found


def last_backwards(order: list[Action]) -> set[Action]:
    """The actions of one rank after which a stage's gradients are complete: its last B or W."""
    last: dict[int, Action] = {a.stage: a for a in order if a.kind in "BW"}
    return set(last.values())


def play(table: Table) -> tuple[list[Step], list[Wait]]:
    """Run the table in whatever order its dependencies allow, and tell where it gets stuck.

    Returns:
        every action that can run, each after those it needs and after those before it on its rank; and what each rank
        waits for that cannot finish, even with unlimited buffers.
    """
    n_stages, split = 1 + max((a.stage for order in table for a in order), default=-1), split_backwards(table)
    steps: list[Step] = []
    done: set[Action] = set()
    cursor = [0] * len(table)
    sleepers: dict[Action, list[int]] = {}
    awake = deque(range(len(table)))
    while awake:
        rank = awake.popleft()
        order = table[rank]
        while cursor[rank] < len(order):
            action = order[cursor[rank]]
            required = needs(action, n_stages, split)
            if not done.issuperset(required):
                missing = next(a for a in required if a not in done)
                sleepers.setdefault(missing, []).append(rank)
                break
            done.add(action)
            steps.append(Step(rank, action, required))
            awake += sleepers.pop(action, [])
            cursor[rank] += 1
    waits = []
    for rank, order in enumerate(table):
        if cursor[rank] < len(order):
            action = order[cursor[rank]]
            lacks = [a for a in needs(action, n_stages, split) if a not in done]
            waits.append(Wait(rank, action, lacks))
    return steps, waits


def read(value: object) -> tuple[Table, list[str]]:
    """What a user's function returned as a table of actions; plain ``(kind, stage, microbatch)`` triples will do.

    Returns:
        the table, and what about the value is not a table, in which case the table is empty.
    """
    form = "Return one list of Action(kind, stage, microbatch) for each rank"
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return [], [f"{_shown(value)} is not a table. {form}."]
    table: Table = []
    problems: list[str] = []
    for rank, order in enumerate(value):
        if not isinstance(order, Iterable) or isinstance(order, str | bytes | Mapping | AbstractSet | Action):
            problems.append(f"{_shown(order)} is not the list of actions of rank {rank}. {form}.")
            continue
        actions = [(entry, _action(entry)) for entry in order]
        wrong = [_shown(entry) for entry, action in actions if action is None]
        if wrong:
            verb = "is not an action" if len(wrong) == 1 else "are not actions"
            problems.append(f"{_listing(wrong)} on rank {rank} {verb}. Use Action(kind, stage, microbatch).")
        table.append([action for _, action in actions if action is not None])
    return ([], problems) if problems else (table, [])


def check(table: Table, *, pp: int, microbatches: int) -> list[str]:
    """All that is wrong with a table, in words its author understands; nothing if it can run.

    A table can run if it has ``pp`` ranks; each stage is on one rank, and stages are numbered from 0; each stage runs,
    for each microbatch, one F and either one B or one I and one W; within a stage, forwards, backwards (B or I) and
    weight gradients (B or W) each ascend in microbatch, so that every schedule adds up gradients in the same order;
    and no rank waits for ever.
    """
    problems = []
    if len(table) != pp:
        problems.append(f"The table has {len(table)} ranks, not pp={pp}. Give one list of actions for each rank.")
    problems += _fields(table, microbatches)
    if problems:
        return problems
    problems += [f"Rank {rank} has no action. Give each rank at least one stage." for rank in _idle(table)]
    problems += _placement(table)
    if problems:
        return problems
    for stage, rank in enumerate(owners(table)):
        order = [a for a in table[rank] if a.stage == stage]
        problems += _count(order, stage, rank, microbatches) or _ascent(order, rank)
    if problems:
        return problems
    _, waits = play(table)
    if waits:
        return [f"The table deadlocks: {'; '.join(map(str, waits))}. Reorder these actions."]
    return []


def _fields(table: Table, microbatches: int) -> list[str]:
    """Actions that no table of so many microbatches can have."""
    last = f"0 to {microbatches - 1}" if microbatches > 1 else "0"
    rules = {
        "of an unknown kind": f"Use {', '.join(KINDS[:-1])} or {KINDS[-1]}",
        "on a negative stage": "Number the stages from 0",
        f"of no microbatch of microbatches={microbatches}": f"Use {last}",
    }
    problems = []
    for rank, order in enumerate(table):
        broken: dict[str, list[str]] = {rule: [] for rule in rules}
        for action in order:
            holds = (action.kind in KINDS, action.stage >= 0, 0 <= action.microbatch < microbatches)
            if not all(holds):
                for rule, good in zip(rules, holds):
                    broken[rule] += [] if good else [str(action)]
        for rule, found in broken.items():
            if found:
                verb = "is" if len(found) == 1 else "are"
                problems.append(f"{_listing(found)} on rank {rank} {verb} {rule}. {rules[rule]}.")
    return problems


def _idle(table: Table) -> list[int]:
    return [rank for rank, order in enumerate(table) if not order]


def _placement(table: Table) -> list[str]:
    """Stages on more than one rank, and stages that are missing."""
    where: dict[int, dict[int, Action]] = {}
    for rank, order in enumerate(table):
        for action in order:
            where.setdefault(action.stage, {}).setdefault(rank, action)
    problems = []
    for stage, ranks in sorted(where.items()):
        if len(ranks) > 1:
            places = " and ".join(f"rank {rank} ({action})" for rank, action in ranks.items())
            problems.append(f"Stage {stage} is on {places}. Keep each stage on one rank.")
    if sorted(where) != list(range(len(where))):
        last = max(where)
        missing = [str(s) for s in islice((s for s in range(last) if s not in where), LISTED + 1)]
        verb = (
            f"Stage {missing[0]} is" if len(missing) == 1 else f"Stages {_listing(missing, last + 1 - len(where))} are"
        )
        problems.append(f"{verb} missing (the last stage is {last}). Number the stages from 0 without a gap.")
    return problems


def _count(order: list[Action], stage: int, rank: int, microbatches: int) -> list[str]:
    """Actions of one stage that are repeated, missing or too many."""
    times = Counter(order)
    repeated = [str(a) for a, n in times.items() if n > 1]
    missing: list[str] = []
    doubled: list[str] = []
    for m in range(microbatches):
        f, b, i, w = (Action(kind, stage, m) for kind in ("F", "B", "I", "W"))
        if f not in times:
            missing.append(str(f))
        halves = [str(a) for a in (i, w) if a in times]
        if b in times and halves:
            doubled.append(f"both {b} and {' and '.join(halves)}")
        elif b not in times and not halves:
            missing.append(f"{b} (or {i} and {w})")
        elif b not in times and len(halves) == 1:
            missing.append(str(w if i in times else i))
    problems = []
    if len(repeated) == 1:
        problems.append(f"{repeated[0]} runs {max(times.values())} times on rank {rank}. Run it once.")
    elif repeated:
        problems.append(f"{_listing(repeated)} run more than once on rank {rank}. Run each of them once.")
    if doubled:
        problems.append(f"Rank {rank} runs {_listing(doubled)}. Keep either the B, or the I and the W.")
    if missing:
        problems.append(f"Rank {rank} never runs {_listing(missing)}. Run every microbatch of stage {stage}.")
    return problems


def _ascent(order: list[Action], rank: int) -> list[str]:
    """The first actions of one stage that run before an earlier microbatch's, or before what they need of the stage."""
    problems = []
    place = {action: i for i, action in enumerate(order)}
    for kinds, what in (("F", "forwards"), ("BI", "backwards"), ("BW", "weight gradients")):
        ours = [a for a in order if a.kind in kinds]
        for before, after in pairwise(ours):
            if after.microbatch < before.microbatch and not (kinds == "BW" and before.kind == after.kind == "B"):
                problems.append(
                    f"{after} runs after {before} on rank {rank}. Run the {what} of a stage in ascending microbatches."
                )
                break
    early: dict[Kind, tuple[Action, Action]] = {}
    for action in order:
        if action.kind != "F":
            source = Action("I" if action.kind == "W" else "F", action.stage, action.microbatch)
            if place[source] > place[action]:
                early.setdefault(action.kind, (action, source))
    return problems + [f"{a} runs before {source} on rank {rank}. Run it later." for a, source in early.values()]


def _action(entry: Any) -> Action | None:
    """An entry of a user's list as an action, if it has the form of one."""
    if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != 3:
        return None
    kind, stage, microbatch = entry
    whole = all(isinstance(x, Integral) and not isinstance(x, bool) for x in (stage, microbatch))
    return Action(kind, int(stage), int(microbatch)) if isinstance(kind, str) and whole else None  # pyright: ignore


def _shown(value: object) -> str:
    text = str(value) if isinstance(value, Action) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _listing(words: Sequence[str], of: int | None = None) -> str:
    """The first words, and how many more there are, of ``of`` in all if not all are given."""
    rest = (len(words) if of is None else of) - LISTED
    return ", ".join(words[:LISTED]) + (f" and {rest} more" if rest > 0 else "")
