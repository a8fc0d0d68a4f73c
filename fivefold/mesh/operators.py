"""Registers torch operators: what ``torch.compile`` traces through without looking inside.

``torch.library.Library`` and not ``custom_op``: the same operators, called in 8 us instead of 12, and the first call
does not import ``torch._dynamo``, which takes every rank 1.5 s.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch

from ..observe.recorder import Scope
from .axis import Axis

_LIBRARY = torch.library.Library("fivefold", "FRAGMENT")
"""Owner of the operators ``torch.ops.fivefold.*``; they live as long as it does."""

F = TypeVar("F", bound=Callable[..., Any])


def operator(name: str, shape: Callable[..., Any]) -> Callable[[F], F]:
    """Register the decorated function as ``fivefold::name``, with its shape rule."""

    def decorate(fn: F) -> F:
        # a wrapper, as of a shape check, does not know the names in the annotations
        _LIBRARY.define(name + torch.library.infer_schema(inspect.unwrap(fn), mutates_args=()))
        _LIBRARY.impl(name, fn, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fivefold::{name}", shape, lib=_LIBRARY)
        return getattr(torch.ops.fivefold, name).default

    return decorate


def differentiate(name: str, keep: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Give the operator ``name`` its gradient.

    Args:
        keep: ``keep(ctx, inputs, output)`` keeps in ``ctx`` what ``backward`` needs.
        backward: ``backward(ctx, *gradients)`` returns a gradient for each input, None where there is none.
    """
    torch.library.register_autograd(f"fivefold::{name}", backward, setup_context=keep, lib=_LIBRARY)


# ---- the scope as text: an operator can carry only tensors, numbers and text -----------------------------------------


def scope_text(axis: Axis) -> str:
    """The scope of the call as text; empty when nobody records, and in a trace: there the scope at run time counts."""
    if torch.compiler.is_compiling() or not axis.recorder.on:
        return ""
    s = axis.recorder.scope
    return f"{s.module}|{s.phase}|{s.stage}|{s.microbatch}"


@lru_cache(maxsize=1024)
def parse_scope(scope: str) -> Scope | None:
    """The scope that ``scope_text`` wrote; None for the empty text."""
    if not scope:
        return None
    module, phase, stage, microbatch = scope.split("|")
    return Scope(module, phase, int(stage), int(microbatch))


def backward_scope(scope: str) -> str:
    """The scope text of the gradient."""
    module, _, rest = scope.partition("|")
    return f"{module}|backward|{rest.partition('|')[2]}" if scope else ""
