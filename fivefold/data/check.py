"""Find and check the token files of a run before any process starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ..config.errors import ConfigError, nearest
from ..config.parts import DataConfig
from .tokenfile import INDEX, TOKENIZER, TokenFile


def locate(data: DataConfig) -> tuple[Path, ...]:
    """The folder of each token file: a set prepared under ``dir``, or else the path itself."""
    return tuple(
        Path(name)
        if _is_token_file(Path(name)) and not _is_token_file(Path(data.dir) / name)
        else Path(data.dir) / name
        for name in data.files
    )


def open_files(data: DataConfig) -> tuple[TokenFile, ...]:
    """The token files of a run, open.

    Raises:
        ConfigError: as ``TokenFile.open``.
    """
    return tuple(map(TokenFile.open, locate(data)))


def problems(data: DataConfig, vocab_size: int) -> list[str]:
    """Everything about the data that would stop a run of a model with ``vocab_size`` tokens, one message each."""
    found = _bad_weights(data)
    if not data.files:
        found.append("data.files is empty. Set data.files to at least one prepared token file, such as stdlib.")
    n_rows = 0
    complete = bool(data.files)
    tokenizers: dict[tuple[int, ...], str] = {}
    for name, path in zip(data.files, locate(data)):
        if not _is_token_file(path):
            found.append(_missing(name, data))
            complete = False
            continue
        try:
            file = TokenFile.open(path)
        except ConfigError as error:
            found += error.problems
            complete = False
            continue
        rows = max(file.n_training_tokens - 1, 0) // data.sequence_length
        n_rows += rows
        tokenizers.setdefault(file.index.checksums.get(TOKENIZER, ()), name)
        found += _bad_file(name, file, rows, data.sequence_length, vocab_size)
    if len(tokenizers) > 1:
        one, other, *_ = tokenizers.values()
        found.append(
            f"data.files={_listed(data.files)} holds token ids of different tokenizers (those of {one} and {other}). "
            f"Prepare one of them again with the other's: `fivefold prepare ... --tokenizer {Path(data.dir) / one}`."
        )
    if complete and 0 < n_rows < data.batch_size:
        found.append(
            f"data.batch_size={data.batch_size} exceeds the rows of the training data ({n_rows} rows of "
            f"data.sequence_length={data.sequence_length}). Set data.batch_size to at most {n_rows}, shorten "
            "data.sequence_length, or prepare more text."
        )
    return found


def _bad_file(name: str, file: TokenFile, rows: int, sequence_length: int, vocab_size: int) -> list[str]:
    found = file.check()
    if file.vocab_size > vocab_size:
        found.append(
            f"data.files={name} has a vocabulary of {file.vocab_size}, more than the model's "
            f"(model.vocab_size={vocab_size}). Set model.vocab_size to at least {file.vocab_size}, or prepare the data "
            "with a smaller --vocab-size."
        )
    if rows == 0:
        found.append(
            f"data.files={name} has not one row to train on ({file.n_training_tokens} training tokens, "
            f"data.sequence_length={sequence_length}). Set data.sequence_length to at most "
            f"{max(file.n_training_tokens - 1, 1)}, or prepare more text."
        )
    return found


def _bad_weights(data: DataConfig) -> list[str]:
    found = []
    if data.weights and len(data.weights) != len(data.files):
        found.append(
            f"data.weights={_listed(data.weights)} has {len(data.weights)} values for {len(data.files)} files "
            f"(data.files={_listed(data.files)}). Set one weight for each file, or none to go by size."
        )
    if not all(math.isfinite(weight) and weight > 0 for weight in data.weights):
        found.append(f"data.weights={_listed(data.weights)} has a weight that is not positive. Set each above 0.")
    return found


def _missing(name: str, data: DataConfig) -> str:
    """Say that a token file is not there, and how to make it or what it may have meant."""
    prepared = sorted(path.name for path in Path(data.dir).glob("*") if _is_token_file(path))
    command = f"`fivefold prepare {name if name == 'stdlib' else 'SOURCE'} --out {Path(data.dir) / name}`"
    close = nearest(name, prepared)
    hint = f"Did you mean {close}? If not, run {command}." if close else f"Run {command} first."
    return f"data.files={name} is not prepared (data.dir={data.dir} holds {_listed(prepared) or 'nothing'}). {hint}"


def _is_token_file(path: Path) -> bool:
    return (path / INDEX).is_file()


def _listed(values: Sequence[object]) -> str:
    return ",".join(map(str, values))
