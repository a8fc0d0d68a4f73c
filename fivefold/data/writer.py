"""Write a token file so that it is there whole or not at all."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .tokenfile import CHUNK_BYTES, INDEX, Index, token_dtype


class CheckedFile:
    """A file being written, with a CRC-32 of every 4 MiB of it."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._file = path.open("wb")
        self._done: list[int] = []
        self._crc = 0
        self._in_chunk = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``."""
        self._file.write(data)
        view = memoryview(data).cast("B")
        while view:
            part = view[: CHUNK_BYTES - self._in_chunk]
            self._crc = zlib.crc32(part, self._crc)
            self._in_chunk += len(part)
            view = view[len(part) :]
            if self._in_chunk == CHUNK_BYTES:
                self._done.append(self._crc)
                self._crc = self._in_chunk = 0

    def close(self) -> tuple[int, ...]:
        """Bring the file to the disk, close it and return its checksums."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return (*self._done, self._crc) if self._in_chunk else tuple(self._done)


class TokenFileWriter:
    """Builds a token file in ``folder``, which the caller publishes; training documents go in before held-out ones."""

    def __init__(self, folder: Path, *, vocab_size: int, tokenizer: Mapping[str, str]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        self._vocab_size = vocab_size
        self._dtype = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
        names = ("tokens.bin", "documents.bin", "bytes.bin", *tokenizer)
        self._files = {name: CheckedFile(folder / name) for name in names}
        for name, text in tokenizer.items():
            self._files[name].write(text.encode())
        self._files["documents.bin"].write(np.zeros(1, "<i8").tobytes())
        self._n_training_documents: int | None = None
        self.n_documents = 0
        self.n_tokens = 0

    def append(self, tokens: NDArray[Any], lengths: ArrayLike, document_bytes: ArrayLike) -> None:
        """Add documents: their tokens one after another, and each one's number of tokens and of bytes."""
        lengths, document_bytes = np.asarray(lengths, np.int64), np.asarray(document_bytes, np.int64)
        assert len(tokens) == lengths.sum() and len(lengths) == len(document_bytes)
        assert not len(tokens) or int(tokens.max()) < self._vocab_size
        self._files["tokens.bin"].write(np.ascontiguousarray(tokens, self._dtype).tobytes())
        self._files["documents.bin"].write((self.n_tokens + np.cumsum(lengths)).astype("<i8").tobytes())
        self._files["bytes.bin"].write(document_bytes.astype("<i8").tobytes())
        self.n_documents += len(lengths)
        self.n_tokens += len(tokens)

    def start_heldout(self) -> None:
        """From here on documents are held out."""
        self._n_training_documents = self.n_documents

    def finish(self, **fields: Any) -> Index:
        """Write the index, with ``fields`` of ``Index`` that the writer does not know, and sync everything."""
        checksums = {name: file.close() for name, file in self._files.items()}
        training = self.n_documents if self._n_training_documents is None else self._n_training_documents
        index = Index(
            dtype=token_dtype(self._vocab_size),
            vocab_size=self._vocab_size,
            n_documents=self.n_documents,
            n_training_documents=training,
            n_tokens=self.n_tokens,
            checksums=checksums,
            **fields,
        )
        write_synced(self._folder / INDEX, index.dumps())
        sync_folder(self._folder)
        return index


def write_synced(path: Path, text: str) -> None:
    """Write a small file so that ``path`` holds all of it or what it held before, even after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(folder: Path, target: Path) -> None:
    """Rename a finished folder to ``target``; what is there already is moved aside first and deleted last."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(folder.name + ".replaced")
    shutil.rmtree(aside, ignore_errors=True)
    if target.exists():
        target.rename(aside)
    folder.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)
