"""What the tests of context parallelism run on each rank of a pool: one row's attention cut over ``cp``, made whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from fivefold.config import locate
from fivefold.config.model import DecoderConfig
from fivefold.config.run import RunConfig
from fivefold.data.placement import PLACEMENTS, Columns
from fivefold.data.rows import IGNORE, Rows
from fivefold.data.synthetic import Synthetic
from fivefold.layers.context import context_attention, work
from fivefold.layers.context.base import Heads, KeyValues, Latent
from fivefold.layers.microbatch import Holders, MicroBatch
from fivefold.mesh.axis import Axis
from fivefold.mesh.collectives import gather_values
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool_worker import RankContext
from fivefold.mesh.run import Run
from fivefold.models.builder import build_parts
from fivefold.observe.recorder import FlightRecorder
from fivefold.tools.verify import run_steps
from fivefold.train.batch import Batches, Cutter
from fivefold.train.state import build_state
from tests.helpers import forward, materialise, microbatch

LENGTHS = (5, 1, 9, 1, 8)
"""Documents of the packed row; the other row is one document."""
SCALE = 0.3
Tensors = dict[str, Tensor]


def documents(packed: bool) -> np.ndarray:
    """Two rows of 24 tokens ``[2, 24]``."""
    row = np.repeat(np.arange(len(LENGTHS)), LENGTHS) if packed else np.zeros(24)
    return np.stack([row, np.zeros(24)]).astype(np.int32)


def positions(of: np.ndarray) -> np.ndarray:
    """Place of each token in its document."""
    column = np.arange(of.shape[1])
    first = np.diff(of, axis=1, prepend=-1) != 0
    return column - np.maximum.accumulate(np.where(first, column, 0), axis=1)


def inputs(heads: int, groups: int, *, latent: bool, dtype: torch.dtype = torch.float64) -> Tensors:
    """Whole rows of queries, of what keys and values come from, and a gradient of the result; E = 6, V = 4."""
    generator = torch.Generator().manual_seed(heads + groups)
    shapes = {"q": (2, 24, heads, 6), "grad": (2, 24, heads, 4)}
    shapes |= (
        {"latent": (2, 24, 3), "key": (2, 24, 2)} if latent else {"k": (2, 24, groups, 6), "v": (2, 24, groups, 4)}
    )
    shapes |= {"weight": (heads * 8, 3)} if latent else {}
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in shapes.items()}


def key_values(x: Tensors) -> KeyValues:
    return Latent(x["latent"], x["key"], x["weight"], 4, 4) if "latent" in x else Heads(x["k"], x["v"])


def dense(x: Tensors, packed: bool) -> Tensors:
    """The definition: result and gradients on whole rows."""
    leaves = {n: t.clone().requires_grad_() for n, t in x.items() if n != "grad"}
    heads = key_values(leaves).expanded()
    k, v = (t.repeat_interleave(x["q"].shape[2] // t.shape[2], 2) for t in (heads.k, heads.v))
    scores = torch.einsum("bthe,bshe->bhts", leaves["q"], k) * SCALE
    of = torch.from_numpy(documents(packed))
    see = (of[:, :, None] == of[:, None, :]) & torch.ones(24, 24, dtype=torch.bool).tril()
    y = torch.einsum("bhts,bshv->bthv", scores.masked_fill(~see[:, None], -torch.inf).softmax(-1), v)
    y.backward(x["grad"])
    return {"y": y.detach(), **{n: t.grad for n, t in leaves.items() if t.grad is not None}}


def placed(name: str, of: np.ndarray, n: int) -> Columns:
    """Columns by a placement's name, or by a user's own."""
    return PLACEMENTS[name](of, n) if name in PLACEMENTS else locate.function(name, "context.placement")(of, n)


def attended(context: RankContext, method: str, placement: str, heads: int, groups: int, packed: bool,
             small: int | None = None, dtype: torch.dtype = torch.float64) -> Tensors:  # fmt: skip
    """The same by ``method`` over ``cp``, gathered."""
    mesh = context.mesh(f"cp{context.world}")
    whole, of = inputs(heads, groups, latent=method == "latent", dtype=dtype), documents(packed)
    columns = placed(placement, of, context.world)
    x = {n: (t if n == "weight" else cut(t, columns, mesh.cp)).clone().requires_grad_(n != "grad")
         for n, t in whole.items()}  # fmt: skip
    with patch.object(work, "SMALL", work.SMALL if small is None else small):
        y = context_attention(Run(mesh, context=method)).attend(x["q"], key_values(x), share(of, columns, mesh), SCALE)
        y.backward(x["grad"])
    found = {"y": y.detach(), **{n: t.grad for n, t in x.items() if t.grad is not None}}
    return {n: gather_values(t, mesh.cp).sum(0) if n == "weight" else uncut(t, columns, mesh.cp)
            for n, t in found.items()}  # fmt: skip


def share(of: np.ndarray, columns: Columns, mesh: Mesh, tokens: Tensor | None = None) -> MicroBatch:
    """This rank's columns of rows with these documents; without targets."""
    packed = bool(of.any())
    one = cut(torch.from_numpy(positions(of)), columns, mesh.cp)
    return MicroBatch(tokens=one if tokens is None else cut(tokens, columns, mesh.cp), targets=None, positions=one,
                      documents=cut(torch.from_numpy(of), columns, mesh.cp) if packed else None, n_targets=1,
                      n_sequences=len(of), held=Holders(columns, of if packed else None))  # fmt: skip


def cut(x: Tensor, columns: Columns, axis: Axis) -> Tensor:
    """This rank's columns of whole rows."""
    mine = torch.from_numpy(columns[axis.rank].copy())
    return x.gather(1, mine.view(*mine.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))


def uncut(x: Tensor, columns: Columns, axis: Axis) -> Tensor:
    """Whole rows from each rank's columns."""
    order = torch.from_numpy(np.concatenate(columns, 1).argsort(1))
    rows = torch.cat(list(gather_values(x, axis)), 1)
    return rows.gather(1, order.view(*order.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))


class Moved(torch.autograd.Function):
    """``there(x)``, a linear map over all ranks, whose transpose is ``back``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.back(grad.contiguous()), None, None


def gradchecked(context: RankContext, method: str, placement: str, heads: int, groups: int, packed: bool) -> bool:
    """Whether gradients of whole rows' result by whole rows' inputs are those of finite differences.

    Every rank checks the same function of the same inputs, so all of them move the same element at a time. In random
    directions, all elements at once: 3,000 elements would take minutes one by one.
    """
    mesh = context.mesh(f"cp{context.world}")
    whole, of = inputs(heads, groups, latent=method == "latent"), documents(packed)
    whole.pop("grad")
    columns = placed(placement, of, context.world)
    mb = share(of, columns, mesh)
    attention = context_attention(Run(mesh, context=method))

    def split(x: Tensor) -> Tensor:
        return cut(x, columns, mesh.cp)

    def joined(x: Tensor) -> Tensor:
        return uncut(x, columns, mesh.cp)

    def summed(x: Tensor) -> Tensor:
        return gather_values(x, mesh.cp).sum(0)

    def function(*given: Tensor) -> Tensor:
        x = dict(zip(whole, given, strict=True))
        mine: Any = {n: Moved.apply(t, split, joined) for n, t in x.items() if n != "weight"}  # I -> S
        if "weight" in x:
            mine["weight"] = Moved.apply(x["weight"], torch.clone, summed)  # I -> R
        return Moved.apply(attention.attend(mine["q"], key_values(mine), mb, SCALE), joined, split)  # type: ignore[return-value]

    leaves = [t.requires_grad_() for t in whole.values()]
    return torch.autograd.gradcheck(function, leaves, rtol=1e-6, atol=1e-8, fast_mode=True, raise_exception=False)


class OneRow:
    """A source of one row of tokens 1 to 16, each the label of the one before."""

    def rows(self, step: int, start: int, stop: int) -> Rows:
        tokens = np.arange(1, 17)[None]
        targets = np.append(tokens[:, 1:], [[IGNORE]], 1)
        zeros = np.zeros_like(tokens)
        return Rows(tokens=tokens, targets=targets, positions=np.arange(16)[None], documents=zeros.astype(np.int32),
                    single_document=True)  # fmt: skip


def only_the_first(documents: np.ndarray, n: int) -> np.ndarray:
    """No placement: every rank holds the first columns."""
    rows, width = documents.shape
    return np.broadcast_to(np.arange(width // n), (n, rows, width // n))


def labels(context: RankContext, config: RunConfig) -> tuple[list[int], list[int]]:
    """Tokens and labels of the row in order of columns, put together from all ranks."""
    mesh = context.mesh(config.parallel)
    (part,) = Cutter(config, mesh).shares(OneRow().rows(1, 0, 1))
    assert part.held is not None
    tokens, targets = (uncut(part.tensors[n], part.held.columns, mesh.cp)[0] for n in ("tokens", "targets"))
    return tokens.tolist(), targets.tolist()


def logits(context: RankContext, config: RunConfig, tokens: Tensor, of: np.ndarray | None) -> Tensor:
    """Logits of whole rows under ``config``'s layout; ``of`` are documents."""
    mesh = context.mesh(config.parallel)
    run = Run(mesh, context=config.context.method)
    parts = build_parts(run, config.model)
    materialise(parts, run, dtype=torch.float64)
    for part in parts.values():
        part.eval()
    if mesh.cp.size == 1:
        with torch.no_grad():
            return forward(parts.values(), microbatch(tokens, documents=None if of is None else torch.from_numpy(of)))
    of = np.zeros(tokens.shape, np.int32) if of is None else of
    columns = placed(config.context.placement, of, mesh.cp.size)
    with torch.no_grad():
        return uncut(forward(parts.values(), share(of, columns, mesh, tokens)), columns, mesh.cp)


def call(context: RankContext, calls: list[tuple[Any, ...]]) -> list[Any]:
    """Several cases of this module in one call of the pool: ``(name, *arguments)``."""
    return [globals()[name](context, *rest) for name, *rest in calls]


def trained(context: RankContext, config: RunConfig) -> tuple[float, Tensors]:
    """Loss and whole gradients of a step."""
    found = run_steps(config, context.mesh(config.parallel), 1)
    return found.losses[0], found.gradients


def attention_bytes(context: RankContext, config: RunConfig) -> float:
    """Bytes that this rank sends over ``cp`` in a step, for each attention layer and row."""
    recorder = FlightRecorder()
    state = build_state(config, context.mesh(config.parallel, recorder))
    batches = Batches(Synthetic(37, config.data.sequence_length, config.data.batch_size, 0), config, state.mesh)
    batch = batches.batch(batches.rows(1))
    batches.close()
    recorder.clear()
    state.executor.step(batch.microbatches)
    sent = sum(e.sent for e in recorder.events if e.axis == "cp" and e.scope.module.endswith("attention"))
    assert isinstance(config.model, DecoderConfig)
    return sent / config.model.n_layers / config.data.batch_size
