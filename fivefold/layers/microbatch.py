"""One microbatch as one rank holds it: what parts get beside the activation.

Shapes: B sequences of this rank's share, T tokens of a sequence on this rank's place of ``cp``, n ranks of ``cp``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Holders:
    """Who holds which columns of a microbatch's rows, and what whole rows are like. On the host."""

    columns: NDArray[np.int64]
    """Columns of each row that each rank holds ``[n, B, T]``, ascending; together all, once each."""
    documents: NDArray[np.int32] | None
    """Number of each column's document in its row ``[B, n*T]``; None where every row is one document."""

    def whole(self) -> Holders:
        """The same rows, held by one."""
        n, rows, width = self.columns.shape
        return Holders(np.broadcast_to(np.arange(n * width), (1, rows, n * width)), self.documents)


@dataclass
class MicroBatch:
    """Tokens with what travels along. Across ``ddp`` and ``fsdp`` ranks hold different rows, across ``cp`` different
    columns; over ``tp`` and ``pp`` everything here is I."""

    tokens: Tensor
    """Token ids ``[B, T]`` int64."""
    targets: Tensor | None
    """The token to predict at each place ``[B, T]`` int64, -100 where none counts; None asks for logits."""
    positions: Tensor
    """Place of each token in its document ``[B, T]`` int64."""
    documents: Tensor | None
    """Number of each token's document in its row ``[B, T]`` int32; None where every row is one document."""
    n_targets: Tensor | int | float
    """Targets that count in the whole global batch: what the loss is divided by."""
    n_sequences: int
    """Sequences of the whole global batch: what the balance loss is divided by."""
    held: Holders | None = None
    """Who holds what of these rows; None where this rank holds all."""
    cache: dict[str, Any] = field(default_factory=dict)
    """What layers derive once per microbatch and share: masks, rotary tables."""

    @cached_property
    def holders(self) -> Holders:
        """``held``, worked out where this rank holds all of the rows."""
        if self.held is not None:
            return self.held
        documents = None if self.documents is None else self.documents.cpu().numpy()
        rows, width = self.tokens.shape
        return Holders(np.broadcast_to(np.arange(width), (1, rows, width)), documents)
