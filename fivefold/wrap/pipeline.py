"""The executor: runs this rank's actions of a schedule's table, in order, with the messages they imply.

Gradient accumulation on one rank is the table of one stage, run by the same code as any pipeline.

Messages are posted in the one global order that :mod:`fivefold.schedule.messages` derives and proves free of deadlock
on channels that keep order and buffer nothing. A receive is posted some actions before it is needed, so that it travels
meanwhile, and waited for by the action that uses it. A send is posted right after the action that produced it; to give
its memory back, the executor waits for a send only when two later ones follow it to the same rank, and that wait is
safe for the same reason: what is waited for comes earlier in the global order than anything this rank has not posted.

Activations and gradients travel on channels of their own, so that neither queues behind the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..mesh import p2p
from ..mesh.axis import Axis
from ..mesh.run import Run
from ..mesh.transport import Handle
from ..ops.linear import WeightGradQueue
from ..schedule.messages import Message, Receive, Send, lower
from ..schedule.table import Action, Table, last_backwards, needs, owners, split_backwards
from .data import Stage, announce

OPEN_SENDS = 2
"""Sends of one kind to one rank that may be under way at once."""
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
MAX_DIMS = 8
"""Of an activation that travels."""


Form = tuple[torch.Size, torch.dtype]
"""What an activation is like."""


class MessageError(RuntimeError):
    """A message that did not come, or was not taken: the other rank is gone or stuck."""


@dataclass
class _Step:
    """What one pass over the table holds between its actions."""

    microbatches: Sequence[Any]
    loss: Tensor
    """Of one dtype on every rank, whatever the last stage computes in: it is summed over them."""
    take: Callable[[int, Tensor], None] | None = None
    """Gets the last stage's outputs in place of ``loss``, where they are wanted."""
    results: dict[Action, Tensor] = field(default_factory=dict)
    """What an action produced, until its consumer on this rank or its message takes it."""
    arriving: dict[Action, tuple[Handle, Message]] = field(default_factory=dict)
    """Receives under way, by producer."""
    sends: dict[tuple[int, bool], deque[tuple[Handle, Message]]] = field(default_factory=dict)
    """Sends under way, by target and whether they are gradients."""
    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    outputs: dict[tuple[int, int], GradientEdge | None] = field(default_factory=dict)
    """Where backward begins, without holding the output itself; None where no gradient is needed."""
    forms: dict[tuple[int, int], Form] = field(default_factory=dict)
    """What each output was like, and so what its gradient is like."""
    waiting: dict[tuple[int, int], WeightGradQueue] = field(default_factory=dict)
    """Weight gradients between I and W."""


class _Program:
    """What a rank needs to know of a table: its own column, with the messages, and what follows from the rest."""

    def __init__(self, table: Table, rank: int) -> None:
        order = table[rank]
        self.items = lower(table)[rank]
        self.owners, self.split, self.last = owners(table), split_backwards(table), last_backwards(order)
        self.backward_follows = {
            a for a, b in pairwise(order) if a.kind == "F" and a.stage == b.stage and b.kind in "BI"
        }

    def source(self, action: Action) -> Action | None:
        """The action of a neighbouring stage whose result ``action`` uses."""
        of = needs(action, len(self.owners), self.split)
        return next((a for a in of if a.stage != action.stage), None)


def forwards(owner: Sequence[int], microbatches: int) -> Table:
    """The table of an evaluation: every microbatch through a rank's first stage, then through its next."""
    return [[Action("F", stage, m) for stage, o in enumerate(owner) if o == rank for m in range(microbatches)]
            for rank in range(1 + max(owner))]  # fmt: skip


class Executor:
    """Runs a table over the stages this rank holds.

    Args:
        table: actions of every rank; this rank runs ``table[pp.rank]``.
        stages: this rank's stages by number.
        run: the rank's mesh and stores.
    """

    def __init__(self, table: Table, stages: dict[int, Stage], run: Run) -> None:
        self.stages, self.run = stages, run
        self._queue = WeightGradQueue()
        self._announced: set[object] = set()
        self._forms: dict[object, Form] = {}
        self._evaluations: dict[int, _Program] = {}
        self.use(table)

    def use(self, table: Table) -> None:
        """Run ``table`` from now on; it leaves every stage where it is."""
        self.table = table
        self._program = _Program(table, self.run.mesh.pp.rank)

    @property
    def n_stages(self) -> int:
        return len(self._program.owners)

    def message_bytes(self) -> int:
        """Bytes of the largest activation that this rank has sent or received so far."""
        return max((shape.numel() * dtype.itemsize for shape, dtype in self._forms.values()), default=0)

    def step(self, microbatches: Sequence[Any]) -> Tensor:
        """Forward and backward of every microbatch; gradients end up summed over their data axes.

        Returns:
            The sum of this rank's losses, 0 where another rank holds the last stage. P over pp, ddp, fsdp, cp; I over
            tp.

        Raises:
            MessageError: if another rank of the pipeline is gone, or does not come within the time limit.
        """
        for stage in self.stages.values():
            stage.begin()
        with self.run.recorder.span("step", -1, -1):
            step = self._play(self._program, microbatches)
        self.run.progress.at("gradient sums")
        for stage in self.stages.values():
            stage.finish()
        for name, stage in sorted((name, s) for s, held in self.stages.items() for name in held.tied):
            self.stages[stage].finish_tied(name)  # by name: both ranks that have it in one order
        return step.loss

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Any], take: Callable[[int, Tensor], None] | None = None) -> Tensor:
        """The sum of this rank's losses without backward, gathered parameters kept between microbatches.

        Args:
            take: gets the number of each microbatch and what the last stage returned for it, which then need not be a
                loss; the sum is 0.
        """
        n = len(microbatches)
        if n not in self._evaluations:
            table = forwards(self._program.owners, n)
            self._evaluations[n] = _Program(table, self.run.mesh.pp.rank)
        return self._play(self._evaluations[n], microbatches, take).loss

    # ---- one pass over a table --------------------------------------------------------------------------------------

    def _play(self, program: _Program, microbatches: Sequence[Any],
              take: Callable[[int, Tensor], None] | None = None) -> _Step:  # fmt: skip
        step = _Step(microbatches, torch.zeros((), device=self.run.mesh.device, dtype=torch.float64), take)
        for item in program.items:
            if isinstance(item, Send):
                with self._under(item.message.producer, item.message):
                    self._send(step, item.message)
            elif isinstance(item, Receive):
                with self._under(item.message.consumer, item.message):
                    self._receive(step, item.message)
            else:
                self.run.progress.at(str(item))
                with self.run.recorder.at(stage=item.stage, microbatch=item.microbatch):
                    self._act(step, program, item)
        for sends in step.sends.values():
            while sends:
                self._wait(*sends.popleft())
        assert not step.results, f"nobody took {', '.join(map(str, step.results))}"
        return step

    def _act(self, step: _Step, program: _Program, action: Action) -> None:
        stage = self.stages[action.stage]
        if action.kind == "W":
            waiting = step.waiting.pop(action[1:])
            with self._at(action):
                stage.weight_gradients(waiting, last=action in program.last)
            return
        stage.prefetch(backward=action.kind != "F")  # it is gathered while the message comes
        given = self._take(step, program.source(action))
        with self._at(action):
            if action.kind == "F":
                self._forward(step, program, action, stage, given)
            else:
                self._backward(step, program, action, stage, given)

    def _at(self, action: Action) -> AbstractContextManager[None]:
        return self.run.recorder.span(*action)

    def _forward(self, step: _Step, program: _Program, action: Action, stage: Stage, x: Tensor | None) -> None:
        grads = torch.is_grad_enabled()
        if x is not None and grads:
            step.inputs[action[1:]] = x.requires_grad_()
            x = announce(x, _nothing)  # a leaf may not be changed in place, which parts may do to what they are given
        with self._deferring(action[1:] in program.split):
            y = stage.forward(x, step.microbatches[action.microbatch],
                              backward_follows=action in program.backward_follows)  # fmt: skip
        last = action.stage + 1 == len(program.owners)
        if last and step.take is not None:
            step.take(action.microbatch, y.detach())
            return
        _refuse(action.stage, y, last)
        step.forms[action[1:]] = y.shape, y.dtype
        if grads:
            step.outputs[action[1:]] = get_gradient_edge(y) if y.requires_grad else None
        if last:
            step.loss += y.detach()
        else:
            step.results[action] = y.detach()

    def _backward(self, step: _Step, program: _Program, action: Action, stage: Stage, gradient: Tensor | None) -> None:
        at, waits = action[1:], action.kind == "I"
        y, (shape, dtype) = step.outputs.pop(at), step.forms.pop(at)
        if gradient is None:  # of the loss
            gradient = torch.ones(shape, dtype=dtype, device=self.run.mesh.device)
        with self._deferring(waits), self.run.recorder.at(phase="backward"):
            stage.backward(y, gradient, last=action in program.last, waits=waits)
        if waits:
            step.waiting[at] = self._queue.pop_all()
        if action.stage:
            x = step.inputs.pop(at)
            step.results[action] = torch.zeros_like(x) if x.grad is None else x.grad
            x.grad = None  # a weight gradient that waits may hold x for long

    def _deferring(self, waits: bool) -> AbstractContextManager[None]:
        """Let weight gradients wait in this rank's queue while the block runs, if they are to."""
        return self.run.deferring(self._queue) if waits else nullcontext()

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _take(self, step: _Step, producer: Action | None) -> Tensor | None:
        """What ``producer`` made: already here, or on its way; None if the action needs nothing of its neighbours."""
        if producer is None:
            return None
        if producer in step.results:
            return step.results.pop(producer)
        return self._wait(*step.arriving.pop(producer))

    def _wait(self, handle: Handle, message: Message) -> Tensor:
        """The message's tensor, once it is there, or was taken.

        Raises:
            MessageError: if that does not happen.
        """
        action, awaited = self._awaited(message)
        self.run.progress.at(f"{action}, waiting {awaited}")
        with self._naming(message), self.run.recorder.span("wait", action.stage, action.microbatch):
            x = handle.wait()
        self.run.progress.at(str(action))
        return x

    def _awaited(self, message: Message) -> tuple[Action, str]:
        """This rank's action that ``message`` belongs to, and what it waits for."""
        ranks = self.run.mesh.pp.ranks
        if message.source == self.run.mesh.pp.rank:
            return message.producer, f"for rank {ranks[message.target]} to take its result"
        what = "activation" if message.producer.kind == "F" else "gradient"
        return message.consumer, f"for the {what} from {message.producer} of rank {ranks[message.source]}"

    @contextmanager
    def _naming(self, message: Message) -> Iterator[None]:
        """Say of what fails inside which message it was, and whose."""
        try:
            yield
        except RuntimeError as error:
            action, awaited = self._awaited(message)
            raise MessageError(f"rank {self.run.mesh.rank} waited at {action} {awaited}: {error}") from error

    def _under(self, action: Action, message: Message) -> AbstractContextManager[None]:
        """Report what is posted for ``message`` as this rank's ``action``'s."""
        phase = "forward" if message.producer.kind == "F" else "backward"
        return self.run.recorder.at(stage=action.stage, microbatch=action.microbatch, phase=phase)

    def _send(self, step: _Step, message: Message) -> None:
        x = step.results.pop(message.producer).contiguous()
        gradient = message.producer.kind != "F"
        if not gradient:
            self._announce(step, message, x)
        sends = step.sends.setdefault((message.target, gradient), deque())
        self._release(sends)
        with self._naming(message):
            sends.append((p2p.send(x, self._axis(gradient), message.target, tag=int(gradient)), message))

    def _release(self, sends: deque[tuple[Handle, Message]]) -> None:
        """Give back what was sent: over NCCL a wait would hold up the compute stream, but it tells what is done."""
        if self.run.mesh.pp.native:
            while sends and sends[0][0].done():
                sends.popleft()
        else:
            while len(sends) >= OPEN_SENDS:
                self._wait(*sends.popleft())

    def _receive(self, step: _Step, message: Message) -> None:
        gradient = message.producer.kind != "F"
        if gradient:
            shape, dtype = step.forms[message.consumer[1:]]
        else:
            shape, dtype = self._form(step, message)
        buffer = torch.empty(shape, dtype=dtype, device=self.run.mesh.device)
        with self._naming(message):
            handle = p2p.receive(buffer, self._axis(gradient), message.source, tag=int(gradient))
        step.arriving[message.producer] = handle, message

    def _axis(self, gradient: bool) -> Axis:
        return self.run.mesh.pp_back if gradient else self.run.mesh.pp

    # What an activation is like is told once for each stage and shape of microbatch, in a message of its own before
    # the first: nobody else knows what a user's parts return. Its wait is safe like any other in the global order.

    def _announce(self, step: _Step, message: Message, x: Tensor) -> None:
        key, form = self._kind_of(step, message), (x.shape, x.dtype)
        if self._forms.setdefault(key, form) != form:
            raise TypeError(f"stage {message.producer.stage} returned {_shown(form)}, after {_shown(self._forms[key])} "
                            "for a microbatch of the same shape. Return the same shape and dtype for both")  # fmt: skip
        if key in self._announced:
            return
        self._announced.add(key)
        header = torch.tensor([DTYPES.index(x.dtype), x.ndim, *x.shape, *[0] * (MAX_DIMS - x.ndim)],
                              dtype=torch.int64, device=self.run.mesh.device)  # fmt: skip
        with self._naming(message):
            sent = p2p.send(header, self.run.mesh.pp, message.target)
        self._wait(sent, message)

    def _form(self, step: _Step, message: Message) -> Form:
        key = self._kind_of(step, message)
        if key not in self._forms:
            header = torch.empty(2 + MAX_DIMS, dtype=torch.int64, device=self.run.mesh.device)
            with self._naming(message):
                coming = p2p.receive(header, self.run.mesh.pp, message.source)
            dtype, ndim, *shape = self._wait(coming, message).tolist()
            self._forms[key] = torch.Size(shape[:ndim]), DTYPES[dtype]
        return self._forms[key]

    def _kind_of(self, step: _Step, message: Message) -> object:
        tokens = getattr(step.microbatches[message.producer.microbatch], "tokens", None)
        return message.producer.stage, None if tokens is None else tokens.shape


def _nothing() -> None:
    """What happens when a backward comes by a stage's input."""


def _refuse(stage: int, y: Tensor, last: bool) -> None:
    """Refuse what can neither travel on, wherever the next stage is, nor be the loss.

    Raises:
        TypeError: if ``y`` is such.
    """
    if y.dtype in DTYPES and y.ndim <= (0 if last else MAX_DIMS):
        return
    shown, dtypes = _shown((y.shape, y.dtype)), ", ".join(map(str, DTYPES))
    if last:
        raise TypeError(f"the last part returned {shown} as the loss. Return a scalar, one of {dtypes}: the sum over "
                        "the microbatch's targets, divided by n_targets")  # fmt: skip
    raise TypeError(f"stage {stage} returned {shown}. Return one of {dtypes} with at most {MAX_DIMS} dims")


def _shown(form: Form) -> str:
    return f"{form[1]} of shape {tuple(form[0])}"
