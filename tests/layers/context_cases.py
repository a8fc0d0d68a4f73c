"""What the tests of context parallelism run on each rank of a pool: one row's attention cut over ``cp``, made whole."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from fivefold.config.model import DecoderConfig
from fivefold.config.run import RunConfig
from fivefold.data.placement import PLACEMENTS
from fivefold.data.rows import IGNORE, Rows
from fivefold.data.synthetic import Synthetic
from fivefold.layers.context import METHODS, work
from fivefold.layers.context.base import Heads, KeyValues, Latent
from fivefold.layers.microbatch import Holders, MicroBatch
from fivefold.mesh.collectives import gather_values
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool_worker import RankContext
from fivefold.mesh.run import Run
from fivefold.models.builder import build_parts
from fivefold.observe.recorder import FlightRecorder
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


def attended(context: RankContext, method: str, placement: str, heads: int, groups: int, packed: bool,
             small: int | None = None) -> Tensors:  # fmt: skip
    """The same by ``method`` over ``cp``, gathered."""
    mesh = context.mesh(f"cp{context.world}")
    whole, of = inputs(heads, groups, latent=method == "latent"), documents(packed)
    columns = PLACEMENTS[placement](of, context.world)
    mine = torch.from_numpy(columns[mesh.cp.rank].copy())

    def cut(x: Tensor) -> Tensor:
        index = mine.view(*mine.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])
        return x.gather(1, index).clone()

    x = {n: (t if n == "weight" else cut(t)).clone().requires_grad_(n != "grad") for n, t in whole.items()}
    mb = MicroBatch(tokens=torch.zeros_like(mine), targets=None, positions=cut(torch.from_numpy(positions(of))),
                    documents=cut(torch.from_numpy(of)) if packed else None, n_targets=1, n_sequences=2,
                    held=Holders(columns, of if packed else None))  # fmt: skip
    with patch.object(work, "SMALL", work.SMALL if small is None else small):
        y = METHODS[method](Run(mesh)).attend(x["q"], key_values(x), mb, SCALE)
        y.backward(x["grad"])
    found = {"y": y.detach(), **{n: t.grad for n, t in x.items() if t.grad is not None}}
    return {n: gather_values(t, mesh.cp).sum(0) if n == "weight" else uncut(t, columns, mesh) for n, t in found.items()}


def uncut(x: Tensor, columns: np.ndarray, mesh: Mesh) -> Tensor:
    """Whole rows from each rank's columns."""
    order = torch.from_numpy(np.concatenate(columns, 1).argsort(1))
    rows = torch.cat(list(gather_values(x, mesh.cp)), 1)
    return rows.gather(1, order.view(*order.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))


class OneRow:
    """A source of one row of tokens 1 to 16, each the label of the one before."""

    def rows(self, step: int, start: int, stop: int) -> Rows:
        tokens = np.arange(1, 17)[None]
        targets = np.append(tokens[:, 1:], [[IGNORE]], 1)
        zeros = np.zeros_like(tokens)
        return Rows(tokens=tokens, targets=targets, positions=np.arange(16)[None], documents=zeros.astype(np.int32),
                    single_document=True)  # fmt: skip


def labels(context: RankContext, config: RunConfig) -> tuple[list[int], list[int]]:
    """Tokens and labels of the row in order of columns, put together from all ranks."""
    mesh = context.mesh(config.parallel)
    (share,) = Cutter(config, mesh).shares(OneRow().rows(1, 0, 1))
    assert share.held is not None
    return tuple(uncut(share.tensors[n], share.held.columns, mesh)[0].tolist() for n in ("tokens", "targets"))


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
    columns = PLACEMENTS[config.context.placement](np.zeros(tokens.shape, np.int32) if of is None else of, mesh.cp.size)
    mine = torch.from_numpy(columns[mesh.cp.rank].copy())
    at = torch.from_numpy(positions(np.zeros(tokens.shape, np.int32) if of is None else of)).gather(1, mine)
    mb = MicroBatch(tokens=tokens.gather(1, mine), targets=None, positions=at,
                    documents=None if of is None else torch.from_numpy(of).gather(1, mine), n_targets=1,
                    n_sequences=len(tokens), held=Holders(columns, of))  # fmt: skip
    with torch.no_grad():
        return uncut(forward(parts.values(), mb), columns, mesh)


def call(context: RankContext, calls: list[tuple[Any, ...]]) -> list[Any]:
    """Several cases of this module in one call of the pool: ``(name, *arguments)``."""
    return [globals()[name](context, *rest) for name, *rest in calls]


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
