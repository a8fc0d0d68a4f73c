"""What belongs to the rank and not to the batch, given to layers when they are built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..observe.progress import Progress
from ..observe.recorder import Recorder
from .mesh import Mesh

T = TypeVar("T")


@dataclass
class Run:
    """The rank's mesh, and what executor and recompute set around a part's forward."""

    mesh: Mesh
    queue: Any = None
    """An ``ops.linear.WeightGradQueue`` while the schedule splits backward; None computes weight gradients at once."""
    context: str = "ring"
    """How attention reaches keys on other ranks of ``cp``: a name or place of ``layers.context``."""
    progress: Progress = field(default_factory=Progress)
    """Where executor and training say what this rank is at."""
    _frozen: list[Any] | None = field(default=None, repr=False)
    _replay: int = -1

    @property
    def recorder(self) -> Recorder:
        return self.mesh.recorder

    @contextmanager
    def deferring(self, queue: Any) -> Iterator[None]:
        """Run the block with weight gradients waiting in ``queue``."""
        before, self.queue = self.queue, queue
        try:
            yield
        finally:
            self.queue = before

    def once(self, fn: Callable[[], T]) -> T:
        """``fn()`` in a forward; in its recompute the same value again, without running ``fn``.

        For what must not change or count twice: an expert route, its counts, statistics, what leaves a part aside.
        """
        if self._frozen is None:
            return fn()
        if torch.compiler.is_compiling():  # outside the graph, which then is the same in forward and recompute
            torch._dynamo.graph_break()
        if self._replay < 0:
            self._frozen.append(fn())
            return self._frozen[-1]
        self._replay += 1
        return self._frozen[self._replay - 1]

    @contextmanager
    def freeze(self, store: list[Any], *, replay: bool) -> Iterator[None]:
        """Run the block with ``once`` filling ``store``, or with ``replay`` reading it back in order."""
        before = self._frozen, self._replay
        self._frozen, self._replay = store, 0 if replay else -1
        try:
            yield
        finally:
            self._frozen, self._replay = before
