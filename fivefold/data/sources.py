"""Text files, JSON Lines and Parquet as documents, cut into shards that workers read on their own."""

from __future__ import annotations

import glob
import gzip
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

from ..config.errors import ConfigError, nearest
from ..config.optional import optional

Kind = Literal["text", "jsonl", "parquet"]

STDLIB = "stdlib"
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
END = 2**62  # past the end of any file
GZIP_RATIO = 4  # bytes of text in a byte of gzip, about: for estimates only


@dataclass(frozen=True)
class SourceFile:
    """One file of documents."""

    path: str
    kind: Kind

    @property
    def text_bytes(self) -> int:
        """About how much text it holds."""
        size = os.path.getsize(self.path)
        return size * GZIP_RATIO if self.path.endswith(".gz") or self.kind == "parquet" else size


class Document(NamedTuple):
    """One document, and where it comes from: the file's number in the request and the place in the file."""

    file: int
    place: int
    text: str | None
    """None if it is not UTF-8."""


class Span(NamedTuple):
    """A stretch of one file: bytes of JSON Lines, row groups of Parquet, or a whole text file."""

    file: int
    source: SourceFile
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What a worker takes at once: spans to read, or the documents themselves."""

    number: int
    n_bytes: int
    spans: tuple[Span, ...] = ()
    documents: tuple[Document, ...] = ()

    def read(self, field: str) -> Iterator[Document]:
        """Its documents, in order; ``field`` holds the text in JSON Lines and Parquet."""
        yield from self.documents
        for span in self.spans:
            yield from READERS[span.source.kind](span, field)


def find_files(source: str, kind: Kind | Literal["auto"]) -> list[SourceFile]:
    """The files a path, folder, pattern or ``stdlib`` stands for, sorted; hidden ones inside a folder are left out.

    Raises:
        ConfigError: if there is none.
    """
    if source == STDLIB:
        paths, kind = _stdlib(), "text"
    elif os.path.isdir(source):
        paths = [path for path in _walk(source, frozenset()) if not os.path.basename(path).startswith(".")]
    elif os.path.isfile(source):
        paths = [source]
    else:
        paths = sorted(path for path in glob.glob(source, recursive=True) if os.path.isfile(path))
    if not paths:
        raise ConfigError(
            [
                f"source={source} names no file. Give a file, a folder, a quoted pattern such as 'texts/**/*.txt', "
                f"{STDLIB}, or hf:NAME."
            ]
        )
    return [SourceFile(path, _kind(path) if kind == "auto" else kind) for path in paths]


def _kind(path: str) -> Kind:
    name = path.lower().removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    return "parquet" if name.endswith(".parquet") else "text"


def _stdlib() -> list[str]:
    """Python's own library without its tests and without installed packages."""
    return [path for path in _walk(sysconfig.get_path("stdlib"), SKIPPED_FOLDERS) if path.endswith(".py")]


def _walk(root: str, skipped: frozenset[str]) -> list[str]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        found += [os.path.join(folder, name) for name in names]
    return sorted(found)


def cut(files: Iterable[SourceFile], shard_bytes: int) -> Iterator[Shard]:
    """Cut files into shards of about ``shard_bytes`` of text, in order."""
    spans: list[Span] = []
    number = size = 0
    for span, n_bytes in _spans(files, shard_bytes):
        if spans and size + n_bytes > shard_bytes:
            yield Shard(number=number, n_bytes=size, spans=tuple(spans))
            number, size, spans = number + 1, 0, []
        spans.append(span)
        size += n_bytes
    if spans:
        yield Shard(number=number, n_bytes=size, spans=tuple(spans))


def _spans(files: Iterable[SourceFile], shard_bytes: int) -> Iterator[tuple[Span, int]]:
    """The smallest stretches that can be read apart, with about how much text each holds."""
    for number, source in enumerate(files):
        if source.kind == "jsonl" and not source.path.endswith(".gz"):
            size = os.path.getsize(source.path)
            for start in range(0, size, shard_bytes):
                stop = min(start + shard_bytes, size)
                yield Span(number, source, start, stop), stop - start
        elif source.kind == "parquet":
            metadata = _parquet(source.path).metadata
            for group in range(metadata.num_row_groups):
                yield Span(number, source, group, group + 1), metadata.row_group(group).total_byte_size
        else:
            yield Span(number, source, 0, END), source.text_bytes


def _open(path: str) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.endswith(".gz") else open(path, "rb")


def _read_text(span: Span, field: str) -> Iterator[Document]:
    """A whole file as one document."""
    with _open(span.source.path) as file:
        data = file.read()
    try:
        yield Document(span.file, 0, data.decode())
    except UnicodeDecodeError:
        yield Document(span.file, 0, None)


def _read_jsonl(span: Span, field: str) -> Iterator[Document]:
    """The documents whose line starts inside the span."""
    with _open(span.source.path) as file:
        if span.start:
            file.seek(span.start - 1)
            file.readline()  # the rest of a line that the span before owns; just its line break if none is cut
        while (place := file.tell()) < span.stop and (line := file.readline()):
            if line.strip():
                yield Document(span.file, place, _field(line, field, f"{span.source.path} at byte {place}"))


def _field(line: bytes, field: str, where: str) -> str | None:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        return None
    except json.JSONDecodeError as error:
        raise ConfigError([f"{where} is not a line of JSON ({error}). Mend or remove it."]) from None
    return text_of(record, field, where)


def text_of(record: Any, field: str, where: str) -> str:
    """The text of one record; null is an empty text.

    Raises:
        ConfigError: if the record has no such field or it holds something else.
    """
    fields = list(record) if isinstance(record, dict) else []
    if field not in fields:
        raise ConfigError([_no_field(field, fields, where)])
    value = record[field]
    if value is None:
        return ""
    if not isinstance(value, str):
        others = [name for name in fields if isinstance(record[name], str)]
        hint = f"Use --field with one of {others}." if others else "Mend or remove it."
        raise ConfigError([f"field={field} is not text ({where} has {type(value).__name__}). {hint}"])
    return value


def _no_field(field: str, fields: list[str], where: str) -> str:
    hint = f", such as {close}" if (close := nearest(field, fields)) else ""
    return f"field={field} is missing ({where}). Use --field with one of {fields}{hint}."


def _parquet(path: str) -> Any:
    """The open Parquet file.

    Raises:
        ConfigError: if pyarrow is not installed or the file is not Parquet.
    """
    try:
        return optional("pyarrow.parquet", extra="parquet").ParquetFile(path)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError([f"source={path} is not a Parquet file ({error}). Give another file or format."]) from None


def _read_parquet(span: Span, field: str) -> Iterator[Document]:
    file = _parquet(span.source.path)
    if field not in file.schema_arrow.names:
        raise ConfigError([_no_field(field, file.schema_arrow.names, span.source.path)])
    for group in range(span.start, span.stop):
        place = group << 32  # of its first row: a row group has far fewer rows than 2^32
        for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=[field]):
            for record in batch.to_pylist():
                yield Document(span.file, place, text_of(record, field, span.source.path))
                place += 1


READERS = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet}


def first_problem(files: Iterable[SourceFile], field: str) -> str | None:
    """What is wrong with the first record of the first file of each kind that has fields."""
    seen: set[str] = set()
    for source in files:
        if source.kind == "text" or source.kind in seen:
            continue
        seen.add(source.kind)
        try:
            for shard in islice(cut([source], END), 1):
                next(shard.read(field), None)
        except (ConfigError, OSError) as error:
            return str(error)
    return None


def describe(source: str, files: list[SourceFile]) -> str:
    """A source in words."""
    if source == STDLIB:
        return f"{len(files)} source files of Python {sysconfig.get_config_var('py_version')}'s standard library"
    if len(files) == 1:
        return Path(source).name
    return f"{len(files)} files of {source}"
