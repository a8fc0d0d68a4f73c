"""A user's own model of plain torch modules, without a ``SHARDING`` table: every rank of a stage holds it whole.

Letters: B sequences, T tokens of a sequence, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.config.model import ModelConfig
from fivefold.config.parts import DataConfig, OptimConfig, TrainConfig
from fivefold.config.run import RunConfig
from fivefold.layers.embedding import Embedding
from fivefold.layers.head import Head
from fivefold.layers.microbatch import MicroBatch
from fivefold.mesh.parameter import Init
from fivefold.mesh.run import Run

DIM = 12


class Look(nn.Module):
    """Token ids to vectors ``[B, T, D]``."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, DIM)

    def forward(self, x: None, mb: MicroBatch) -> Tensor:
        return self.table(mb.tokens)


class Mix(nn.Module):
    """A feed-forward with biases, and a matrix that no microbatch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 20), nn.Linear(20, DIM)
        self.idle = nn.Linear(DIM, 5)

    def forward(self, x: Tensor, mb: MicroBatch) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Loss(nn.Module):
    """Cross-entropy over the whole batch's targets."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.out = nn.Linear(DIM, vocab_size)

    def forward(self, x: Tensor, mb: MicroBatch) -> Tensor:
        assert mb.targets is not None
        return F.cross_entropy(self.out(x).flatten(0, 1), mb.targets.flatten(), reduction="sum") / mb.n_targets


class PlainConfig(ModelConfig):
    """A model that says what its parts are, so that it can be cut into stages."""

    def part_costs(self, sequence_length: int) -> dict[str, float]:
        first, last = ("embed", "head") if self.builder.endswith("build_between") else ("look", "loss")
        return {first: 0.5, "mix.0": 2.0, "mix.1": 2.0, last: 2.5}


def build(run: Run, config: ModelConfig, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """All plain: rows may be divided, sequences and matrices not."""
    n = config.vocab_size
    kinds = {"look": lambda: Look(n), "mix.0": Mix, "mix.1": Mix, "loss": lambda: Loss(n)}
    return {name: kinds[name]() for name in (kinds if names is None else names)}


def build_between(run: Run, config: ModelConfig, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Plain blocks between the library's embedding and head: under ``tp`` they see their rank's tokens."""
    init = Init(std=DIM**-0.5)
    kinds = {"embed": lambda: Embedding(run, config.vocab_size, DIM, init), "mix.0": Mix, "mix.1": Mix,
             "head": lambda: Head(run, config.vocab_size, DIM, 1e-6, init)}  # fmt: skip
    return {name: kinds[name]() for name in (kinds if names is None else names)}


def recipe() -> RunConfig:
    """The plain model at parity size."""
    return RunConfig(
        model=PlainConfig(builder=f"{__file__}:build", vocab_size=37),
        data=DataConfig(files=("random",), batch_size=8, sequence_length=16),
        optim=OptimConfig(lr=1e-2),
        train=TrainConfig(steps=3, small_buffer=0),
    )


def between() -> RunConfig:
    """Plain blocks between sharded ends."""
    config = recipe()
    return config.model_copy(update={"model": PlainConfig(builder=f"{__file__}:build_between", vocab_size=37)})
