"""The seam between a router and its experts: which rows go where, and how their results come back.

Letters: N tokens of this rank, K experts per token, M rows at this rank's experts, E experts, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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
        k = route.experts.shape[1]
        rows = x.index_select(0, route.order // k)
        return rows if weights is None else _weigh(rows, weights.flatten()[route.order])

    def combine(
        self, rows: Float[Tensor, "M D"], route: Route, weights: Float[Tensor, "N K"] | None = None
    ) -> Float[Tensor, "N D"]:
        n, k = route.experts.shape
        if weights is not None:
            rows = _weigh(rows, weights.flatten()[route.order])
        return rows.new_zeros(n, rows.shape[1]).index_add(0, route.order // k, rows)


def _weigh(rows: Tensor, weights: Tensor) -> Tensor:
    return (rows * weights[:, None]).to(rows.dtype)
