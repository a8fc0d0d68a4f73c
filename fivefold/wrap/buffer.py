"""One flat buffer: parameters of a unit whose data axes are the same ranks, stored as one shard a rank.

The buffer has three tensors. ``shard`` holds this rank's rows in the master dtype; ``full`` holds all of them in the
compute dtype while they are gathered, and the parameters are views of it; ``grad`` holds the summed gradient of the
shard. Gathering is one all-gather into ``full``, with no copy out; reducing is one reduce-scatter of a flat gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ..mesh import transport
from ..mesh.axis import Axis
from ..mesh.init import initial_values
from ..mesh.parameter import ParamSpec, attach
from ..mesh.pieces import Piece, clipped
from .arrange import arrange
from .entries import Entry
from .streams import Streams


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of the three uses of a number."""

    master: torch.dtype = torch.float32
    """Stored parameters, summed gradients and optimizer state."""
    compute: torch.dtype = torch.float32
    """Gathered parameters and activations."""
    reduce: torch.dtype = torch.float32
    """Gradients while they are summed over ranks."""


@dataclass(frozen=True)
class Shard:
    """What the optimizer sees of one parameter: rows this rank stores, as a parameter with a gradient."""

    piece: Piece
    value: nn.Parameter
    """A view of the stored rows; its ``grad`` is a view of their summed gradient."""
    spec: ParamSpec
    at: slice
    """Where the rows lie in the buffer's shard."""
    original: bool = True
    """Whether they count: of a parameter that two stages share, one copy does."""


class Buffer:
    """See the module. ``axis`` is what storage is cut over, ``ddp`` what replicates it.

    Args:
        entries: parameters, all trainable or none.
        axis: the storage axis.
        ddp: the axis of replicas.
        precision: dtypes.
        seed: of the initial values.
        device: where the buffer lives.
        streams: where its collectives run.
        unit: whose parameters these are, for the record.
        tie: the other rank that holds the same parameters, on another stage.
    """

    def __init__(self, entries: list[Entry], axis: Axis, ddp: Axis, precision: Precision, seed: int,
                 device: torch.device, streams: Streams, unit: str, tie: Axis) -> None:  # fmt: skip
        self._unit, self.tie = unit, tie
        self.axis, self.ddp, self.precision, self.streams = axis, ddp, precision, streams
        self.trainable = entries[0].parameter.requires_grad
        self.compute = entries[0].spec.dtype or precision.compute
        self.arrangement = arrange(sizes_of(entries), axis.size)
        n, self.per_rank = axis.size, self.arrangement.shard
        self.stored_as_used = n == 1 and self.compute == precision.master
        self.in_place = self.stored_as_used and ddp.size == tie.size == 1
        """Whether gradients need no flat copy: nothing is summed over ranks, so they stay where autograd puts them."""
        self.shard = torch.zeros(self.per_rank, dtype=precision.master, device=device)
        self.grad = None if self.in_place or not self.trainable else torch.zeros_like(self.shard)
        self.full = (
            self.shard if self.stored_as_used else torch.empty(n * self.per_rank, dtype=self.compute, device=device)
        )
        self._storage = self.full.untyped_storage()
        self._bytes = self._storage.nbytes()
        self.entries = entries
        self.params = [self._view(i) for i in range(len(entries))]
        self._spans = [slice(o, o + p.numel()) for o, p in zip(self.arrangement.offsets, self.params, strict=True)]
        self._gaps = _between(self._spans, n * self.per_rank)
        self.shards: list[Shard] = []
        self._stored: list[nn.Parameter] = []
        self._cut(seed)
        self.entries = [replace(e, parameter=p) for e, p in zip(entries, self.params, strict=True)]
        # not as they were declared: a plain module's come with values, which would live on
        self._gather: transport.Handle | None = None
        self._flat: Tensor | None = None
        self._written: set[int] = set()
        self._fresh, self._last = True, False
        self._pending: transport.Handle | None = None
        self._replicating: transport.Handle | None = None
        self.gathered = self.stored_as_used
        self._free()

    # ---- building ---------------------------------------------------------------------------------------------------

    def _view(self, index: int) -> nn.Parameter:
        """The module's parameter, as a view of ``full`` with a version counter of its own."""
        entry, offset = self.entries[index], self.arrangement.offsets[index]
        old = entry.parameter
        data = torch.empty(0, dtype=self.compute, device=self.full.device)
        data.set_(self._storage, offset, old.shape)  # type: ignore[call-overload]
        p = attach(nn.Parameter(data, requires_grad=old.requires_grad), entry.spec)
        for module, attribute in entry.uses:
            setattr(module, attribute, p)
        if self.grad is not None:
            p.register_post_accumulate_grad_hook(partial(self._take, index=index))
        return p

    def _cut(self, seed: int) -> None:
        """Find the rows this rank stores of each parameter, and give them their first values."""
        low = self.axis.rank * self.per_rank
        for entry, offset, p in zip(self.entries, self.arrangement.offsets, self.params, strict=True):
            spec, shape = entry.spec, tuple(entry.parameter.shape)
            block = clipped(spec, shape)
            start = max(low, offset) - offset
            stop = min(low + self.per_rank, offset + math.prod(block)) - offset
            if start >= stop:
                continue
            at = slice(start + offset - low, stop + offset - low)
            piece = Piece(entry.name, spec.global_shape, spec.offset, block, start, stop, self.shard[at])
            self._fill(piece, entry, seed)
            self.shards.append(Shard(piece, nn.Parameter(piece.data, requires_grad=self.trainable), spec, at,
                                     entry.original))  # fmt: skip
            self._stored.append(p)

    def _fill(self, piece: Piece, entry: Entry, seed: int) -> None:
        """Initial values: the spec's, or those a plain module came with."""
        if entry.parameter.is_meta:
            piece.data.copy_(initial_values(entry.spec.init, seed, entry.name, piece.place()))
        else:
            piece.data.copy_(entry.parameter.detach().reshape(-1)[piece.start : piece.stop])

    # ---- parameters -------------------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Start gathering; nothing if it is under way or done."""
        if self.gathered or self._gather is not None:
            return
        self._storage.resize_(self._bytes)
        if self.axis.size == 1:  # only the dtype differs
            self._gather = transport.Handle((), lambda: self.full.copy_(self.shard))
            return
        mine = self.full[self.axis.rank * self.per_rank :][: self.per_rank]
        with self.streams.gather(), self.axis.recorder.at(module=self._unit, phase="gather"):
            self._gather = transport.all_gather(mine.copy_(self.shard), self.axis, self.full)

    def unshard(self) -> None:
        """Make the whole parameters usable by what the current stream runs next."""
        if not self.gathered:
            self.prefetch()
            assert self._gather is not None
            with torch.no_grad():
                self._gather.wait()
            self._gather, self.gathered = None, True

    def reshard(self) -> None:
        """Drop the whole parameters; the shard stays."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
        self._free()

    def _free(self) -> None:
        if not self.stored_as_used:
            self._storage.resize_(0)
            self.gathered = False

    # ---- gradients --------------------------------------------------------------------------------------------------

    def _take(self, p: nn.Parameter, index: int) -> None:
        if p.grad is not None:  # torch calls the hook even where the gradient was deferred and there is none yet
            self.add(index, p.grad)
            p.grad = None

    def add(self, index: int, gradient: Tensor) -> None:
        """Add one microbatch's gradient of parameter ``index`` to the flat gradient, which is in the master dtype."""
        if self._flat is None:  # with nothing to scatter, the flat gradient is the shard's own
            self._flat = self.grad if self.axis.size == 1 else self._empty_flat()
        assert self._flat is not None
        to = self._flat[self._spans[index]].view(gradient.shape)
        if index in self._written:
            to.add_(gradient)
        else:
            to.copy_(gradient)
            self._written.add(index)

    def deposit(self, index: int, gradient: Tensor) -> None:
        """Take a gradient of parameter ``index`` that did not come through autograd, as if it had."""
        p = self.params[index]
        if not self.in_place:
            self.add(index, gradient)
        elif p.grad is None:
            p.grad = gradient
        else:
            p.grad.add_(gradient)

    def _empty_flat(self) -> Tensor:
        return torch.empty(self.axis.size * self.per_rank, dtype=self.precision.master, device=self.full.device)

    def _complete(self) -> Tensor:
        """The flat gradient, zero wherever none came: padding, and parameters that no microbatch used."""
        flat = self._flat if self._flat is not None else self.grad if self.axis.size == 1 else self._empty_flat()
        assert flat is not None
        unused = [self._spans[i] for i in range(len(self.params)) if i not in self._written]
        for at in (*self._gaps, *unused):
            flat[at].zero_()
        self._flat = None
        return flat

    def reduce(self, *, last: bool) -> None:
        """Start summing the flat gradient over the storage axis, and after a step's ``last`` backward over replicas."""
        if self.grad is None or (self.axis.size == 1 and not last):
            return
        self.settle()
        self._last = last
        flat = self._complete()
        self._written = set()
        if self.axis.size == 1:
            self._replicate()
            return
        with self.streams.reduce(flat), self.axis.recorder.at(module=self._unit, phase="reduce"):
            into = self.grad if self._fresh and self.precision.master == self.precision.reduce else None
            self._pending = transport.reduce_scatter(flat.to(self.precision.reduce), self.axis, into)

    def settle(self) -> None:
        """Take in a reduction that is under way, and start the replicas' sum if it was the step's last."""
        if self._pending is None:
            return
        assert self.grad is not None
        with self.streams.reduce():
            summed = self._pending.wait()
            if not self._fresh:
                self.grad.add_(summed)
            elif summed is not self.grad:
                self.grad.copy_(summed)
        self._pending, self._fresh = None, False
        if self._last:
            self._replicate()

    def _replicate(self) -> None:
        if self.ddp.size > 1 and self.grad is not None:
            with self.streams.reduce(), self.axis.recorder.at(module=self._unit, phase="reduce"):
                self._replicating = transport.all_reduce(self.grad.to(self.precision.reduce), self.ddp)

    def finish(self) -> None:
        """The end of a step: every gradient is summed and in the optimizer's view, nothing stays gathered.

        Raises:
            AssertionError: if a gradient was never reduced.
        """
        if self.trainable:
            assert self._flat is None, f"the gradient of {[e.name for e in self.entries]} was never reduced"
            if not self._last:  # no microbatch used these parameters: their gradient is zero
                self.reduce(last=True)
            self.settle()
            if self._replicating is not None and self.grad is not None:
                with self.streams.reduce():
                    total = self._replicating.wait()
                    if total is not self.grad:
                        self.grad.copy_(total)
                self._replicating = None
            self._sum_ties()
            self._publish()
        self.reshard()

    def _sum_ties(self) -> None:
        """Add the gradient that the other stage of a shared parameter has found."""
        if self.tie.size > 1 and self.grad is not None:
            with self.streams.reduce(), self.axis.recorder.at(module=self._unit, phase="reduce"):
                total = transport.all_reduce(self.grad.to(self.precision.reduce), self.tie).wait()
                if total is not self.grad:
                    self.grad.copy_(total)

    def _publish(self) -> None:
        for s, p in zip(self.shards, self._stored, strict=True):
            if self.grad is not None:
                s.value.grad = self.grad[s.at]
            else:
                flat = torch.zeros_like(p) if p.grad is None else p.grad
                s.value.grad = flat.reshape(-1)[s.piece.start : s.piece.stop]

    def zero_grad(self) -> None:
        """Forget the last step's gradient."""
        self._written, self._fresh, self._last = set(), True, False
        for p in self.params:
            p.grad = None
        for s in self.shards:
            s.value.grad = None


def sizes_of(entries: list[Entry]) -> list[tuple[int, int]]:
    """Elements of each parameter, and of its rows: what a cut must not split."""
    shapes = [e.parameter.shape for e in entries]
    return [(shape.numel(), shape[-1] if len(shape) > 1 else 1) for shape in shapes]


def _between(spans: list[slice], end: int) -> list[slice]:
    """What of ``[0, end)`` no span covers."""
    ordered = sorted(spans, key=lambda span: span.start)
    starts, stops = [0, *(s.stop for s in ordered)], [*(s.start for s in ordered), end]
    return [slice(a, b) for a, b in zip(starts, stops, strict=True) if a < b]
