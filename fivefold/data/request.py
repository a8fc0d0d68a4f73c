"""What to prepare: every option, checked before anything is done."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..config.errors import ConfigError
from ..config.optional import optional
from .hub import PREFIX
from .sources import STDLIB, SourceFile, describe, find_files, first_problem
from .tokenfile import FORMAT, INDEX
from .tokenizer import SMALLEST_VOCABULARY, DocumentTokenizer, read_folder

STDLIB_VOCAB_SIZE = 4096
VOCAB_SIZE = 32768
LARGEST_VOCABULARY = 2**32


@dataclass(frozen=True, kw_only=True)
class Request:
    """One token file to make."""

    sources: tuple[str, ...]
    """Files, folders, patterns, ``stdlib`` (Python's own source code), or one ``hf:NAME[:CONFIG]``."""
    out: str = ""
    """Folder of the token file; ``data/`` and the source's name unless given."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """What files hold; auto goes by their suffix. ``.gz`` may follow the suffix of text and JSON Lines."""
    field: str = "text"
    """Field of JSON Lines, Parquet or the dataset that holds the text."""
    hub_split: str = "train"
    """Split of a Hugging Face dataset."""
    tokenizer: str = ""
    """Folder with ``tokenizer.json`` (and ``tokenizer_config.json``); one is trained unless given."""
    vocab_size: int | None = None
    """Vocabulary of the trained tokenizer: 4,096 for ``stdlib``, else 32,768, unless given."""
    tokenizer_bytes: int = 256 * 2**20
    """Text that the tokenizer is trained on at most, in bytes."""
    tokens: int | None = None
    """Stop with the document that reaches so many tokens; all of the source unless given."""
    heldout: float = 0.02
    """Share of documents held out for evaluation."""
    split_seed: int = 0
    """Seed of the choice of held-out documents."""
    workers: int | None = None
    """Processes; one for each CPU unless given. The result is the same for any number."""
    shard_bytes: int = 4 * 2**20
    """Text that a worker takes at once, in bytes; an interrupted run loses what was being worked on."""
    overwrite: bool = False
    """Whether a token file of another request may be replaced."""

    @property
    def target(self) -> Path:
        """Folder of the token file."""
        return Path(self.out) if self.out else Path("data") / _name(self.sources[0])

    @property
    def hub(self) -> bool:
        """Whether the source is a Hugging Face dataset."""
        return any(source.startswith(PREFIX) for source in self.sources)

    @property
    def n_workers(self) -> int:
        """Processes to use."""
        return self.workers or len(os.sched_getaffinity(0))

    @property
    def trained_vocab_size(self) -> int:
        """Vocabulary of a tokenizer that is trained."""
        return self.vocab_size or (STDLIB_VOCAB_SIZE if self.sources == (STDLIB,) else VOCAB_SIZE)

    @cached_property
    def files(self) -> tuple[SourceFile, ...]:
        """Every file to read, each once, in the order of the sources.

        Raises:
            ConfigError: if a source names none.
        """
        if self.hub:
            return ()
        return tuple(dict.fromkeys(file for source in self.sources for file in find_files(source, self.format)))

    def describe(self) -> str:
        """The sources in words."""
        if self.hub:
            return self.sources[0]
        return ", ".join(describe(source, find_files(source, self.format)) for source in self.sources)

    def fingerprint(self) -> str:
        """SHA-256 of everything the result depends on: options, names, sizes and times of files, the tokenizer."""
        seen = {
            "format": FORMAT,
            "request": self.as_json(),
            "files": [(file.path, (stat := os.stat(file.path)).st_size, stat.st_mtime_ns) for file in self.files],
            "tokenizer": read_folder(self.tokenizer) if self.tokenizer else {},
        }
        return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """The options that decide the result."""
        options = asdict(self)
        for name in ("out", "workers", "overwrite"):
            del options[name]
        options["vocab_size"] = None if self.tokenizer else self.trained_vocab_size
        return options

    def problems(self) -> list[str]:
        """Everything that is wrong with the request, one message each."""
        found = [*_bad_numbers(self), *self._bad_target()]
        found += self._bad_sources()
        if self.tokenizer:
            try:
                DocumentTokenizer(read_folder(self.tokenizer))
            except ConfigError as error:
                found += error.problems
            if self.vocab_size is not None:
                found.append(
                    f"vocab_size={self.vocab_size} cannot be chosen for a tokenizer that is given "
                    f"(tokenizer={self.tokenizer}). Leave out one of the two."
                )
        return found

    def _bad_sources(self) -> list[str]:
        if not self.sources:
            return [f"sources is empty. Give files, folders, patterns, {STDLIB}, or hf:NAME."]
        try:
            if self.hub:
                optional("datasets", extra="datasets")
            elif problem := first_problem(self.files, self.field):
                return [problem]
        except ConfigError as error:
            return list(error.problems)
        if self.hub and len(self.sources) > 1:
            return [f"sources={' '.join(self.sources)} mixes a Hugging Face dataset with others. Prepare each alone."]
        return []

    def _bad_target(self) -> list[str]:
        if not self.sources:
            return []
        if self.target.exists() and not (self.target / INDEX).is_file() and not _is_empty_folder(self.target):
            return [f"out={self.target} holds something that is not a token file. Choose another --out."]
        return []


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _bad_numbers(request: Request) -> list[str]:
    found = []
    for name in ("tokens", "workers", "tokenizer_bytes", "shard_bytes"):
        value = getattr(request, name)
        if value is not None and value < 1:
            found.append(f"{name}={value} is not positive. Set {name} to at least 1.")
    if not 0 <= request.heldout < 1:
        found.append(f"heldout={request.heldout} is not a share. Set heldout in [0, 1), such as 0.02.")
    if request.split_seed < 0:
        found.append(f"split_seed={request.split_seed} is negative. Set split_seed to at least 0.")
    size = request.vocab_size
    if size is not None and not SMALLEST_VOCABULARY <= size <= LARGEST_VOCABULARY:
        found.append(
            f"vocab_size={size} is out of range. Set vocab_size in [{SMALLEST_VOCABULARY}, {LARGEST_VOCABULARY}]: "
            "256 bytes and the begin and end tokens are always there."
        )
    return found


def _name(source: str) -> str:
    """A folder name for a source: the last part of its path without wildcards and suffixes."""
    parts = [part for part in source.removeprefix(PREFIX).split("/") if part and not set(part) & set("*?[")]
    stem = parts[-1] if parts else "text"
    stem = re.sub(r"\.(txt|md|jsonl|ndjson|json|parquet|gz)\b", "", stem)
    return re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "text"
