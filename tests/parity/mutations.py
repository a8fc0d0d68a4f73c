"""Mistakes planted on purpose: each is made while the layout runs, not while the oracle does, and must not pass.

A mutation patches names of the package inside a worker and undoes it. Every one is a mistake that some framework made
or that one of the five rules excludes (``docs/design.md``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fivefold.layers import gqa, head, mla, moe, norm, swiglu
from fivefold.mesh.collectives import all_gather, all_reduce, replicate, shard
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.run import Run
from fivefold.ops import routing
from fivefold.train import balance, batch, gradients, state, step
from fivefold.wrap import buffer
from fivefold.wrap.buffer import Buffer
from fivefold.wrap.data import Stage

from .grid import row
from .planting import mutation, own_value

# ---- the gradient rule -----------------------------------------------------------------------------------------------


@mutation(row("tp2"), "gradient", "parameter", worst="router", first="none")
def router_gradient_skips_tp(mesh: Mesh) -> AbstractContextManager[Any]:
    """Only one tp rank's tokens reach the router's gradient."""

    def logits(self: moe.MoE, tokens: Tensor) -> Tensor:
        router = self.router.detach() if mesh.tp.rank else self.router
        return torch.nn.functional.linear(tokens, router)

    return patch.object(moe.MoE, "_logits", logits)


@mutation(row("tp2", "dense"), "gradient", "parameter", worst="norm", first="none")
def norm_gradient_skips_tp(mesh: Mesh) -> AbstractContextManager[Any]:
    """A sequence-parallel norm whose gradient is one rank's."""
    real = norm.rms_norm
    return patch.object(norm, "rms_norm", lambda x, w, eps: real(x, w.detach() if mesh.tp.rank else w, eps))


@mutation(row("tp2"), "gradient", "parameter", worst="ffn", first="none")
def expert_gradient_skips_tp(mesh: Mesh) -> AbstractContextManager[Any]:
    """Experts that are local to each tp rank are trained on one rank's tokens only."""
    real = moe.grouped_linear
    return patch.object(moe, "grouped_linear", lambda h, w, *rest: real(h, w.detach() if mesh.tp.rank else w, *rest))


@mutation(row("tp2"), "gradient", worst="kv_down", first="layers.2 (gradient")
def rope_key_gradient_not_summed(mesh: Mesh) -> AbstractContextManager[Any]:
    """MLA's shared key is used by all heads, but its gradient is that of this rank's heads."""
    real = mla.gather_together

    def gather(tensors: Any, axis: Any) -> Any:
        *rest, key = tensors
        return *real(rest, axis), all_gather(key, axis, dim=1, to="I")

    return patch.object(mla, "gather_together", gather)


@mutation(row("tp2", "moe_q"), "gradient", worst="attention", first="layers.2 (gradient")
def latent_gradient_doubled(mesh: Mesh) -> AbstractContextManager[Any]:
    """MLA's down-projections get the sum over tp ranks twice."""
    real = mla.gather_together
    return patch.object(mla, "gather_together", lambda x, axis: [replicate(y, axis) for y in real(x, axis)])


@mutation(row("tp2", "dense"), "gradient", right=("replicas", "owners"), first="layers.2 (gradient")
def gather_backward_slices(mesh: Mesh) -> AbstractContextManager[Any]:
    """The feed-forward's input is taken as I: its gradient is cut and not summed."""
    return patch.object(swiglu, "all_gather", partial(all_gather, to="I"))


@mutation(row("tp2", "dense"), "gradient", first="layers.3 (gradient")
def head_gradient_of_own_vocabulary(mesh: Mesh) -> AbstractContextManager[Any]:
    """The last hidden state gets the gradient of this rank's logits only."""
    return patch.object(head, "all_gather", partial(all_gather, to="I"))


@mutation(row("tp2", "dense"), "gradient", first="layers.2 (gradient")
def sum_gradient_summed_again(mesh: Mesh) -> AbstractContextManager[Any]:
    """The backward of a sum sums: gradients are tp times too large from there on."""
    return patch.object(
        gqa, "reduce_scatter", lambda x, axis, dim: shard(all_reduce(x, axis, to="R"), axis, dim, of="I")
    )


@mutation(row("tp2", "dense"), "loss", "gradient", first="layers.0")
def scatter_without_sum(mesh: Mesh) -> AbstractContextManager[Any]:
    """A partial product is cut and never added up."""
    return patch.object(swiglu, "reduce_scatter", lambda x, axis, dim: shard(x, axis, dim, of="R"))


@mutation(row("tp2"), "loss", "gradient", first="layers.0")
def rope_key_turned_by_first_shard(mesh: Mesh) -> AbstractContextManager[Any]:
    """Every tp rank turns its keys by the positions of the first one's tokens."""
    return patch.object(mla, "shard_tables", lambda tables, axis: [t.chunk(axis.size, 1)[0] for t in tables])


# ---- the storage rule ------------------------------------------------------------------------------------------------


@mutation(row("fsdp2", "dense"), "grad_norm", right=("gradient",))
def norm_of_own_shards(mesh: Mesh) -> AbstractContextManager[Any]:
    """The gradient norm misses what other ranks store."""
    return patch.object(gradients, "sum_values", own_value)


@mutation(row("tp2", "dense"), "grad_norm")
def norm_counts_replicated_per_tp_rank(mesh: Mesh) -> AbstractContextManager[Any]:
    """What tp replicates counts once per tp rank."""
    real = step.gradient_norm

    def gradient_norm(shards: Any, mesh: Mesh) -> Tensor:
        again = [s for s in shards if "tp" not in s.spec.sharding]
        return (real(shards, mesh).square() + (mesh.tp.size - 1) * real(again, mesh).square()).sqrt()

    return patch.object(step, "gradient_norm", gradient_norm)


@mutation(
    row("fsdp2", "dense", optim__max_norm=0.1), "gradient", "parameter", right=("replicas", "owners"), first="none"
)
def clip_skipped_on_one_rank(mesh: Mesh) -> AbstractContextManager[Any]:
    """One rank does not scale its rows down."""
    real = step.clip
    return patch.object(step, "clip", lambda *args: None if mesh.rank else real(*args))


@mutation(row("fsdp2", "dense", optim__max_norm=0.1), "gradient", "parameter")
def clip_gets_nothing(mesh: Mesh) -> AbstractContextManager[Any]:
    """An exhausted generator: the norm is right, and nothing is clipped."""
    real = step.clip
    return patch.object(step, "clip", lambda shards, norm, max_norm: real([], norm, max_norm))


@mutation(row("fsdp2", "dense"), "owners", "replicas", "loss", first="embed")
def rows_off_by_one(mesh: Mesh) -> AbstractContextManager[Any]:
    """The second rank takes its rows of a parameter for the ones before them."""

    def piece(name: str, shape: Any, offset: Any, size: Any, start: int, stop: int, data: Tensor) -> Any:
        move = shape[-1] if mesh.rank and len(shape) > 1 and start >= shape[-1] else 0
        return buffer_piece(name, shape, offset, size, start - move, stop - move, data)

    buffer_piece = buffer.Piece
    return patch.object(buffer, "Piece", piece)


@mutation(row("fsdp2", "dense", 1), "loss", "parameter", right=("gradient", "replicas", "owners"))
def stale_gathered_parameters(mesh: Mesh) -> AbstractContextManager[Any]:
    """Parameters are not gathered again after the optimizer changed their shards."""
    return patch.object(Buffer, "reshard", lambda self: None)


@mutation(row("ddp2", "dense"), "gradient", "replicas")
def replicas_not_summed(mesh: Mesh) -> AbstractContextManager[Any]:
    """Each replica keeps its own gradient."""
    return patch.object(Buffer, "_replicate", lambda self: None)


@mutation(row("ddp2-fsdp2", "dense", 3, 2), "gradient", right=("replicas",))
def replicas_summed_per_microbatch(mesh: Mesh) -> AbstractContextManager[Any]:
    """The running sum goes over the replicas after each microbatch, so earlier ones count several times."""
    reduce, replicate = Buffer.reduce, Buffer._replicate

    def at_once(self: Buffer) -> None:
        replicate(self)
        assert self.grad is not None and self._replicating is not None
        self.grad.copy_(self._replicating.wait())
        self._replicating = None

    return patch.multiple(Buffer, reduce=lambda self, last: reduce(self, last=True), _replicate=at_once)


@mutation(row("fsdp2", "dense", 2), "gradient", first="none")
def unit_reduced_too_early(mesh: Mesh) -> AbstractContextManager[Any]:
    """A unit's gradients are summed over ranks before they are in, and what comes after is dropped."""
    before = Stage._before_backward

    def early(self: Stage, i: int) -> None:
        self.units[i].reduce(last=self._last)
        before(self, i)

    def after(self: Stage, i: int) -> None:
        for b in self.units[i].buffers:
            b._flat, b._written = None, set()
        self.units[i].due = False

    return patch.multiple(Stage, _before_backward=early, _after_backward=after)


# ---- accumulation ----------------------------------------------------------------------------------------------------


@mutation(row("fsdp2", "dense", 1, 2), "gradient", right=("replicas",))
def accumulation_wipes_local_sum(mesh: Mesh) -> AbstractContextManager[Any]:
    """ZeRO 1: a microbatch's gradient overwrites the one before."""
    real = Buffer.add

    def add(self: Buffer, index: int, gradient: Tensor) -> None:
        self._written.discard(index)
        real(self, index, gradient)

    return patch.object(Buffer, "add", add)


@mutation(row("fsdp2", "dense", 2, 2), "gradient")
def accumulation_wipes_reduced_sum(mesh: Mesh) -> AbstractContextManager[Any]:
    """ZeRO 2 and 3: a reduced microbatch overwrites the one before."""
    real = Buffer.settle

    def settle(self: Buffer) -> None:
        self._fresh = True
        real(self)

    return patch.object(Buffer, "settle", settle)


@mutation(row("fsdp2", "dense", 3, 2), "gradient")
def only_last_microbatch_reduced(mesh: Mesh) -> AbstractContextManager[Any]:
    """Earlier microbatches' gradients are dropped where they should be reduced."""
    real = Buffer.reduce

    def reduce(self: Buffer, last: bool) -> None:
        if last:
            real(self, last=True)
        else:
            self._flat, self._written = None, set()

    return patch.object(Buffer, "reduce", reduce)


@mutation(row("fsdp2", "dense", 3, 2), "gradient", "grad_norm", first="layers.3 (gradient")
def accumulation_averages(mesh: Mesh) -> AbstractContextManager[Any]:
    """Each microbatch's gradient is divided by their number, on top of the loss's own division."""
    real = Stage.backward
    return patch.object(Stage, "backward", lambda self, y, gradient, **kw: real(self, y, gradient / 2, **kw))


@mutation(row("ddp2-tp2", "moe", 2, 2, train__small_buffer=300), "gradient")
def small_parameters_keep_last_microbatch(mesh: Mesh) -> AbstractContextManager[Any]:
    """The buffer of small parameters forgets its sum when a microbatch ends."""
    real = Stage.backward

    def backward(self: Stage, *args: Any, last: bool, waits: bool) -> None:
        real(self, *args, last=last, waits=waits)
        for b in self._shared.buffers:
            b._written = b._written if last else set()

    return patch.object(Stage, "backward", backward)


# ---- the loss rule ---------------------------------------------------------------------------------------------------


@mutation(row("fsdp2", "dense"), "loss", "gradient", first="head")
def local_target_count(mesh: Mesh) -> AbstractContextManager[Any]:
    """The loss is divided by this rank's targets and the ranks' losses are added."""
    return patch.object(batch, "sum_values", own_value)


@mutation(row("fsdp2", "dense"), "loss", "gradient", first="head")
def mean_of_means(mesh: Mesh) -> AbstractContextManager[Any]:
    """The mean of the ranks' means, however many targets each has."""
    return patch.object(batch, "sum_values", lambda x, axis: x * axis.size)


@mutation(row("fsdp2", "dense"), "loss", right=("gradient", "parameter"), first="none")
def loss_of_own_rows(mesh: Mesh) -> AbstractContextManager[Any]:
    """Training is right, and the loss that is told is one rank's."""
    return patch.object(step, "sum_values", own_value)


@mutation(row("fsdp2"), "gradient", worst="router", first="layers.2 (gradient")
def balance_loss_over_local_sequences(mesh: Mesh) -> AbstractContextManager[Any]:
    """The balance loss is a mean over this rank's sequences."""
    real = batch.microbatches
    return patch.object(batch, "microbatches", lambda shares, n, total: real(shares, n, total // 2))


@mutation(row("tp2"), "gradient", worst="router", first="layers.2 (gradient")
def balance_loss_per_tp_rank(mesh: Mesh) -> AbstractContextManager[Any]:
    """Every tp rank adds the whole balance loss instead of its part."""
    real = moe.MoE._losses
    return patch.object(moe.MoE, "_losses", lambda self, *args: real(self, *args) * mesh.tp.size)


@mutation(row("tp2"), "gradient", first="layers.2 (gradient")
def balance_frequency_of_own_tokens(mesh: Mesh) -> AbstractContextManager[Any]:
    """How often an expert is chosen in a row is counted among this rank's tokens."""
    return patch.object(moe, "sum_values", own_value)


@mutation(row("tp2", "dense"), "loss", "gradient", first="head")
def vocabulary_padding_predicted(mesh: Mesh) -> AbstractContextManager[Any]:
    """The row that pads the vocabulary to tp is a token like any other."""
    real = head.chunked_cross_entropy
    return patch.object(head, "chunked_cross_entropy", lambda *args, **kw: real(*args, **{**kw, "vocab_size": 38}))


# ---- expert bookkeeping ----------------------------------------------------------------------------------------------


@mutation(row("fsdp2", "moe", recompute="full"), "experts", right=("gradient", "parameter", "loss"))
def recompute_counts_again(mesh: Mesh) -> AbstractContextManager[Any]:
    """The route is computed again in backward, and its tokens are counted twice."""
    return patch.object(Run, "once", lambda self, fn: fn())


@mutation(row("fsdp2"), "experts", right=("gradient",), first="none")
def load_of_own_tokens(mesh: Mesh) -> AbstractContextManager[Any]:
    """Biases move by this rank's load, and drift apart."""
    return patch.object(balance, "sum_values", own_value)


@mutation(row("fsdp2", "moe", 1, 2), "experts", right=("gradient",), first="none")
def bias_moves_per_microbatch(mesh: Mesh) -> AbstractContextManager[Any]:
    """The bias moves in every forward instead of once a step."""
    real = moe.MoE._route

    def route(self: moe.MoE, scores: Tensor, n_rows: int) -> Any:
        found = real(self, scores, n_rows)
        self.update_bias(balance.sum_values(found[0].load, mesh.join("ddp", "fsdp", "cp", "tp")))
        return found

    return patch.object(moe.MoE, "_route", route)


@mutation(row("fsdp2"), "experts", right=("gradient", "loss", "parameter"), first="none")
def bias_rounded(mesh: Mesh) -> AbstractContextManager[Any]:
    """The bias is kept in bfloat16."""
    real = moe.MoE.update_bias

    def update(self: moe.MoE, load: Tensor) -> None:
        real(self, load)
        self.bias.copy_(self.bias.bfloat16())

    return patch.object(moe.MoE, "update_bias", update)


@mutation(row("fsdp2", model__moe__bias_off_layers=(1,)), "experts", right=("gradient",), first="none")
def bias_off_everywhere(mesh: Mesh) -> AbstractContextManager[Any]:
    """One layer without a bias turns it off in all."""
    return patch.object(moe.MoE, "update_bias", lambda self, load: None)


@mutation(row("fsdp2"), "loss", first="layers.1")
def weighted_before_experts(mesh: Mesh) -> AbstractContextManager[Any]:
    """Tokens are weighted before their experts where they should be after."""
    real = moe.MoE.__init__

    def init(self: moe.MoE, run: Run, config: Any, *args: Any) -> None:
        real(self, run, config.model_copy(update={"score_before": True}), *args)

    return patch.object(moe.MoE, "__init__", init)


@mutation(row("fsdp2"), "loss", first="layers.1")
def weights_not_normalised(mesh: Mesh) -> AbstractContextManager[Any]:
    """Route weights are not divided by their sum."""
    real = routing.weights
    return patch.object(routing, "weights", lambda scores, chosen, normalise, scale: real(scores, chosen, False, scale))


# ---- the value rule --------------------------------------------------------------------------------------------------


@mutation(row("ddp2", "dense"), "loss", "replicas")
def initial_values_by_rank(mesh: Mesh) -> AbstractContextManager[Any]:
    """Each rank seeds its own values."""
    real = buffer.initial_values
    return patch.object(buffer, "initial_values", lambda init, seed, *rest: real(init, seed + mesh.rank, *rest))


@mutation(row("fsdp2", "dense"), "loss", first="embed")
def initial_values_by_shard(mesh: Mesh) -> AbstractContextManager[Any]:
    """The generator counts the shard's elements and not the parameter's."""
    real = buffer.initial_values
    return patch.object(buffer, "initial_values", lambda init, seed, name, at: real(init, seed, name, at - at.min()))


@mutation(row("ddp2", "dense"), "loss", "gradient", right=("replicas", "owners"), first="embed")
def samples_by_layout(mesh: Mesh) -> AbstractContextManager[Any]:
    """Every data rank reads the first share of the batch."""
    real = batch.Batches.__init__

    def init(self: batch.Batches, *args: Any) -> None:
        real(self, *args)
        self._start, self._stop = 0, self._stop - self._start

    return patch.object(batch.Batches, "__init__", init)


@mutation(row("fsdp2", "dense"), "loss", first="layers.0")
def documents_ignored(mesh: Mesh) -> AbstractContextManager[Any]:
    """Attention crosses the documents of a row."""
    real = batch.microbatches

    def microbatches(*args: Any) -> Iterator[Any]:
        return (replace(mb, documents=None) for mb in real(*args))

    return patch.object(batch, "microbatches", microbatches)


@mutation(row("fsdp2", "dense"), "loss", first="layers.0")
def mask_of_first_row(mesh: Mesh) -> AbstractContextManager[Any]:
    """All rows of a microbatch attend by the first row's documents."""
    real = batch.microbatches

    def microbatches(*args: Any) -> Iterator[Any]:
        for mb in real(*args):
            yield replace(mb, documents=None if mb.documents is None else mb.documents[:1].expand_as(mb.documents))

    return patch.object(batch, "microbatches", microbatches)


# ---- the optimizer ---------------------------------------------------------------------------------------------------


@mutation(row("fsdp2", "dense"), "parameter", right=("gradient",), first="none")
def learning_rate_one_step_late(mesh: Mesh) -> AbstractContextManager[Any]:
    """The schedule starts at step 0."""
    real = step.learning_rate
    return patch.object(step, "learning_rate", lambda number, *rest: real(number - 1, *rest))


@mutation(row("fsdp2", "dense", optim__weight_decay=0.5), "parameter", right=("gradient",), worst="norm", first="none")
def norms_decay(mesh: Mesh) -> AbstractContextManager[Any]:
    """Weight decay on every parameter."""
    real = state.build_optimizer

    def build(shards: Any, config: Any) -> Any:
        return real([replace(s, spec=replace(s.spec, decay=True)) for s in shards], config)

    return patch.object(state, "build_optimizer", build)
