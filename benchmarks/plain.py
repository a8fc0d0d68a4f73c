"""The plain training loop: one process, a model, fused AdamW, clipping, and nothing else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .plain_dsv3 import Deepseek
from .plain_llama import Llama
from .work import BETAS, IDS, LENGTH, LR, MAX_NORM, ROWS, WEIGHT_DECAY

MODELS = {"llama": Llama, "dsv3": Deepseek}


class PlainLoop:
    """One of the two models with its optimizer; ``step`` is one step, data included.

    Args:
        microbatches: into how many a step's rows are cut; their gradients add up.
    """

    def __init__(self, name: str, microbatches: int = 1) -> None:
        torch.manual_seed(0)
        self._microbatches = microbatches
        self.model = MODELS[name](LENGTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY,
                                           fused=True)  # fmt: skip
        self._random = torch.Generator().manual_seed(1)

    def loss(self, ids: Tensor) -> Tensor:
        """Mean cross-entropy of the next token; ids ``[B, T+1]``."""
        return F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())

    def step(self) -> float:
        """One optimizer step on random tokens; the loss."""
        ids = torch.randint(0, IDS, (ROWS, LENGTH + 1), generator=self._random)
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for rows in ids.chunk(self._microbatches):
            loss = self.loss(rows) / self._microbatches
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM, foreach=True)
        self.model.after_step()
        self.optimizer.step()
        return total.item()
