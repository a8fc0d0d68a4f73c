"""The first part: token ids to vectors, the vocabulary split over ``tp``.

Letters: B sequences, T tokens of a sequence, T_tp those of this rank's place of tp, D width.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from ..mesh.collectives import reduce_scatter
from ..mesh.parameter import Init
from ..mesh.run import Run
from ..ops.embedding import embedding
from .base import Layer
from .microbatch import MicroBatch


class Embedding(Layer):
    """A row of ``weight`` per token. Each rank looks up the rows it holds, and the sum over ranks is cut into tokens.

    A vocabulary that ``tp`` does not divide is padded; no token ever reads the padding.

    Source: Shoeybi 2019, arXiv 1909.08053, section 3 (vocabulary-parallel embedding).
    """

    SHARDING = {"weight": ("tp", None)}
    recomputes = False  # there is nothing to keep but token ids
    backward_uses_parameters = False  # only which rows were read
    weight: nn.Parameter

    def __init__(self, run: Run, vocab_size: int, dim: int, init: Init) -> None:
        super().__init__(run)
        self.declare("weight", (vocab_size, dim), init, pad=True, embedding=True)

    def forward(self, x: None, mb: MicroBatch) -> Float[Tensor, "B T_tp D"]:
        if self.tp.size == 1:
            return embedding(mb.tokens, self.weight, self.queue)
        rows = self.weight.shape[0]
        row = mb.tokens - self.tp.rank * rows  # I             [B, T]
        elsewhere = (row < 0) | (row >= rows)
        y = embedding(row.clamp(0, rows - 1), self.weight, self.queue).masked_fill(elsewhere[..., None], 0)  # P
        return reduce_scatter(y, self.tp, dim=1)  # P -> S(1)     [B, T/tp, D]
