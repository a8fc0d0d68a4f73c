"""Small token files whose every token is its own place in the file, so that a row shows where it was read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from fivefold.data.tokenfile import TokenFile
from fivefold.data.writer import TokenFileWriter

Build = Callable[..., TokenFile]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """``build(training_lengths, heldout_lengths=(), name="set", vocab_size=2**30, tokens=None)``."""

    def make(
        lengths: Sequence[int],
        heldout: Sequence[int] = (),
        name: str = "set",
        vocab_size: int = 2**30,
        tokens: np.ndarray | None = None,
    ) -> TokenFile:
        writer = TokenFileWriter(tmp_path / name, vocab_size=vocab_size, tokenizer={"tokenizer.json": "{}"})
        n_training = sum(lengths)
        ids = np.arange(n_training + sum(heldout)) if tokens is None else tokens
        writer.append(ids[:n_training], lengths, 3 * np.array(lengths, np.int64))
        writer.start_heldout()
        writer.append(ids[n_training:], heldout, 3 * np.array(heldout, np.int64))
        writer.finish(text_bytes=3 * len(ids))
        return TokenFile.open(tmp_path / name)

    return make
