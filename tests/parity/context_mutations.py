"""Mistakes of cut sequences, planted like those of :mod:`.mutations`: each must be found in the smallest row for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from fivefold.data.placement import contiguous
from fivefold.data.rows import IGNORE, Rows
from fivefold.layers import moe
from fivefold.layers.context import attend, exchange, ulysses, work
from fivefold.layers.microbatch import Holders
from fivefold.mesh import transport
from fivefold.mesh.axis import Axis
from fivefold.mesh.mesh import Mesh
from fivefold.ops import blocks, routing
from fivefold.ops.partial import partial_attention
from fivefold.train import balance, batch
from fivefold.train.batch import Cutter, Share

from .grid import row
from .planting import mutation, own_value

Planted = AbstractContextManager[Any]
RING = row("cp2", "dense", method="ring")
GATHER = row("cp2", "dense", method="all_gather")
PLAIN = row("cp2", "dense", method="ring", placement="contiguous")
WHOLE = row("cp2", "dense", method="ring", documents=False)
ULYSSES = row("cp2", "dense", method="ulysses")
LATENT = row("cp2", method="latent")
EXPERTS = row("cp2", method="ring")

# ---- gradients that travel -------------------------------------------------------------------------------------------


@mutation(RING, "gradient", right=("replicas", "owners"), first="layers.2 (gradient")
def key_gradients_stay_away(mesh: Mesh) -> Planted:
    """Keys and values get the gradient of their own rank's queries only."""
    real = exchange.Ring.returned

    def returned(self: exchange.Ring) -> exchange.Block:
        own = self._own[0].clone(), self._own[1].clone()
        real(self)
        return own

    return patch.object(exchange.Ring, "returned", returned)


@mutation(RING, "gradient", right=("replicas", "owners"), first="layers.2 (gradient")
def key_gradients_go_one_rank_too_far(mesh: Mesh) -> Planted:
    """What other ranks found is added to the gradient of the next rank's keys."""
    real = exchange.Ring.returned

    def returned(self: exchange.Ring) -> exchange.Block:
        assert self._travelling is not None
        self._travelling = self._shift(self._travelling.wait())
        return real(self)

    return patch.object(exchange.Ring, "returned", returned)


@mutation(row("cp4", "dense", method="ring"), "gradient", first="layers.2 (gradient")
def key_gradients_of_the_last_rank_only(mesh: Mesh) -> Planted:
    """A rank passes on its own part in place of the sum so far."""
    real = exchange.Ring.give

    def give(self: exchange.Ring, place: int, gradient: exchange.Block | None) -> None:
        if self._travelling is not None:
            self._travelling.wait()
            self._travelling = None
        real(self, place, gradient)

    return patch.object(exchange.Ring, "give", give)


@mutation(GATHER, "gradient", right=("replicas", "owners"), first="layers.2 (gradient")
def gathered_gradients_not_summed(mesh: Mesh) -> Planted:
    """All keys are gathered, and each rank keeps the gradient of its own from its own queries."""

    def returned(self: exchange.Gather) -> exchange.Block:
        own = self._gradients[self._axis.rank]
        assert own is not None
        first, second = own.split(self._widths, -1)
        return first.contiguous(), second.contiguous()

    return patch.object(exchange.Gather, "returned", returned)


@mutation(LATENT, "gradient", worst="kv_down", first="layers.2 (gradient")
def rope_key_gradient_of_own_queries(mesh: Mesh) -> Planted:
    """The latent's gradient is summed over the ranks, that of the key beside it is not."""
    real = exchange.Ring.returned

    def returned(self: exchange.Ring) -> exchange.Block:
        key = self._own[1].clone()
        return real(self)[0], key

    return patch.object(exchange.Ring, "returned", returned)


@mutation(LATENT, "gradient", right=("replicas", "owners"), worst="kv_up", first="none")
def expansion_gradient_of_own_block(mesh: Mesh) -> Planted:
    """The matrix that expands latents learns from the tokens that are here only."""
    real = attend._collapsed

    def collapsed(dk: Tensor, dv: Tensor, weight: Tensor, widths: Any, latent: Tensor, dweight: Tensor) -> Any:
        own = not dweight.any()  # a rank's own block is the first
        return real(dk, dv, weight, widths, latent, dweight if own else dweight.clone())

    return patch.object(attend, "_collapsed", collapsed)


@mutation(RING, "gradient", right=("replicas", "owners"), first="none")
def parameter_gradients_not_summed(mesh: Mesh) -> Planted:
    """Each rank stores the gradient that its own tokens give for the rows it stores."""

    def own(flat: Tensor, axis: Axis, into: Tensor | None = None) -> transport.Handle:
        mine = flat.chunk(axis.size)[axis.rank].clone()
        return transport.Handle((), lambda: mine if into is None else into.copy_(mine))

    return patch.object(transport, "reduce_scatter", own)


# ---- sums of blocks --------------------------------------------------------------------------------------------------


@mutation(RING, "loss", "gradient", first="layers.0")
def blocks_averaged(mesh: Mesh) -> Planted:
    """Blocks count alike, however much of the softmax is theirs."""

    def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        out.add_(part).div_(2)
        lse.copy_(torch.logaddexp(lse, part_lse))

    return patch.object(blocks, "merge_", merge)


@mutation(RING, "gradient", right=("replicas", "owners"), first="layers.2 (gradient")
def lse_of_own_block_in_backward(mesh: Mesh) -> Planted:
    """The other block is weighed right, and then the lse stays that of the rank's own."""
    real = blocks.merge_
    return patch.object(blocks, "merge_", lambda out, lse, *part: real(out, lse.clone(), *part))


@mutation(RING, "gradient", right=("replicas", "owners"), first="layers.2 (gradient")
def lse_of_each_block_in_backward(mesh: Mesh) -> Planted:
    """Backward takes the softmax of each block for that of the row."""
    real = blocks.partial_attention_backward

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **kw: Any) -> Any:
        return real(grad, q, k, v, out, partial_attention(q, k, v, **kw)[1], **kw)

    return patch.object(blocks, "partial_attention_backward", backward)


@mutation(RING, "gradient", right=("replicas", "owners"), first="layers.2 (gradient")
def result_of_each_block_in_backward(mesh: Mesh) -> Planted:
    """Backward leaves out that a block's weight in the merge depends on its scores."""
    real = blocks.partial_attention_backward

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **kw: Any) -> Any:
        return real(grad, q, k, v, partial_attention(q, k, v, **kw)[0], lse, **kw)

    return patch.object(blocks, "partial_attention_backward", backward)


# ---- who sees what ---------------------------------------------------------------------------------------------------


@mutation(PLAIN, "loss", "gradient", first="layers.0")
def documents_ignored_in_other_blocks(mesh: Mesh) -> Planted:
    """Documents end at the boundaries inside a rank, and leak over those between ranks."""
    real = work._others

    def others(place: int, q: Any, k: Any) -> Iterator[work.Entry]:
        return real(place, (np.zeros_like(q[0]), q[1]), (np.zeros_like(k[0]), k[1]))

    return patch.object(work, "_others", others)


@mutation(PLAIN, "loss", "gradient", first="layers.0")
def documents_end_with_the_piece(mesh: Mesh) -> Planted:
    """Queries meet no key of another rank, as if a document began with every piece."""
    return patch.object(work, "_others", lambda place, q, k: iter(()))


def _taken_for_contiguous(holders: Holders) -> Holders:
    n, rows, width = holders.columns.shape
    return replace(holders, columns=contiguous(np.zeros((rows, n * width), np.int32), n))


@mutation(RING, "loss", "gradient", first="layers.0")
def zigzag_with_contiguous_masks(mesh: Mesh) -> Planted:
    """Columns are dealt in zigzag, and keys are allowed as if they were not."""
    real, at = work.row_work, work.places
    return patch.multiple(work, row_work=lambda holders, *rest: real(_taken_for_contiguous(holders), *rest),
                          places=lambda holders, device: at(_taken_for_contiguous(holders), device))  # fmt: skip


@mutation(WHOLE, "loss", "gradient", first="layers.0")
def zigzag_with_contiguous_masks_of_one_document(mesh: Mesh) -> Planted:
    """The same in rows of one document."""
    real = work.row_work
    return patch.object(work, "row_work", lambda holders, *rest: real(_taken_for_contiguous(holders), *rest))


@mutation(row("cp2", "dense", method="ring", placement="balanced"), "loss", "gradient", first="layers.0")
def every_row_placed_like_the_first(mesh: Mesh) -> Planted:
    """Masks take the first row's placement for that of all rows, which balanced places each in its own way."""
    real, at = work.row_work, work.places

    def first(holders: Holders) -> Holders:
        return replace(holders, columns=np.broadcast_to(holders.columns[:, :1], holders.columns.shape))

    return patch.multiple(work, row_work=lambda holders, *rest: real(first(holders), *rest),
                          places=lambda holders, device: at(first(holders), device))  # fmt: skip


# ---- heads and sequence swapped --------------------------------------------------------------------------------------


@mutation(ULYSSES, "loss", "gradient", first="layers.0")
def heads_come_back_in_another_order(mesh: Mesh) -> Planted:
    """The result's heads are those of the ranks in the wrong order."""
    real = ulysses.reshard

    def reshard(x: Tensor, axis: Axis, split: int, join: int) -> Tensor:
        y = real(x, axis, split, join)
        return y.roll(x.shape[join], join) if join == 2 else y

    return patch.object(ulysses, "reshard", reshard)


@mutation(ULYSSES, "loss", "gradient", first="layers.0")
def columns_not_put_in_order(mesh: Mesh) -> Planted:
    """Rows that are whole again stand in the order of the ranks, and the causal mask takes it for theirs."""
    return patch.object(ulysses, "_selected", lambda x, order: x)


# ---- what travels with tokens ----------------------------------------------------------------------------------------


def _other_tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Planted:
    """Every share with some of its tensors changed."""
    real = Cutter._share

    def share(self: Cutter, rows: Rows) -> Share:
        found = real(self, rows)
        return replace(found, tensors=found.tensors | change(found.tensors))

    return patch.object(Cutter, "_share", share)


@mutation(PLAIN, "loss", "gradient", first="head")
def labels_shifted_after_cutting(mesh: Mesh) -> Planted:
    """Labels are the next token on the rank, so the last of each piece has none."""

    def shifted(t: dict[str, Tensor]) -> dict[str, Tensor]:
        following = torch.nn.functional.pad(t["tokens"][:, 1:], (0, 1), value=IGNORE)
        return {"targets": following.where(t["targets"] != IGNORE, IGNORE)}

    return _other_tensors(shifted)


@mutation(PLAIN, "loss", "gradient", first="layers.0")
def positions_start_again_on_each_rank(mesh: Mesh) -> Planted:
    """Queries and keys turn by their place on the rank."""
    return _other_tensors(lambda t: {"positions": torch.arange(t["tokens"].shape[1]).expand_as(t["positions"])})


@mutation(RING, "loss", "gradient", first="layers.0")
def positions_counted_from_the_first_of_the_rank(mesh: Mesh) -> Planted:
    """Queries and keys turn by the rank's first column and their place after it: true of contiguous pieces only."""

    def offset(t: dict[str, Tensor]) -> dict[str, Tensor]:
        width = t["tokens"].shape[1]
        return {"positions": (mesh.cp.rank * width + torch.arange(width)).expand_as(t["positions"])}

    return _other_tensors(offset)


# ---- counts ----------------------------------------------------------------------------------------------------------


@mutation(RING, "loss", "gradient", first="head")
def targets_counted_over_data_ranks_only(mesh: Mesh) -> Planted:
    """Each rank of cp divides by the targets of its own columns."""
    real = batch.sum_values
    return patch.object(batch, "sum_values", lambda x, axis: real(x, mesh.join("ddp", "fsdp")))


@mutation(EXPERTS, "gradient", right=("replicas", "owners"), first="layers.2 (gradient")
def balance_frequencies_over_tp_only(mesh: Mesh) -> Planted:
    """How often a row's tokens choose an expert is counted among this rank's columns."""
    real = moe.sum_values
    return patch.object(moe, "sum_values", lambda x, axis: real(x, mesh.tp))


@mutation(EXPERTS, "gradient", worst="router", first="layers.2 (gradient")
def balance_loss_by_local_length(mesh: Mesh) -> Planted:
    """The balance loss takes a rank's columns for the whole row."""
    real = routing.balance_loss
    return patch.object(
        routing, "balance_loss", lambda scores, counts, k, length: real(scores, counts, k, length // mesh.cp.size)
    )


@mutation(EXPERTS, "experts", right=("gradient",), first="none")
def load_not_summed_over_cp(mesh: Mesh) -> Planted:
    """Biases move by the load of this rank's columns, and drift apart."""
    return patch.object(balance, "sum_values", own_value)


@mutation(LATENT, "loss", right=("replicas", "owners"), first="layers.0")
def shared_key_of_another_block(mesh: Mesh) -> Planted:
    """Other ranks' latents are expanded, and meet this rank's own rotary key."""
    real = exchange.Ring.blocks

    def of(self: exchange.Ring, own: exchange.Block) -> Iterator[tuple[int, exchange.Block]]:
        for place, (latent, _) in real(self, own):
            yield place, (latent, own[1])

    return patch.object(exchange.Ring, "blocks", of)
