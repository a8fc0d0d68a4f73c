"""``--group.field value`` from the command line onto a recipe's configuration, reporting every mistake at once.

tyro, the usual choice, stops at the first value it cannot build; here a bad value is noted, the recipe's own takes its
place, and the checks of the whole configuration still run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from . import fields
from .base import Part
from .errors import nearest
from .run import RunConfig

FLAG = re.compile(r"--(?P<no>no-)?(?P<path>[A-Za-z_][\w-]*(?:\.[\w-]+)+)(?:=(?P<value>.*))?", re.DOTALL)
"""An override: a dotted name, possibly with its value behind an equals sign."""


def split(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words of a command line that are not overrides, and the overrides by dotted name in underscores.

    A name takes the next word as its value unless that is another flag: then it is switched on; ``--no-group.field``
    switches it off. The last of several wins.
    """
    rest: list[str] = []
    found: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        match = FLAG.fullmatch(word)
        if match is None:
            rest.append(word)
            continue
        path = match["path"].replace("-", "_")
        if match["no"]:
            found[path] = "false"
        elif match["value"] is not None:
            found[path] = match["value"]
        else:
            found[path] = words.pop(0) if words and not words[0].startswith("--") else "true"
    return rest, found


def apply(recipe: RunConfig, overrides: Mapping[str, str]) -> tuple[RunConfig, list[str]]:
    """``recipe`` with ``overrides`` (values as typed, by dotted name), and what is wrong with them.

    Where a value is wrong the returned configuration keeps the recipe's, so that it can be checked as a whole.
    """
    problems: list[str] = []
    update: dict[str, Any] = {}
    by_group: dict[str, dict[str, str]] = {}
    for path, raw in overrides.items():
        group = path.partition(".")[0]
        if path == "parallel":
            update["parallel"] = raw
        elif isinstance(getattr(recipe, group, None), Part) and "." in path:
            by_group.setdefault(group, {})[path] = raw
        else:
            problems.append(unknown(recipe, path, raw))
    for group, given in by_group.items():
        update[group], found = _group(recipe, group, given)
        problems += found
    return recipe.model_copy(update=update), problems


def unknown(recipe: RunConfig, path: str, raw: str) -> str:
    """The message for a name that no field of ``recipe`` has, with the closest one."""
    names = [leaf.path for leaf in fields.leaves(recipe)]
    last = path.rpartition(".")[2]
    same = [n for n in names if n.rpartition(".")[2] == last]
    close = same[0] if same else nearest(path, names, cutoff=0.7)
    if close is None:  # a name misspelt and misplaced: compare its last word alone
        word = nearest(last, {n.rpartition(".")[2] for n in names}, cutoff=0.7)
        close = next((n for n in names if n.rpartition(".")[2] == word), None)
    if close:
        hint = f"Did you mean {close}?"
    else:
        group = path.partition(".")[0]
        inside = [n for n in names if n.startswith(f"{group}.")]
        hint = f"Use one of {', '.join(inside or [f for f in RunConfig.model_fields if f != 'parallel'])}."
    return f"{path}={raw} is not a field of this run. {hint}"


def _group(recipe: RunConfig, group: str, given: Mapping[str, str]) -> tuple[Part, list[str]]:
    """One group of ``recipe`` with the values ``given``, and what is wrong with them."""
    base: Part = getattr(recipe, group)
    values = base.model_dump()
    problems: dict[str, str] = {}
    # a new kind decides which other fields exist, so it goes first, the outer before the inner
    for path in sorted(given, key=lambda p: (not p.endswith(".kind"), p.count("."))):
        steps = path.split(".")[1:]
        message = _set(type(base), values, steps, group, given[path])
        if message == "":
            problems[path] = unknown(recipe, path, given[path])
        elif message:
            problems[path] = message
    for _ in range(2):  # as given, then with the recipe's value in place of each bad one
        try:
            return type(base).model_validate(values), list(problems.values())
        except ValidationError as error:
            bad = fields.problems(error, type(base), group, given)
            problems = bad | problems
            for path in bad:
                _restore(values, base, path.split(".")[1:])
    return base, list(problems.values())


def _set(part: type[Part], values: dict[str, Any], steps: Sequence[str], prefix: str, raw: str) -> str | None:
    """Put ``raw`` where ``steps`` lead to; a message when they lead elsewhere, an empty one when nowhere."""
    name, *inner = steps
    field = part.model_fields.get(name)
    if field is None:
        return ""
    key = f"{prefix}.{name}"
    classes = fields.part_classes(field)
    if not inner:
        if classes and not (raw == "none" and fields.may_be_none(field)):
            return f"{key}={raw} is not a value: {key} is a group of fields. Set its fields one by one."
        values[name] = _value(field, raw)
        return None
    if not classes:
        return f"{key}.{'.'.join(inner)}={raw} is not a field: {key} is a single value. Set {key}."
    inside: dict[str, Any] = values[name] if isinstance(values.get(name), dict) else {}
    if inner == ["kind"]:
        inside = _switch(classes, inside, raw)
    elif len(classes) > 1 and "kind" not in inside:
        kinds = " or ".join(fields.kind_of(c) for c in classes)
        return f"{key}.{'.'.join(inner)}={raw} has no place while {key} is none. Set {key}.kind to {kinds} as well."
    values[name] = inside
    chosen = next((c for c in classes if fields.kind_of(c) == inside.get("kind")), classes[0])
    others = [fields.kind_of(c) for c in classes if inner[0] in c.model_fields]
    if others and inner[0] not in chosen.model_fields:
        return (
            f"{key}.{'.'.join(inner)}={raw} is a field of {' and '.join(others)}, but {key}.kind={inside['kind']}. "
            f"Leave it out, or set {key}.kind to {others[0]} as well."
        )
    return _set(chosen, inside, inner, key, raw)


def _switch(classes: Sequence[type[Part]], inside: dict[str, Any], kind: str) -> dict[str, Any]:
    """What remains of a part's values when it becomes another ``kind``: the fields both have."""
    chosen = next((c for c in classes if fields.kind_of(c) == kind), None)
    return inside if chosen is None else {k: v for k, v in inside.items() if k in chosen.model_fields}


def _value(field: FieldInfo, raw: str) -> object:
    if raw == "none" and fields.may_be_none(field):
        return None
    if fields.is_tuple(field):
        return tuple(word.strip() for word in raw.split(",")) if raw else ()
    return next((value for value in fields.literals(field.annotation) if fields.typed(value) == raw), raw)


def _restore(values: dict[str, Any], base: Part, steps: Sequence[str]) -> None:
    """Put the value of ``base`` back where ``steps`` lead to, or nothing where it has none."""
    for name in steps[:-1]:
        inside = getattr(base, name, None)
        if not isinstance(inside, Part) or not isinstance(values.get(name), dict):
            values[name] = inside.model_dump() if isinstance(inside, Part) else inside
            return
        base, values = inside, values[name]
    last = steps[-1]
    inside = getattr(base, last, None)
    if hasattr(base, last):
        values[last] = inside.model_dump() if isinstance(inside, Part) else inside
    else:
        values.pop(last, None)


def validated(recipe: RunConfig, saved: Mapping[str, Any]) -> Iterator[tuple[str, Any, list[str]]]:
    """Each group of a saved run read by the type it has in ``recipe``: name, value, and what is wrong with it."""
    for name, value in saved.items():
        base = getattr(recipe, name, None)
        if isinstance(base, Part):
            try:
                yield name, type(base).model_validate(value), []
            except ValidationError as error:
                yield name, base, list(fields.problems(error, type(base), name, {}).values())
        elif name == "parallel":
            yield name, str(value), []
        else:
            yield name, None, [f"{name} is not a group of this run. Remove it from the saved configuration."]
