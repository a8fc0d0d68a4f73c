"""The data engine: DDP, FSDP and HSDP, ZeRO 1, 2 and 3, around the parts of one pipeline stage.

A unit is one part of the model: what is gathered and freed together. There are no module hooks and no counting of
autograd hooks. ``Stage.forward`` gathers; an identity node at each unit's two ends tells when its backward begins and
ends; ``end_backward``, called by the executor, reduces what autograd could not announce.

=====  ==============================  =============================
ZeRO   parameters are gathered         gradients are reduced
=====  ==============================  =============================
1      once a step                     once a step
2      once a step                     after every microbatch
3      for each forward and backward   after every microbatch
=====  ==============================  =============================

A part is any module called as ``part(x, microbatch)``. It may say more of itself: ``prepare(microbatch)`` is called
before it; ``backward_uses_parameters = False`` spares a gather; ``recomputes = False`` takes it out of recompute.

Where a schedule splits backward, the input gradient (I) reduces nothing: a unit is reduced when the last of its weight
gradients (W) is done.

Optimizer state is always sharded.

Source: Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, arXiv 2304.11277.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ..mesh.axis import Axis
from ..mesh.run import Run
from ..ops.linear import WeightGradQueue
from .buffer import Buffer, Precision, Shard
from .entries import Entries, Entry, Key, collect
from .streams import Streams

Call = Callable[[Tensor | None, Any], Tensor]
"""A part as it is run: ``(x, microbatch) -> x``, or the loss."""
Watch = Callable[[str, Tensor], None]
"""Sees a part's name and output."""


class _Announce(torch.autograd.Function):
    """``x`` unchanged; its backward calls ``fn`` before it passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Callable[[], None]) -> Tensor:
        ctx.fn = fn
        return x.detach()  # unlike a view of x it may be changed in place, as far as autograd is concerned

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.fn()
        return gradients[0], None


def announce(x: Tensor, fn: Callable[[], None]) -> Tensor:
    """``x`` itself; ``fn`` runs when backward comes by."""
    return _Announce.apply(x, fn) if x.requires_grad else x  # type: ignore[return-value]


def _tensor(x: object, part: str) -> Tensor:
    """What ``part`` returned, which must be a tensor.

    Raises:
        TypeError: if it is not.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"part {part!r} returned a {type(x).__name__}. Return a tensor: the next part's x, or the loss")
    return x


class Unit:
    """Parameters that are gathered and freed together, and the part that uses them."""

    def __init__(self, name: str, call: Call | None, buffers: list[Buffer], *, keep: bool = False,
                 backward_uses_parameters: bool = True) -> None:  # fmt: skip
        self.name, self.call, self.buffers, self.keep = name, call, buffers, keep
        self.backward_uses_parameters = backward_uses_parameters
        self.local = all(b.in_place for b in buffers)
        """Whether it has nothing to gather or to sum: then nobody needs to know when its backward begins or ends."""
        self.due = False
        """Whether a backward began here whose end was not announced yet."""

    def prefetch(self) -> None:
        for b in self.buffers:
            b.prefetch()

    def unshard(self) -> None:
        for b in self.buffers:
            b.prefetch()
        for b in self.buffers:
            b.unshard()

    def reshard(self) -> None:
        for b in self.buffers:
            b.reshard()

    def reduce(self, *, last: bool) -> None:
        for b in self.buffers:
            b.reduce(last=last)


class Stage:
    """The parts of one pipeline stage, run through the engine. ``forward`` is the only caller of the parts.

    Args:
        parts: the stage's modules by name, in order. Their parameters are replaced by views of the engine's buffers.
        run: the rank's mesh and stores.
        zero: 1, 2 or 3.
        precision: dtypes.
        seed: of the initial values.
        small: parameter sets of fewer elements share one buffer, gathered and reduced once a step.
        calls: how each part is run, where it is not just called (recompute, compile).
        watch: is shown every part's output, by name, as it leaves the part.
        entries: the parameters of all parts of this rank; None where this is its only stage.
        earlier: this rank's stages before this one, whose parameters its parts may use too.
    """

    def __init__(self, parts: Mapping[str, nn.Module], run: Run, *, zero: int = 3, precision: Precision | None = None,
                 seed: int = 0, small: int = 0, calls: Mapping[str, Call] | None = None, watch: Watch | None = None,
                 entries: Entries | None = None, earlier: Sequence[Stage] = ()) -> None:  # fmt: skip
        self._watch = watch
        entries = entries or collect(parts, run)
        self.run, self.zero, self.parts = run, zero, dict(parts)
        self._streams = Streams(run.mesh.device)
        self._precision, self._seed = precision or Precision(), seed
        shared: dict[Key, list[Entry]] = {}
        self.units: list[Unit] = []
        for name, part in self.parts.items():
            groups = dict(entries.groups[name])
            for key in [k for k, e in groups.items() if not k[1] and sum(x.parameter.numel() for x in e) < small]:
                shared.setdefault(key, []).extend(groups.pop(key))
            call = (calls or {}).get(name, part)
            needs = getattr(part, "backward_uses_parameters", True)
            self.units.append(Unit(name, call, self._buffers(name, groups), backward_uses_parameters=needs))
        self._shared = Unit("small", None, self._buffers("small", shared), keep=True)
        self._borrowed = self._keep_what_is_used_twice(entries, earlier)
        self._places = self._place_parameters(earlier)
        self._last = self._waits = False

    def _buffers(self, unit: str, groups: Mapping[Key, list[Entry]]) -> list[Buffer]:
        mesh = self.run.mesh
        return [
            Buffer(entries, key[0], mesh.ddp, self._precision, self._seed, mesh.device, self._streams, unit,
                   mesh.tie if key[1] else Axis("none"))
            for key, entries in groups.items()
        ]  # fmt: skip

    def _keep_what_is_used_twice(self, entries: Entries, earlier: Sequence[Stage]) -> list[Unit]:
        """The units whose parameters this stage's parts use beside their own owner: they stay gathered all step."""
        by_name = {u.name: u for stage in (*earlier, self) for u in stage.units}
        borrowed = [by_name[owner] for name in self.parts for owner in entries.borrowed.get(name, ())]
        for unit in borrowed:
            unit.keep = True
        return borrowed

    def _place_parameters(self, earlier: Sequence[Stage]) -> dict[int, tuple[Unit, Buffer, int]]:
        """Where each parameter that this stage's parts may use is stored, by identity."""
        return {
            id(p): (unit, buffer, i)
            for stage in (*earlier, self)
            for unit in (*stage.units, stage._shared)
            for buffer in unit.buffers
            for i, p in enumerate(buffer.params)
        }

    # ---- one microbatch ---------------------------------------------------------------------------------------------

    def prefetch(self, *, backward: bool) -> None:
        """Start gathering what the next forward, or backward, of this stage needs first."""
        unit = self.units[-1 if backward else 0]
        if unit.backward_uses_parameters or not backward:
            unit.prefetch()

    def forward(self, x: Tensor | None, microbatch: Any, *, backward_follows: bool = True) -> Tensor:
        """Run the parts in order: the activation of the next stage, or the loss, or logits.

        Args:
            backward_follows: whether this rank does a backward of this stage next: the last unit stays gathered.
        """
        for unit in (self._shared, *self._borrowed):
            unit.unshard()
        last = len(self.units) - 1
        for i, unit in enumerate(self.units):
            if x is not None and not unit.local:
                x = announce(x, lambda i=i: self._after_backward(i))
            unit.unshard()
            if i < last:
                self.units[i + 1].prefetch()
            assert unit.call is not None
            if (prepare := getattr(self.parts[unit.name], "prepare", None)) is not None:
                prepare(microbatch)
            with self.run.recorder.at(module=unit.name, phase="forward"):
                x = _tensor(unit.call(x, microbatch), unit.name)
            if self._watch is not None:
                self._watch(unit.name, x)
            if self.zero == 3 and not unit.keep and not (i == last and backward_follows and torch.is_grad_enabled()):
                unit.reshard()
            if not (unit.local and (i == 0 or self.units[i - 1].local)):
                x = announce(x, lambda i=i: self._before_backward(i))
        assert x is not None
        return x

    def backward(self, y: GradientEdge | None, gradient: Tensor, *, last: bool = False, waits: bool = False) -> None:
        """Backward of one microbatch from its output ``y``, and the reductions that it completes.

        Args:
            y: None where nothing before it needs a gradient.
            last: whether it completes this stage's gradients in a step.
            waits: whether its weight gradients are left for :meth:`weight_gradients`.
        """
        self._last, self._waits = last, waits
        if y is not None:
            torch.autograd.backward(y, gradient)
        for i in reversed(range(len(self.units))):  # units whose end no gradient passed, such as the first one's
            if self.units[i].due:
                self._after_backward(i)
        self._last = self._waits = False

    def _before_backward(self, i: int) -> None:
        unit = self.units[i]
        unit.due = True
        if unit.backward_uses_parameters:
            unit.unshard()
        if i and self.units[i - 1].backward_uses_parameters:
            self.units[i - 1].prefetch()

    def _after_backward(self, i: int) -> None:
        unit = self.units[i]
        unit.due = False
        if self.zero == 3 and not unit.keep:
            unit.reshard()
        if not self._waits:
            self._reduce(unit, self._last)

    def _reduce(self, unit: Unit, last: bool) -> None:
        if not unit.keep and (self.zero > 1 or last):
            unit.reduce(last=last)

    def weight_gradients(self, waiting: WeightGradQueue, *, last: bool = False) -> None:
        """The weight gradients that a backward left ``waiting``; a unit is reduced once its last one is done.

        Args:
            last: whether they complete this stage's gradients in a step.
        """
        left = Counter(id(self._places[id(p)][0]) for p in waiting.parameters())
        for unit in self.units:
            if not left[id(unit)]:
                self._reduce(unit, last)
        for p, gradient in waiting.run():
            unit, buffer, index = self._places[id(p)]
            buffer.deposit(index, gradient)
            left[id(unit)] -= 1
            if not left[id(unit)] and unit in self.units:
                self._reduce(unit, last)

    # ---- a step -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget the last step's gradients."""
        for b in self.buffers:
            b.zero_grad()

    def finish(self) -> None:
        """End a step of all but what is :attr:`tied`: gradients are summed over data axes, nothing stays gathered.

        Raises:
            AssertionError: if a gradient was never reduced.
        """
        for unit in (*self.units, self._shared):
            if unit.keep:
                unit.reduce(last=True)
        for b in self.buffers:
            if b.tie.size == 1:
                b.finish()
        self._streams.join_reduce()

    def finish_tied(self, name: str) -> None:
        """End a step for a parameter that another rank has too, after :meth:`finish` on all stages."""
        for b in self.buffers:
            if b.tie.size > 1 and b.entries[0].name == name:
                b.finish()
        self._streams.join_reduce()

    @property
    def tied(self) -> list[str]:
        """Names of the parameters that another rank has too."""
        return [b.entries[0].name for b in self.buffers if b.tie.size > 1]

    def release(self) -> None:
        """Drop gathered parameters after forwards that no backward follows."""
        for b in self.buffers:
            b.reshard()

    @property
    def buffers(self) -> list[Buffer]:
        """All buffers, in the order their units run."""
        return [b for u in (*self.units, self._shared) for b in u.buffers]

    @property
    def shards(self) -> list[Shard]:
        """What the optimizer sees: rows of every parameter this rank stores."""
        return [s for b in self.buffers for s in b.shards]

    def modules(self) -> Iterable[nn.Module]:
        """Every module of every part, in order."""
        for part in self.parts.values():
            yield from part.modules()
