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
before it; ``backward_uses_parameters = False`` spares a gather; ``uses_parameters_of`` names earlier parts whose
parameters it uses too; ``recomputes = False`` takes it out of recompute.

Optimizer state is always sharded.

Source: Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023, arXiv 2304.11277.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..mesh.axis import Axis
from ..mesh.parameter import spec_of
from ..mesh.run import Run
from .buffer import Buffer, Entry, Precision, Shard
from .streams import Streams

Call = Callable[[Tensor | None, Any], Tensor]
"""A part as it is run: ``(x, microbatch) -> x``, or the loss."""
Watch = Callable[[str, Tensor], None]
"""Sees a part's name and output."""
Key = tuple[Axis, bool, bool, torch.dtype | None]
"""What parameters in one buffer have in common: storage axis, tied, trainable, own compute dtype."""


class _Announce(torch.autograd.Function):
    """``x`` unchanged; its backward calls ``fn`` before it passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Callable[[], None]) -> Tensor:
        ctx.fn = fn
        return x.view_as(x)

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


def group_entries(name: str, part: nn.Module, run: Run) -> dict[Key, list[Entry]]:
    """The parameters of a part, by what decides their buffer."""
    groups: dict[Key, list[Entry]] = {}
    seen: set[int] = set()
    for prefix, module in part.named_modules():
        for attribute, p in module._parameters.items():
            if p is None or id(p) in seen:
                continue
            seen.add(id(p))
            spec = spec_of(p)
            full_name = ".".join(w for w in (name, prefix, attribute) if w)
            key = (spec.storage_axis(run.mesh), spec.tied, p.requires_grad, spec.dtype)
            groups.setdefault(key, []).append(Entry(module, attribute, full_name, p))
    return groups


class Unit:
    """Parameters that are gathered and freed together, and the part that uses them."""

    def __init__(self, name: str, call: Call | None, buffers: list[Buffer], *, keep: bool = False,
                 backward_uses_parameters: bool = True) -> None:  # fmt: skip
        self.name, self.call, self.buffers, self.keep = name, call, buffers, keep
        self.backward_uses_parameters = backward_uses_parameters
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
    """

    def __init__(self, parts: Mapping[str, nn.Module], run: Run, *, zero: int = 3, precision: Precision | None = None,
                 seed: int = 0, small: int = 0, calls: Mapping[str, Call] | None = None,
                 watch: Watch | None = None) -> None:  # fmt: skip
        self._watch = watch
        self.run, self.zero, self.parts = run, zero, dict(parts)
        self._streams = Streams(run.mesh.device)
        self._precision, self._seed = precision or Precision(), seed
        shared: dict[Key, list[Entry]] = {}
        self.units: list[Unit] = []
        for name, part in parts.items():
            groups = group_entries(name, part, run)
            for key in [k for k, e in groups.items() if not k[1] and sum(x.parameter.numel() for x in e) < small]:
                shared.setdefault(key, []).extend(groups.pop(key))
            call = (calls or {}).get(name, part)
            needs = getattr(part, "backward_uses_parameters", True)
            self.units.append(Unit(name, call, self._buffers(name, groups), backward_uses_parameters=needs))
        self._shared = Unit("small", None, self._buffers("small", shared), keep=True)
        self._keep_what_is_used_twice()
        self.last_backward = False
        """Set by the executor around the backward that completes this stage's gradients in a step."""

    def _buffers(self, unit: str, groups: Mapping[Key, list[Entry]]) -> list[Buffer]:
        mesh = self.run.mesh
        return [
            Buffer(entries, key[0], mesh.ddp, self._precision, self._seed, mesh.device, self._streams, unit)
            for key, entries in groups.items()
        ]

    def _keep_what_is_used_twice(self) -> None:
        """A part that uses another's parameter (a head tied to the embedding of the same stage) keeps it gathered."""
        by_name = {u.name: u for u in self.units}
        for unit in self.units:
            for name in getattr(self.parts[unit.name], "uses_parameters_of", ()):
                by_name[name].keep = True

    # ---- one microbatch ---------------------------------------------------------------------------------------------

    def forward(self, x: Tensor | None, microbatch: Any) -> Tensor:
        """Run the parts in order: the activation of the next stage, or the loss, or logits.

        The last unit stays gathered where a backward can follow at once.
        """
        self._shared.unshard()
        last = len(self.units) - 1
        for i, unit in enumerate(self.units):
            if x is not None:
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
            if self.zero == 3 and not unit.keep and not (i == last and torch.is_grad_enabled()):
                unit.reshard()
            x = announce(x, lambda i=i: self._before_backward(i))
        assert x is not None
        return x

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
        if unit.keep:
            return
        if self.zero == 3:
            unit.reshard()
        if self.zero > 1 or self.last_backward:
            unit.reduce(last=self.last_backward)

    def end_backward(self) -> None:
        """After a microbatch's backward: finish the units whose end no gradient passed, such as the first one's."""
        for i in reversed(range(len(self.units))):
            if self.units[i].due:
                self._after_backward(i)

    # ---- a step -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget the last step's gradients."""
        for b in self.buffers:
            b.zero_grad()

    def finish(self) -> None:
        """End a step: every gradient is summed over its data axes, and nothing stays gathered.

        Raises:
            AssertionError: if a gradient was never reduced.
        """
        for unit in (*self.units, self._shared):
            if unit.keep:
                unit.reduce(last=True)
        for b in self.buffers:
            b.finish()
        self._streams.join_reduce()

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
