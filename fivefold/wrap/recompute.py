"""Activations that are not kept but computed again in backward.

What a part leaves aside while it runs (an expert route, counts, statistics) goes through ``Run.once``: the recompute
reads it back, so that it routes the same way, counts nothing twice and needs no exchange of counts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, Self

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..mesh.run import Run

Policy = Callable[..., CheckpointPolicy]
"""Decides operator by operator what is kept: a selective checkpoint policy of torch."""


def chosen(mode: str, index: int) -> bool:
    """Whether the block ``index`` recomputes under ``train.recompute=mode``: none, full, every-N or ops."""
    if mode.startswith("every-"):
        return (index + 1) % int(mode.removeprefix("every-")) == 0
    return mode != "none"


class SaveList:
    """Which results ``train.recompute=ops`` keeps: everything else is computed again.

    Kept: attention, whose repetition is quadratic in the sequence; what came from other ranks, whose repetition is
    traffic; expert matmuls, whose inputs would have to be dispatched again; and every second other matmul. Never kept:
    copies and casts, cheap beside the memory they hold. One list serves one block's forward and its recompute.
    """

    KEEP = ("scaled_dot_product", "fivefold::", "grouped_mm", "flash_attention")
    REPEAT = ("fivefold::replicate", "_to_copy", "clone", "copy_")
    MATMUL = ("aten::mm", "aten::addmm", "aten::bmm")

    def __init__(self) -> None:
        self._matmuls = {False: 0, True: 0}

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op.name() if hasattr(op, "name") else str(op)
        keep = any(k in name for k in self.KEEP) and not any(r in name for r in self.REPEAT)
        if (
            name in self.MATMUL
        ):  # not those that write into a given tensor; counted apart in forward and recompute, so both decide the same
            self._matmuls[ctx.is_recompute] += 1
            keep = self._matmuls[ctx.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class _All(ExitStack):
    """Enters several contexts as one, when it is entered."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._contexts = contexts

    def __enter__(self) -> Self:
        super().__enter__()
        for context in self._contexts:
            self.enter_context(context)
        return self


def recompute(fn: Callable[..., Any], run: Run, *args: Any, policy: Callable[[], Policy] | None = None) -> Any:
    """``fn(*args)``, keeping only its arguments, or also what a ``policy`` made for this call keeps."""
    scope = replace(run.recorder.scope, phase="recompute")

    def contexts() -> tuple[_All, _All]:
        store: list[Any] = []
        forward, again = create_selective_checkpoint_contexts(policy()) if policy else (nullcontext(), nullcontext())
        return (_All(run.freeze(store, replay=False), forward),
                _All(run.recorder.under(scope), run.freeze(store, replay=True), again))  # fmt: skip

    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
