"""Token files: documents as one stream of token ids on disk, memory-mapped, with checksums.

A token file is a folder:

- ``tokens.bin``: every document's tokens, one after another, little-endian uint16 (uint32 above 65,536 ids);
- ``documents.bin``: where each document starts and, last, where the final one ends (int64);
- ``bytes.bin``: UTF-8 bytes that each document's targets stand for (int64);
- ``tokenizer.json`` and ``tokenizer_config.json``, so the folder is a tokenizer folder too;
- ``index.json``: everything else. Written last.

Training documents come first and held-out ones after them, so each split is one contiguous range of tokens.
"""

from __future__ import annotations

import json
import os
import zlib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from ..config.base import Part
from ..config.errors import ConfigError

FORMAT = 1
CHUNK_BYTES = 4 * 2**20  # one checksum each, so that a large file can be checked in parts
QUICK_CHECK_BYTES = 4 * 10**9  # files up to here are always read whole, some seconds from a disk
SAMPLED_CHUNKS = 256  # read from each larger file: 1 GiB
INDEX = "index.json"
TOKENIZER = "tokenizer.json"

Count = Annotated[int, Field(ge=0)]


class Index(Part):
    """What ``index.json`` holds."""

    format: Literal[1] = FORMAT
    """Version of this layout."""
    dtype: Literal["uint16", "uint32"]
    """Type of a token in ``tokens.bin``."""
    vocab_size: Annotated[int, Field(ge=1)]
    """One more than the largest token id."""
    n_documents: Count
    """Documents, held-out ones included."""
    n_training_documents: Count
    """Documents before the first held-out one."""
    n_tokens: Count
    """Tokens, held-out ones and begin and end tokens included."""
    text_bytes: Count
    """UTF-8 bytes of all documents."""
    begin_ids: tuple[int, ...] = ()
    """Tokens put before each document's text."""
    end_ids: tuple[int, ...] = ()
    """Tokens put after each document's text."""
    heldout_fraction: float = 0.0
    """Share of documents held out."""
    split_seed: int = 0
    """Seed of the hash that picked them, by number of source file and place in it."""
    reference: dict[str, float] = {}
    """Bits per byte of general compressors on the held-out documents, one by one."""
    source: str = ""
    """What the documents are, in words."""
    request: dict[str, Any] = {}
    """What was asked of ``fivefold prepare``."""
    fingerprint: str = ""
    """SHA-256 of the request and of the names, sizes and times of what it read."""
    checksums: dict[str, tuple[int, ...]] = {}
    """CRC-32 of every 4 MiB of each file."""

    def dumps(self) -> str:
        """The text of ``index.json``, with a checksum of its own."""
        body = self.model_dump(mode="json")
        return json.dumps({"crc32": _crc_of(body), "index": body}, ensure_ascii=False) + "\n"

    @classmethod
    def loads(cls, text: str) -> Index:
        """The index in the text of an ``index.json``.

        Raises:
            ValueError: if the text is not what ``dumps`` wrote.
        """
        outer = json.loads(text)
        if not isinstance(outer, dict) or not isinstance(outer.get("index"), dict):
            raise ValueError("not an index")
        if outer["index"].get("format") != FORMAT:
            raise ValueError(f"format {outer['index'].get('format')} is not {FORMAT}")
        if outer.get("crc32") != _crc_of(outer["index"]):
            raise ValueError("checksum mismatch")
        return cls.model_validate(outer["index"])


def _crc_of(body: dict[str, Any]) -> int:
    """CRC-32 of a JSON object in one canonical spelling."""
    return zlib.crc32(json.dumps(body, sort_keys=True, ensure_ascii=False).encode())


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smaller type that holds every id below ``vocab_size``."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


class TokenFile:
    """A token file open for reading; arrays are memory-mapped, so opening costs nothing and ranks share the pages."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self.index = index
        self.tokens: NDArray[np.unsignedinteger[Any]] = _map(path / "tokens.bin", index.dtype)
        self.starts: NDArray[np.int64] = _map(path / "documents.bin", "int64")
        self.document_bytes: NDArray[np.int64] = _map(path / "bytes.bin", "int64")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TokenFile:
        """Open the token file in folder ``path``.

        Raises:
            ConfigError: if it is missing, its index is damaged, or a file has the wrong size.
        """
        folder = Path(path)
        if not (folder / INDEX).is_file():
            raise ConfigError([f"{folder} is not a token file (it has no {INDEX}). Make one with `fivefold prepare`."])
        try:
            index = Index.loads((folder / INDEX).read_text(encoding="utf-8"))
        except (ValueError, ValidationError) as error:
            raise ConfigError([f"{folder / INDEX} is damaged ({_first_line(error)}). {_AGAIN}"]) from None
        if problems := _wrong_sizes(folder, index):
            raise ConfigError(problems)
        return cls(folder, index)

    @property
    def n_documents(self) -> int:
        """Documents, held-out ones included."""
        return self.index.n_documents

    @property
    def n_tokens(self) -> int:
        """Tokens, held-out ones included."""
        return self.index.n_tokens

    @property
    def n_training_tokens(self) -> int:
        """Tokens before the first held-out document."""
        return int(self.starts[self.index.n_training_documents])

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return self.index.vocab_size

    @cached_property
    def heldout(self) -> NDArray[np.bool_]:
        """Whether each document is held out."""
        return np.arange(self.n_documents) >= self.index.n_training_documents

    def check(self, full: bool = False) -> list[str]:
        """Compare every file with its checksums, look whether documents stand in order, and return what is wrong.

        Of a file above 4 GB only chunks spread over it are read, unless ``full``.
        """
        problems = _wrong_sizes(self.path, self.index)
        for name, checksums in self.index.checksums.items() if not problems else ():
            large = (self.path / name).stat().st_size > QUICK_CHECK_BYTES
            n_read = SAMPLED_CHUNKS if large and not full else len(checksums)
            chunks = np.unique(np.linspace(0, len(checksums) - 1, n_read).astype(np.int64)) if checksums else []
            if (wrong := _first_wrong_chunk(self.path / name, checksums, chunks)) is not None:
                problems.append(
                    f"{self.path / name} fails its checksum (bytes {wrong * CHUNK_BYTES} and following). {_AGAIN}"
                )
        return problems or self._disorder()

    def _disorder(self) -> list[str]:
        """A document that starts before the one it follows: its tokens would belong to both."""
        back = np.flatnonzero(np.diff(self.starts) < 0)
        if not len(back):
            return []
        i = int(back[0])
        what = f"document {i + 1} starts" if i + 1 < self.n_documents else "the last document ends"
        return [
            f"{self.path / 'documents.bin'} goes back: {what} at token {self.starts[i + 1]}, before document {i} "
            f"(token {self.starts[i]}). Write documents in ascending order. {_AGAIN}"
        ]


_AGAIN = "Prepare it again with `fivefold prepare ... --overwrite`."


def _map(path: Path, dtype: str) -> NDArray[Any]:
    """A binary file as a read-only array on its pages; an empty file cannot be mapped."""
    little_endian = np.dtype(dtype).newbyteorder("<")
    if path.stat().st_size == 0:
        return np.empty(0, little_endian)
    return np.asarray(np.memmap(path, little_endian, mode="r"))


def _wrong_sizes(folder: Path, index: Index) -> list[str]:
    """One message for each file that is missing or not as long as the index says."""
    sizes = {
        "tokens.bin": index.n_tokens * np.dtype(index.dtype).itemsize,
        "documents.bin": (index.n_documents + 1) * 8,
        "bytes.bin": index.n_documents * 8,
    }
    problems = []
    for name in sorted(sizes.keys() | index.checksums.keys()):
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing. {_AGAIN}")
        elif name in sizes and (size := path.stat().st_size) != sizes[name]:
            rule = "is truncated" if size < sizes[name] else "is too long"
            problems.append(f"{path} {rule} ({size} bytes, {sizes[name]} by {INDEX}). {_AGAIN}")
    return problems


def _first_wrong_chunk(path: Path, checksums: tuple[int, ...], chunks: Any) -> int | None:
    """The first of ``chunks`` whose CRC-32 is not the recorded one."""
    with path.open("rb") as file:
        for chunk in map(int, chunks):
            file.seek(chunk * CHUNK_BYTES)
            if zlib.crc32(file.read(CHUNK_BYTES)) != checksums[chunk]:
                return chunk
    return None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
