"""Where a run's rows come from."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.run import RunConfig
from ..data.check import open_files
from ..data.heldout import Heldout
from ..data.sampler import Sampler
from ..data.synthetic import Synthetic
from .batch import HeldoutRows, Source

RANDOM = ("random",)
"""``data.files`` that names made-up rows instead of token files."""


@dataclass(frozen=True)
class Opened:
    """Rows to train on and rows to evaluate on."""

    training: Source
    heldout: HeldoutRows
    reference: dict[str, float]
    """Bits per byte of general compressors on all of the held-out text, where they are known and all of it is read."""


def open_source(config: RunConfig) -> Opened:
    """The rows that ``config.data`` names.

    Raises:
        ConfigError: if a token file cannot be read.
    """
    data, seed = config.data, config.train.seed
    if data.files == RANDOM:
        made_up = Synthetic(config.model.vocab_size, data.sequence_length, data.batch_size, seed)
        return Opened(made_up, made_up.heldout, {})
    files = open_files(data)
    sampler = Sampler(files, data.weights, data.sequence_length, data.batch_size, seed)
    heldout = Heldout(files, data.sequence_length, data.eval_rows)
    whole = not data.eval_rows or heldout.n_rows == Heldout(files, data.sequence_length).n_rows
    return Opened(sampler, heldout, files[0].index.reference if whole and len(files) == 1 else {})
