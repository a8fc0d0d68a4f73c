"""A Hugging Face dataset as a stream of shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..config.errors import ConfigError
from ..config.optional import optional
from .sources import Document, Shard, text_of

PREFIX = "hf:"


def open_stream(source: str, split: str) -> Any:
    """The dataset of ``hf:NAME[:CONFIG]``, streamed.

    Raises:
        ConfigError: if ``datasets`` is not installed or it cannot open the dataset.
    """
    name, _, config = source.removeprefix(PREFIX).partition(":")
    datasets = optional("datasets", extra="datasets")
    try:
        return datasets.load_dataset(name, config or None, split=split, streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        message = f"source={source} cannot be opened (split={split}; {reason[0]}). Check its name, config and split."
        raise ConfigError([message]) from None


def cut_stream(dataset: Any, field: str, shard_bytes: int, finished: Sequence[int] = ()) -> Iterator[Shard]:
    """Cut a stream into shards of about ``shard_bytes`` of text.

    ``finished`` holds how many records the first shards took when they were made; those records are skipped. A
    record's place is its number in the stream.
    """
    place, number, size = sum(finished), len(finished), 0
    documents: list[Document] = []
    for record in dataset.skip(place) if place else dataset:
        text = text_of(record, field, f"record {place}")
        documents.append(Document(0, place, text))
        place += 1
        size += len(text)
        if size >= shard_bytes:
            yield Shard(number=number, n_bytes=size, documents=tuple(documents))
            number, size, documents = number + 1, 0, []
    if documents:
        yield Shard(number=number, n_bytes=size, documents=tuple(documents))
