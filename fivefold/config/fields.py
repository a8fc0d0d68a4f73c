"""What a field accepts, in words, and what is wrong with a value it does not accept."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Interval, Le, Lt
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from .base import Part
from .errors import nearest


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One field of a configuration, for the help text and for finding a name."""

    path: str
    """Dotted name."""
    kind: str
    """What it accepts."""
    value: str
    """Its value, as it would be typed."""
    doc: str
    """Its docstring."""


def leaves(part: Part, prefix: str = "", kinds: Sequence[str] = ()) -> Iterator[Leaf]:
    """The fields of ``part`` and of the parts inside it, in order.

    Args:
        prefix: what comes before their names.
        kinds: the kinds of part that could stand in its place.
    """
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, Part):
            yield from leaves(value, f"{prefix}{name}.", [kind_of(c) for c in part_classes(field)])
        else:
            doc = " ".join((field.description or "").replace("``", "").split())
            accepts = "one of " + ", ".join(kinds) if name == "kind" and kinds else describe(field)
            yield Leaf(path=prefix + name, kind=accepts, value=typed(value), doc=doc)


def typed(value: object) -> str:
    """``value`` as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(typed, value)) if isinstance(value, tuple | list) else str(value)


def members(annotation: object) -> list[Any]:
    """The alternatives of a union without None, or the annotation alone; Annotated is looked through."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [m for a in get_args(annotation) if a is not type(None) for m in members(a)]
    return [annotation]


def part_classes(field: FieldInfo) -> list[type[Part]]:
    """The kinds of part that ``field`` may hold; empty for a plain value."""
    return [m for m in members(field.annotation) if isinstance(m, type) and issubclass(m, Part)]


def may_be_none(field: FieldInfo) -> bool:
    """Whether ``none`` is a value of ``field``."""
    return type(None) in get_args(field.annotation)


def is_tuple(field: FieldInfo) -> bool:
    """Whether ``field`` holds several values, typed with commas between them."""
    return any(get_origin(m) is tuple for m in members(field.annotation))


def kind_of(part: type[Part]) -> str:
    """The value of ``kind`` that names ``part`` among the alternatives of its field."""
    return str(part.model_fields["kind"].default) if "kind" in part.model_fields else part.__name__


def part_named(name: str) -> type[Part] | None:
    """The kind of part, a user's own included, whose class is called ``name``."""
    classes = [Part]
    for part in classes:  # grows as it goes
        classes += part.__subclasses__()
    return next((c for c in classes if c.__name__ == name), None)


def describe(field: FieldInfo) -> str:
    """What ``field`` accepts: ``a whole number from 1, or none``."""
    if classes := part_classes(field):
        kinds = f" with kind {' or '.join(map(kind_of, classes))}" if len(classes) > 1 else ""
        return f"a group of fields{kinds}" + (", or none" if may_be_none(field) else "")
    text = _describe(field.annotation, field.metadata)
    return f"{text}, or none" if may_be_none(field) else text


def _describe(annotation: object, metadata: Sequence[object] = ()) -> str:
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _describe(inner, [*metadata, *more])
    if get_origin(annotation) in (Union, types.UnionType):
        options = [a for a in get_args(annotation) if a is not type(None)]
        if all(get_origin(m) is Literal for m in members(annotation)):
            return "one of " + ", ".join(map(typed, literals(annotation)))
        return " or ".join(_describe(a, metadata) for a in options)
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(typed, get_args(annotation)))
    if get_origin(annotation) is tuple:
        args = [a for a in get_args(annotation) if a is not Ellipsis]
        many = f"{len(args)} values" if Ellipsis not in get_args(annotation) else "values"
        return f"{many} joined by commas, each {_describe(args[0])}"
    plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    base = plain[annotation] if isinstance(annotation, type) and annotation in plain else str(annotation)
    return base + _limits(metadata, whole=annotation is int)


def _limits(metadata: Sequence[object], whole: bool) -> str:
    low = high = ""
    for limit in [m for item in metadata for m in (item.metadata if isinstance(item, FieldInfo) else [item])]:
        if isinstance(limit, Ge | Interval) and limit.ge is not None:
            low = f" from {limit.ge}"
        if isinstance(limit, Gt | Interval) and limit.gt is not None:
            low = f" from {int(str(limit.gt)) + 1}" if whole else f" above {limit.gt}"
        if isinstance(limit, Le | Interval) and limit.le is not None:
            high = f" to {limit.le}"
        if isinstance(limit, Lt | Interval) and limit.lt is not None:
            high = f" and below {limit.lt}"
    return low + high


def literals(annotation: object) -> list[Any]:
    """The values that ``annotation`` lists."""
    return [value for m in members(annotation) if get_origin(m) is Literal for value in get_args(m)]


def problems(error: ValidationError, part: type[Part], prefix: str, raw: Mapping[str, str]) -> dict[str, str]:
    """One message per dotted name that pydantic refused in a ``part`` that lies under ``prefix``.

    Args:
        raw: what the user typed, by dotted name; other values are shown as they are.
    """
    found: dict[str, str] = {}
    for detail in error.errors():
        path, field = _locate(part, detail["loc"])
        key = ".".join([prefix, *path]) if prefix else ".".join(path)
        value = raw.get(key, typed(detail["input"]))
        found.setdefault(key, _message(key, value, field, detail))
    return found


def _locate(part: type[Part], loc: Sequence[int | str]) -> tuple[list[str], FieldInfo | None]:
    """Field names along pydantic's ``loc``, which also holds union tags and indices, and the field they end at."""
    path: list[str] = []
    field: FieldInfo | None = None
    classes = [part]
    for step in loc:
        owner = next((c for c in classes if step in c.model_fields), None)
        if owner is not None:
            field = owner.model_fields[str(step)]
            path.append(str(step))
            classes = part_classes(field)
        elif chosen := [c for c in classes if kind_of(c) == step]:
            classes = chosen
        elif classes and isinstance(step, str):  # a name no class has
            return [*path, step], None
    return path, field


def _message(key: str, value: str, field: FieldInfo | None, detail: ErrorDetails) -> str:
    kind, ctx = detail["type"], detail.get("ctx", {})
    if field is None:
        return f"{key}={value} is not a field. Leave it out."
    classes = part_classes(field)
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        kinds = [kind_of(c) for c in classes]
        if kind == "union_tag_not_found":
            return f"{key} has no kind. Set {key}.kind to one of {', '.join(kinds)}."
        tag = str(ctx.get("tag"))
        return f"{key}.kind={tag} is not a known kind.{_did_you_mean(tag, kinds)} Use one of {', '.join(kinds)}."
    if kind == "missing" and isinstance(detail["loc"][-1], str):
        return f"{key} is missing. Set it to {describe(field)}."
    hint = _did_you_mean(value, [typed(v) for v in literals(field.annotation)])
    return f"{key}={value} {_rule(kind, ctx, field)}.{hint} Use {describe(field)}."


def _rule(kind: str, ctx: Mapping[str, Any], field: FieldInfo) -> str:
    words = {"greater_than": ("is not above", "gt"), "greater_than_equal": ("is below", "ge")}
    words |= {"less_than": ("is not below", "lt"), "less_than_equal": ("is above", "le")}
    if kind in words:
        phrase, limit = words[kind]
        bound = int(ctx[limit]) if float(ctx[limit]).is_integer() else ctx[limit]
        return f"{phrase} {bound}"
    plain = {"int": "is not a whole number", "float": "is not a number", "bool": "is neither true nor false"}
    if kind == "finite_number":
        return "is not a finite number"
    if kind in ("missing", "too_long"):
        return "has another number of values"
    if literals(field.annotation):
        return "is not one of the choices"
    return plain.get(kind.split("_")[0], "does not fit")


def _did_you_mean(value: str, choices: Sequence[str]) -> str:
    close = nearest(value, choices)
    return f" Did you mean {close}?" if close else ""
