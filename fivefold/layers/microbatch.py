"""One microbatch as one rank holds it: what parts get beside the activation.

Shapes: B sequences of this rank's share, T tokens of a sequence on this rank's place of ``cp``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


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
    cache: dict[str, Any] = field(default_factory=dict)
    """What layers derive once per microbatch and share: masks, rotary tables."""
