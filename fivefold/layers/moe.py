"""Mixture of experts: a router, shared experts, routed experts, and what keeps their load even.

Letters: B sequences, T_tp tokens of a sequence on this rank's place of tp, N = B*T_tp, D width, E experts, K experts
of a token, M rows at this rank's experts, F hidden width of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..config.model import MoeConfig
from ..mesh.collectives import sum_values
from ..mesh.run import Run
from ..ops import routing
from ..ops.grouped import grouped_linear
from ..ops.swiglu import swiglu
from .base import Layer
from .dispatch import Route, TokenDispatcher
from .init import InitRule
from .microbatch import MicroBatch
from .swiglu import SwiGLU


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, aux: Tensor) -> Tensor:
        ctx.like = aux.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones_like(ctx.like)


def attach(x: Float[Tensor, "*shape"], aux: Float[Tensor, ""]) -> Float[Tensor, "*shape"]:
    """``x``; in backward ``aux`` gets the gradient 1, as if it had been added to the loss.

    So a loss term leaves from the middle of any stage, and the pipeline need not know of it.
    """
    return _Attach.apply(x, aux)


class MoE(Layer):
    """Shared experts for every token, and for each token the routed experts its router scores highest.

    States: over ``tp`` tokens stay S(1): every rank routes its own, the router is used as R and its gradients are
    summed. Naming ``ep`` and ``etp`` puts the experts on the sparse mesh.

    Buffers, all of this rank's tokens since the last ``reset``, P over ``ddp``, ``fsdp``, ``cp`` and ``tp``: ``load``
    (how many chose each expert), ``balance_loss`` and ``z_loss`` (without their weights in the loss). ``bias`` is I.

    Args:
        bias_rate: how far ``update_bias`` moves each expert's bias.

    Source: DeepSeekMoE, arXiv 2401.06066 (shared and fine-grained experts); DeepSeek-V3, arXiv 2412.19437, section
    2.1.2 (bias, sequence-wise balance loss); ST-MoE, arXiv 2202.08906 (z-loss).
    """

    SHARDING = {
        "router": (None, None),
        "gate": ("ep", "etp", None),
        "up": ("ep", "etp", None),
        "down": ("ep", None, "etp"),
    }
    router: nn.Parameter
    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    bias: Tensor
    load: Tensor
    balance_loss: Tensor
    z_loss: Tensor

    def __init__(self, run: Run, config: MoeConfig, dim: int, dispatcher: TokenDispatcher, init: InitRule,
                 bias_rate: float) -> None:  # fmt: skip
        super().__init__(run)
        self.config, self.dispatcher, self.bias_rate = config, dispatcher, bias_rate
        n, hidden, device = config.n_experts, config.expert_dim, run.mesh.device
        self.declare("router", (n, dim), init.matrix(dim))
        self.declare("gate", (n, hidden, dim), init.matrix(dim))
        self.declare("up", (n, hidden, dim), init.matrix(dim))
        self.declare("down", (n, dim, hidden), init.residual(hidden))
        self.shared = SwiGLU(run, dim, config.n_shared * hidden, init) if config.n_shared else None
        # In bfloat16 a bias of 1 would swallow a step of 0.001, so whoever casts the parameters leaves this alone.
        self.register_buffer("bias", torch.zeros(n, dtype=torch.float32, device=device))
        self.register_buffer("load", torch.zeros(n, dtype=torch.int64, device=device), persistent=False)
        for name in ("balance_loss", "z_loss"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float32, device=device), persistent=False)

    def forward(self, x: Float[Tensor, "B T_tp D"], mb: MicroBatch) -> Float[Tensor, "B T_tp D"]:
        c, queue = self.config, self.queue
        tokens = x.flatten(0, 1)  # S over every axis that cuts tokens  [N, D]
        logits = self._logits(tokens)  # [N, E]
        scores = routing.scores(logits, c.score)
        route, row_counts = self.run.once(lambda: self._route(scores.detach(), x.shape[0]))
        weights = routing.weights(scores, route.experts, c.normalise, c.route_scale)  # [N, K]
        h = self.dispatcher.dispatch(tokens, route, weights if c.score_before else None)  # [M, D]
        gate, up = (grouped_linear(h, w, route.ends, route.counts, queue) for w in (self.gate, self.up))  # [M, F]
        h = grouped_linear(swiglu(gate, up), self.down, route.ends, route.counts, queue)  # [M, D]
        y = self.dispatcher.combine(h, route, None if c.score_before else weights).view_as(x)
        if self.shared is not None:
            y = y + self.shared(x)
        if self.training and (c.balance_loss or c.z_loss):
            y = attach(y, self._losses(logits, scores, row_counts, x.shape[:2], mb))
        return y

    def _logits(self, tokens: Tensor) -> Tensor:
        """Router logits in float32 at least: rounding to bfloat16 would decide close choices by chance.

        The weight gradient never waits in the queue: a cast weight is not the parameter itself, and it is small.
        """
        wide = torch.promote_types(tokens.dtype, torch.float32)
        return F.linear(tokens.to(wide), self.router.to(wide))

    def _route(self, scores: Tensor, n_rows: int) -> tuple[Route, Tensor | None]:
        """All of a call that must not change in its recompute, and all counting that must not happen twice.

        Returns:
            The route, and how often each expert was chosen in each whole row ``[B, E]``, if the balance loss asks.
        """
        c = self.config
        experts = routing.choose(scores, self.bias, c.top_k, c.n_groups, c.top_groups, c.group_score)
        route = self.dispatcher.route(experts)
        if not self.training:
            return route, None
        self.load += route.load
        if not c.balance_loss:
            return route, None
        counts = routing.choice_counts(experts.unflatten(0, (n_rows, -1)), c.n_experts)
        return route, sum_values(counts, self.run.mesh.join("cp", "tp"))  # P -> I, without gradient

    def _losses(
        self, logits: Tensor, scores: Tensor, row_counts: Tensor | None, shape: torch.Size, mb: MicroBatch
    ) -> Tensor:
        """This rank's part of the balance loss (a mean over the global batch's sequences) and z-loss (over its tokens).

        States: P over ``ddp``, ``fsdp``, ``cp`` and ``tp``.
        """
        c, total = self.config, logits.new_zeros(())
        row_length = shape[1] * self.run.mesh.join("cp", "tp").size
        if row_counts is not None:
            balance = routing.balance_loss(scores.unflatten(0, shape), row_counts, c.top_k, row_length) / mb.n_sequences
            self._count(self.balance_loss, balance)
            total = total + c.balance_loss * balance
        if c.z_loss:
            z = routing.router_z_loss(logits) / (mb.n_sequences * row_length)
            self._count(self.z_loss, z)
            total = total + c.z_loss * z
        return total

    def _count(self, counter: Tensor, value: Tensor) -> None:
        self.run.once(lambda: counter.add_(value.detach()))

    @torch.no_grad()
    def update_bias(self, load: Tensor) -> None:
        """Move each expert's bias by ``bias_rate``: up where its load is below the mean, down where above.

        Args:
            load: how many tokens of the whole global batch chose each expert ``[E]``: ``self.load`` summed over
                ``ddp``, ``fsdp``, ``cp`` and ``tp``.
        """
        if self.bias_rate:
            below = load.sum() - load * self.config.n_experts  # in whole numbers: E times (mean - load), exactly
            self.bias.add_(below.sign().to(self.bias.dtype), alpha=self.bias_rate)

    def reset(self) -> None:
        """Start counting a new step."""
        for counter in (self.load, self.balance_loss, self.z_loss):
            counter.zero_()
