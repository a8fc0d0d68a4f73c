"""Models of a user who made a mistake: what one rank computes depends on which rank it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.config.model import ModelConfig
from fivefold.config.run import RunConfig
from fivefold.layers.microbatch import MicroBatch
from fivefold.mesh.run import Run
from tests.parity import plain


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float, gradient: float) -> Tensor:
        ctx.factor = gradient
        return x * value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] * ctx.factor, None, None


class Wrong(plain.Mix):
    """A block whose output, or only its gradient, is larger on later ranks."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__()
        self.value, self.gradient = (1.0 + rank, 1.0 + rank) if what == "value" else (1.0, 1.0 + rank)

    def forward(self, x: Tensor, mb: MicroBatch) -> Tensor:
        return _Scale.apply(super().forward(x, mb), self.value, self.gradient)  # type: ignore[return-value]


def _build(run: Run, config: ModelConfig, names: Sequence[str] | None, what: str) -> dict[str, nn.Module]:
    parts = plain.build(run, config, names)
    return {name: Wrong(run.mesh.rank, what) if name == "mix.1" else part for name, part in parts.items()}


def build_value(run: Run, config: ModelConfig, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    return _build(run, config, names, "value")


def build_gradient(run: Run, config: ModelConfig, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    return _build(run, config, names, "gradient")


def _recipe(builder: str) -> RunConfig:
    model = plain.PlainConfig(builder=f"{__file__}:{builder}", vocab_size=37)
    return plain.recipe().model_copy(update={"model": model})


def wrong_value() -> RunConfig:
    return _recipe("build_value")


def wrong_gradient() -> RunConfig:
    return _recipe("build_gradient")
