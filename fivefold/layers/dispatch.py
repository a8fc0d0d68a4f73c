"""The seam between a router and its experts: which rows go where, and how their results come back.

Letters: N tokens of this rank, K experts per token, M rows at this rank's experts, E experts, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..ops.routing import permutation


@dataclass(frozen=True, kw_only=True)
class Route:
    """Where the tokens of one call go. Frozen: a recompute takes the same one."""

    experts: Tensor
    """Chosen experts of each token ``[N, K]`` int64."""
    order: Tensor
    """Rows by expert, tokens ascending in each: which (token, choice) each is ``[N*K]`` int64."""
    place: Tensor
    """The inverse: where each (token, choice) is among the rows ``[N*K]`` int64."""
    load: Tensor
    """How many of this rank's tokens chose each expert ``[E]`` int64."""
    ends: Tensor
    """Last row of each expert of this rank, plus one ``[E]`` int32."""
    counts: list[int] | None
    """Rows of each expert of this rank, where the host knows them without waiting for the device."""


@runtime_checkable
class TokenDispatcher(Protocol):
    """Brings tokens to the experts they chose, and the results back."""

    def route(self, experts: Int64[Tensor, "N K"]) -> Route:
        """The route of tokens that chose ``experts``; called once, also under recompute."""
        ...

    def dispatch(
        self, x: Float[Tensor, "N D"], route: Route, weights: Float[Tensor, "N K"] | None = None
    ) -> Float[Tensor, "M D"]:
        """A row per choice, sorted by expert; times its weight if given."""
        ...

    def combine(
        self, rows: Float[Tensor, "M D"], route: Route, weights: Float[Tensor, "N K"] | None = None
    ) -> Float[Tensor, "N D"]:
        """The sum of each token's rows; times their weights if given."""
        ...


class LocalDispatcher:
    """Every rank holds every expert, so rows are only sorted."""

    def __init__(self, n_experts: int) -> None:
        self.n_experts = n_experts

    def route(self, experts: Int64[Tensor, "N K"]) -> Route:
        order, load = permutation(experts, self.n_experts)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        on_host = load.device.type == "cpu" and not torch.compiler.is_compiling()
        return Route(experts=experts, order=order, place=place, load=load, ends=load.cumsum(0, dtype=torch.int32),
                     counts=load.tolist() if on_host else None)  # fmt: skip

    def dispatch(
        self, x: Float[Tensor, "N D"], route: Route, weights: Float[Tensor, "N K"] | None = None
    ) -> Float[Tensor, "M D"]:
        rows = _Spread.apply(x, route.order, route.place, route.experts.shape[1])
        return rows if weights is None else (rows * weights.flatten()[route.order, None]).to(rows.dtype)

    def combine(
        self, rows: Float[Tensor, "M D"], route: Route, weights: Float[Tensor, "N K"] | None = None
    ) -> Float[Tensor, "N D"]:
        rows = _Permute.apply(rows, route.place, route.order).unflatten(0, (-1, route.experts.shape[1]))  # [N, K, D]
        return rows.sum(1) if weights is None else torch.bmm(weights[:, None].to(rows.dtype), rows)[:, 0]


# Both ways only read rows, so sums have one order on any device and nothing is added atomically; autograd's own
# gradient of a gather is a scatter.


class _Spread(torch.autograd.Function):
    """K copies of each row, at their places: ``x[order // K]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return gradients[0].index_select(0, place).unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """``x[index]`` where ``index`` is a permutation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse), None, None
