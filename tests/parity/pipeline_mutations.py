"""Mistakes of a pipeline, planted like those of :mod:`.mutations`: each must be found in the smallest row for it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fivefold.layers import embedding, head, moe
from fivefold.mesh import p2p
from fivefold.mesh.axis import Axis
from fivefold.mesh.mesh import Mesh
from fivefold.ops.linear import WeightGradQueue
from fivefold.schedule.plan import Plan, plan
from fivefold.schedule.table import Action
from fivefold.train import balance, gradients, state, step
from fivefold.wrap import buffer, pipeline
from fivefold.wrap.buffer import Buffer
from fivefold.wrap.data import Stage
from fivefold.wrap.pipeline import Executor

from .grid import row
from .planting import mutation, own_value

Planted = AbstractContextManager[Any]
PLAIN = row("pp2", "dense", 1, 2, "none", "gpipe")
TIED = row("pp2", "dense", 1, 1, "none", "1f1b", True)
EXPERTS = row("pp2", "moe", 1, 2, "none", "zb_h1")
SPLIT = row("pp2-fsdp2", "dense", 2, 2, "none", "zb_h1")
ALONE = row("single", "dense", 1, 1, "none", "zb_v", True)
"""Two stages on one rank."""

# ---- stages ----------------------------------------------------------------------------------------------------------


def _other_parts(change: Any) -> Planted:
    """Stages of other parts than planned: ``change`` gets the tuple of the stages' names, as lists."""

    def planned(config: Any) -> Plan:
        real = plan(config)
        assert real.parts is not None
        return replace(real, parts=tuple(map(tuple, change([list(names) for names in real.parts]))))

    return patch.object(state, "plan", planned)


@mutation(PLAIN, "loss", "gradient", "parameter", worst="layers.2", first="layers.2")
def layer_between_stages_dropped(mesh: Mesh) -> Planted:
    """The layer at a cut is in neither stage."""
    return _other_parts(lambda parts: [parts[0][:-1], *parts[1:]])


@mutation(PLAIN, "owners", "loss", "gradient", first="layers.3")
def layer_between_stages_repeated(mesh: Mesh) -> Planted:
    """The layer at a cut is in both stages."""
    return _other_parts(lambda parts: [parts[0], parts[0][-1:] + parts[1]])


@mutation(PLAIN, "loss", "gradient", right=("owners",), first="layers.3")
def stage_parts_in_wrong_order(mesh: Mesh) -> Planted:
    """Two layers of a stage change places."""
    return _other_parts(lambda parts: [parts[0], [parts[1][1], parts[1][0], *parts[1][2:]]])


@mutation(row("pp2", "plain", 1, 1, "none", "1f1b"), "loss", right=("replicas", "owners"), first="mix.1")
def plain_parts_seeded_by_their_company(mesh: Mesh) -> Planted:
    """What a plain module of the last stage draws for itself depends on which parts the rank builds before it."""
    real = state.build_parts
    return patch.object(state, "build_parts", lambda *args, layout_free: real(*args, layout_free=not mesh.pp.rank))


# ---- messages and microbatches ---------------------------------------------------------------------------------------


@mutation(PLAIN, "loss", "gradient", first="embed")
def activation_of_another_microbatch(mesh: Mesh) -> Planted:
    """Two activations change places on their way: the last stage has the targets of the other microbatch."""
    real = Executor._forward

    def forward(self: Executor, now: Any, program: Any, action: Action, *rest: Any) -> None:
        if action.stage:
            real(self, now, program, action, *rest)
        else:
            with patch.object(now, "microbatches", now.microbatches[::-1]):
                real(self, now, program, action, *rest)

    return patch.object(Executor, "_forward", forward)


@mutation(PLAIN, "gradient", right=("replicas", "owners"), first="layers.1 (gradient")
def gradient_of_another_microbatch(mesh: Mesh) -> Planted:
    """Two gradients change places on their way: each meets the other's graph."""
    real = Executor._backward

    def backward(self: Executor, now: Any, program: Any, action: Action, *rest: Any) -> None:
        if action[1:] == (0, 0):
            now.outputs[0, 0], now.outputs[0, 1] = now.outputs[0, 1], now.outputs[0, 0]
        real(self, now, program, action, *rest)

    return patch.object(Executor, "_backward", backward)


@mutation(PLAIN, "gradient", "grad_norm", right=("replicas",), first="layers.2 (gradient")
def activation_detached(mesh: Mesh) -> Planted:
    """A stage cuts what it received off its graph, so that no gradient comes back."""
    real = Stage.forward
    cut = lambda self, x, mb, **kw: real(self, None if x is None else x.detach(), mb, **kw)  # noqa: E731
    return patch.object(Stage, "forward", cut)


@mutation(ALONE, "gradient", "grad_norm", worst="layers", first="layers.2 (gradient")
def gradient_lost_between_stages_of_a_rank(mesh: Mesh) -> Planted:
    """The gradient of what a stage hands to the next on its own rank stays zero."""
    real = Executor._take

    def take(self: Executor, now: Any, producer: Action | None) -> Tensor | None:
        found = real(self, now, producer)
        return found if found is None or producer is None or producer.kind == "F" else torch.zeros_like(found)

    return patch.object(Executor, "_take", take)


@mutation(PLAIN, "gradient", "grad_norm", first="layers.2 (gradient")
def zeros_sent_for_a_gradient(mesh: Mesh) -> Planted:
    """The gradient is sent from a buffer that nobody filled."""
    real = p2p.send

    def send(x: Tensor, axis: Axis, to: int, *, tag: int = 0) -> Any:
        return real(torch.zeros_like(x) if tag else x, axis, to, tag=tag)

    return patch.object(pipeline.p2p, "send", send)


# ---- the loss --------------------------------------------------------------------------------------------------------


@mutation(PLAIN, "loss", right=("gradient", "parameter"), first="none")
def loss_of_every_stage(mesh: Mesh) -> Planted:
    """Stages before the last add what they return to the loss."""
    real = Executor._forward

    def forward(self: Executor, now: Any, program: Any, action: Action, *rest: Any) -> None:
        real(self, now, program, action, *rest)
        if action in now.results:
            now.loss += now.results[action].mean()

    return patch.object(Executor, "_forward", forward)


@mutation(PLAIN, "loss", right=("gradient", "parameter"), first="none")
def loss_of_the_first_stage(mesh: Mesh) -> Planted:
    """The loss that is told is that of the rank that tells it, which has none."""
    return patch.object(step, "sum_values", own_value)


@mutation(row("pp2", "moe", 1, 1, "none", "1f1b"), "gradient", worst="router", first="layers.1 (gradient")
def balance_loss_of_last_stage_only(mesh: Mesh) -> Planted:
    """What the layers of a stage before the last add to the loss is dropped with their activation's graph."""
    real = moe.attach
    return patch.object(moe, "attach", lambda x, aux: real(x, aux) if mesh.pp.rank == mesh.pp.size - 1 else x)


@mutation(EXPERTS, "experts", right=("gradient", "parameter"), first="none")
def counts_of_own_stage(mesh: Mesh) -> Planted:
    """A rank knows the expert counts of its own stage only."""
    real, data = balance.sum_values, mesh.join("ddp", "fsdp", "cp", "tp")
    return patch.object(balance, "sum_values", lambda x, axis: real(x, data if axis is mesh.world else axis))


@mutation(EXPERTS, "experts", right=("gradient",), first="none")
def biases_move_on_the_first_stage_only(mesh: Mesh) -> Planted:
    """Later stages never move theirs."""
    real = moe.MoE.update_bias
    return patch.object(moe.MoE, "update_bias", lambda self, load: None if mesh.pp.rank else real(self, load))


@mutation(PLAIN, "grad_norm", right=("gradient",), first="none")
def norm_of_own_stage(mesh: Mesh) -> Planted:
    """Each stage clips by its own norm."""
    return patch.object(gradients, "sum_values", own_value)


# ---- the split backward ----------------------------------------------------------------------------------------------


@mutation(EXPERTS, "gradient", right=("replicas", "owners"), first="none")
def weight_gradients_of_one_microbatch_lost(mesh: Mesh) -> Planted:
    """Jobs that wait are overwritten by the next microbatch's."""
    real = Stage.weight_gradients

    def weight_gradients(self: Stage, waiting: WeightGradQueue, *, last: bool = False) -> None:
        real(self, waiting if last else WeightGradQueue(), last=last)

    return patch.object(Stage, "weight_gradients", weight_gradients)


@mutation(EXPERTS, "gradient", worst="ffn", first="none")
def expert_gradients_not_queued(mesh: Mesh) -> Planted:
    """A schedule that splits backward trains no expert."""
    real = moe.grouped_linear
    return patch.object(moe, "grouped_linear", lambda h, w, ends, counts, queue: real(
        h, w if queue is None else w.detach(), ends, counts, None))  # fmt: skip


@mutation(EXPERTS, "gradient", worst="embed", first="embed (gradient")
def embedding_gradient_not_queued(mesh: Mesh) -> Planted:
    """A schedule that splits backward does not train the embedding."""
    real = embedding.embedding
    return patch.object(embedding, "embedding", lambda rows, w, queue: real(rows, w if queue is None else w.detach()))


@mutation(EXPERTS, "gradient", worst="head", first="none")
def head_gradient_not_queued(mesh: Mesh) -> Planted:
    """A schedule that splits backward does not train the head."""
    real = head.chunked_cross_entropy

    def loss(x: Tensor, w: Tensor, *args: Any, queue: Any, **kw: Any) -> Tensor:
        return real(x, w if queue is None else w.detach(), *args, queue=None, **kw)

    return patch.object(head, "chunked_cross_entropy", loss)


@mutation(SPLIT, "gradient", first="none")
def reduced_after_input_gradients(mesh: Mesh) -> Planted:
    """A unit is reduced when its backward has passed by, before its weight gradients are there; those are dropped."""
    run_jobs = Stage.weight_gradients

    def after(self: Stage, i: int) -> None:
        self.units[i].due = False
        self._reduce(self.units[i], self._last)

    def weight_gradients(self: Stage, waiting: WeightGradQueue, *, last: bool = False) -> None:
        with patch.object(Buffer, "reduce", lambda self, last: None):
            run_jobs(self, waiting, last=last)
        for b in self.buffers:
            b._flat, b._written = None, set()

    return patch.multiple(Stage, _after_backward=after, weight_gradients=weight_gradients)


@mutation(SPLIT, raises="was never reduced")
def weight_gradients_reduce_nothing(mesh: Mesh) -> Planted:
    """Nobody tells the engine that a unit's weight gradients are done."""
    real = Stage.weight_gradients

    def weight_gradients(self: Stage, waiting: WeightGradQueue, *, last: bool = False) -> None:
        with patch.object(Stage, "_reduce", lambda self, unit, last: None):
            real(self, waiting, last=last)

    return patch.object(Stage, "weight_gradients", weight_gradients)


@mutation(row("pp2-fsdp2", "dense", 1, 2, "none", "1f1b"), raises="was never reduced")
def first_backward_taken_for_the_last(mesh: Mesh) -> Planted:
    """ZeRO 1 reduces after the first microbatch."""

    def first(order: list[Action]) -> set[Action]:
        return set({a.stage: a for a in reversed(order) if a.kind in "BW"}.values())

    return patch.object(pipeline, "last_backwards", first)


# ---- tied embeddings -------------------------------------------------------------------------------------------------


@mutation(TIED, "gradient", "replicas", worst="embed", first="none")
def tied_gradients_not_summed(mesh: Mesh) -> Planted:
    """Each end trains its copy by its own use of it."""
    return patch.object(Buffer, "_sum_ties", lambda self: None)


@mutation(TIED, "gradient", right=("replicas", "owners"), worst="embed", first="none")
def tied_gradients_averaged(mesh: Mesh) -> Planted:
    """The two uses count half."""
    real = Buffer._sum_ties

    def sum_ties(self: Buffer) -> None:
        real(self)
        if self.tie.size > 1 and self.grad is not None:
            self.grad /= 2

    return patch.object(Buffer, "_sum_ties", sum_ties)


@mutation(TIED, "grad_norm", right=("gradient", "replicas", "owners"), first="none")
def tied_copy_counted_in_the_norm(mesh: Mesh) -> Planted:
    """The embedding counts twice."""
    real = step.gradient_norm
    return patch.object(
        step, "gradient_norm", lambda shards, mesh: real([replace(s, original=True) for s in shards], mesh)
    )


@mutation(TIED, "owners", "grad_norm", right=("gradient",), first="none")
def tied_copy_is_an_original(mesh: Mesh) -> Planted:
    """Both copies count, in the norm and wherever parameters are saved."""
    real = buffer.Shard
    return patch.object(buffer, "Shard", lambda piece, value, spec, at, original: real(piece, value, spec, at))


@mutation(TIED, "loss", "replicas", first="head")
def tied_copies_start_apart(mesh: Mesh) -> Planted:
    """The head draws initial values under its own name."""
    real = Buffer._fill

    def fill(self: Buffer, piece: Any, entry: Any, seed: int) -> None:
        real(self, piece, entry if entry.original else replace(entry, name="head.weight"), seed)

    return patch.object(Buffer, "_fill", fill)


@mutation(ALONE, "gradient", worst="embed", first="none")
def second_use_overwrites_the_first(mesh: Mesh) -> Planted:
    """Of two deferred gradients of one matrix the later one stays."""

    def deposit(self: Buffer, index: int, gradient: Tensor) -> None:
        self.params[index].grad = gradient

    return patch.object(Buffer, "deposit", deposit)
