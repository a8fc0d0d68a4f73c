"""Adam and AdamW over the rows a rank stores, and the learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..config.parts import OptimConfig
from ..wrap.buffer import Shard


def build_optimizer(shards: Sequence[Shard], config: OptimConfig) -> torch.optim.Optimizer | None:
    """The optimizer of this rank's rows in two groups, with and without decay; None where a rank stores nothing.

    Norms and biases have no decay; embedding and head have it if ``decay_embeddings``.
    """

    def decays(s: Shard) -> bool:
        return s.spec.decay and (config.decay_embeddings or not s.spec.embedding)

    trainable = [s for s in shards if s.value.requires_grad]
    groups = [
        {"params": [s.value for s in trainable if decays(s) == decayed], "weight_decay": weight_decay}
        for decayed, weight_decay in ((True, config.weight_decay), (False, 0.0))
    ]
    groups = [g for g in groups if g["params"]]
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[config.name]
    flags = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}[config.implementation]
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, **flags) if groups else None


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The rate of ``step``, counted from 1, of ``steps``: warm-up, stable, decay.

    Step 1 has ``lr/warmup_steps``, step ``warmup_steps`` the peak, and the last step the floor.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    length = steps - config.warmup_steps if config.decay_steps is None else config.decay_steps
    if config.decay == "none" or length == 0:
        return config.lr
    part = min(1.0, max(0.0, (step - (steps - length)) / length))
    shape = {
        "linear": 1 - part,
        "cosine": (1 + math.cos(math.pi * part)) / 2,
        "1-sqrt": 1 - math.sqrt(part),
    }[config.decay]
    return config.lr * (config.floor + (1 - config.floor) * shape)
