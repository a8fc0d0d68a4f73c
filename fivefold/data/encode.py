"""Encode one shard of documents into a file, in whatever process."""

from __future__ import annotations

import gzip
import lzma
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import connection
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from ..config.errors import ConfigError
from .permutation import uniform
from .sources import Shard
from .tokenfile import token_dtype
from .tokenizer import DocumentTokenizer, read_folder


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all shards of one preparation have in common."""

    folder: Path
    """Where the tokenizer is and the shards' files go."""
    fingerprint: str
    """Of the request: another one means another tokenizer."""
    field: str
    heldout: float
    split_seed: int
    compare: bool
    """Whether held-out documents are compressed with gzip and xz."""

    def path(self, number: int) -> Path:
        """The file of a shard."""
        return self.folder / "shards" / f"{number:07d}.npz"

    def is_heldout(self, file: int, place: int) -> bool:
        """Whether the document at this place is held out: a hash decides, so shards and workers have no say."""
        return bool(uniform(self.split_seed, file, place)[0] < self.heldout)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a shard."""

    number: int
    n_bytes: int = 0
    """Size of the shard by plan."""
    n_tokens: int = 0
    n_read: int = 0
    """Documents read, skipped ones included."""
    problems: tuple[str, ...] = ()
    """Mistakes of the user's, found while reading."""


@lru_cache(maxsize=1)  # a worker encodes many shards, and a large vocabulary takes a second to load
def _tokenizer(folder: Path, fingerprint: str) -> DocumentTokenizer:
    return DocumentTokenizer(read_folder(folder))


def encode_shard(job: Job, shard: Shard) -> Outcome:
    """Read and encode the documents of a shard and leave them in its file, whole or not at all."""
    try:
        arrays = _encode(job, shard)
    except ConfigError as error:
        return Outcome(number=shard.number, problems=error.problems)
    path = job.path(shard.number)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    temporary.replace(path)
    return _outcome(shard.number, shard.n_bytes, arrays)


def _encode(job: Job, shard: Shard) -> dict[str, np.ndarray]:
    tokenizer = _tokenizer(job.folder, job.fingerprint)
    tokens: list[np.ndarray] = [np.empty(0, token_dtype(tokenizer.vocab_size))]
    documents: list[tuple[int, ...]] = []
    n_read = n_empty = n_not_utf8 = 0
    for file, place, text in shard.read(job.field):
        n_read += 1
        n_not_utf8 += text is None
        n_empty += text == ""
        if not text:
            continue
        data = text.encode("utf-8", "replace")  # JSON can spell half of a surrogate pair, which UTF-8 cannot
        ids, target_bytes = tokenizer.encode(data.decode())
        tokens.append(np.array(ids, tokens[0].dtype))
        heldout = job.is_heldout(file, place)
        sizes = _compressed(data) if heldout and job.compare else (0, 0)
        documents.append((len(ids), len(data), target_bytes, heldout, *sizes))
    columns = np.array(documents, np.int64).reshape(-1, 6).T
    names = ("lengths", "text_bytes", "target_bytes", "heldout", "gzip_bytes", "xz_bytes")
    return {
        "tokens": np.concatenate(tokens),
        **dict(zip(names, columns)),
        "counts": np.array([n_read, n_empty, n_not_utf8]),
    }


def _compressed(data: bytes) -> tuple[int, int]:
    """Bytes of a document after ``gzip -9`` and ``xz -9``."""
    # A dictionary as large as the data finds the same matches as the preset's 64 MiB, without clearing those.
    dictionary = 1 << max(12, (len(data) - 1).bit_length())
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": min(dictionary, 2**26)}]
    return len(gzip.compress(data, 9, mtime=0)), len(lzma.compress(data, filters=filters))


def read_outcome(job: Job, number: int, n_bytes: int = 0) -> Outcome | None:
    """The outcome of a shard an earlier run finished, or None if it has to be encoded."""
    try:
        with np.load(job.path(number), allow_pickle=False) as arrays:
            return _outcome(number, n_bytes, {name: arrays[name] for name in ("lengths", "counts")})
    except (OSError, ValueError, KeyError, BadZipFile):
        return None


def _outcome(number: int, n_bytes: int, arrays: dict[str, np.ndarray]) -> Outcome:
    return Outcome(
        number=number, n_bytes=n_bytes, n_tokens=int(arrays["lengths"].sum()), n_read=int(arrays["counts"][0])
    )


def start_worker() -> None:
    """Set up a worker process: it leaves interrupts to its parent, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)  # a killed parent closes no queue, and the worker would wait on it for ever
