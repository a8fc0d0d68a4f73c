"""Put finished shards together into one token file: training documents first, then held-out ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..config.errors import ConfigError
from .encode import Job
from .request import Request
from .tokenfile import Index
from .tokenizer import DocumentTokenizer, read_folder
from .writer import TokenFileWriter


def assemble(request: Request, job: Job, n_shards: int) -> Index:
    """Write the token file to ``result`` in the work folder.

    Raises:
        ConfigError: if no document is left to train on.
    """
    files = read_folder(job.folder)
    tokenizer = DocumentTokenizer(files)
    totals = np.zeros(5, np.int64)  # text, held-out text, gzip and xz bytes; documents that are not UTF-8
    writer = TokenFileWriter(job.folder / "result", vocab_size=tokenizer.vocab_size, tokenizer=files)
    for part in _parts(job, n_shards, request.tokens):
        _append(writer, part, heldout=False)
        held = part["heldout"] == 1
        compressed = part["gzip_bytes"].sum(), part["xz_bytes"].sum()
        text = part["text_bytes"]
        totals += np.array([text.sum(), text[held].sum(), *compressed, part["counts"][2]])
    if not writer.n_documents:
        raise ConfigError([_nothing_left(request, any_text=bool(totals[0]), n_not_utf8=int(totals[4]))])
    writer.start_heldout()
    for part in _parts(job, n_shards, request.tokens):
        _append(writer, part, heldout=True)
    text_bytes, heldout_bytes, gzip_bytes, xz_bytes, n_not_utf8 = map(int, totals)
    reference = {"gzip -9": 8 * gzip_bytes / heldout_bytes, "xz -9": 8 * xz_bytes / heldout_bytes} if gzip_bytes else {}
    skipped = f" ({n_not_utf8} that are not UTF-8 left out)" if n_not_utf8 else ""
    return writer.finish(
        text_bytes=text_bytes,
        begin_ids=tokenizer.begin_ids,
        end_ids=tokenizer.end_ids,
        heldout_fraction=request.heldout,
        split_seed=request.split_seed,
        reference=reference,
        source=request.describe() + skipped,
        request=request.as_json(),
        fingerprint=job.fingerprint,
    )


def _nothing_left(request: Request, *, any_text: bool, n_not_utf8: int) -> str:
    """Why there is no document to train on."""
    if any_text:
        return f"heldout={request.heldout} leaves no document to train on. Give more documents, or use --heldout 0."
    why = f"{n_not_utf8} documents are not UTF-8" if n_not_utf8 else "every document is empty"
    return f"sources={' '.join(request.sources)} hold no text ({why}). Give text in UTF-8."


def _parts(job: Job, n_shards: int, limit: int | None) -> Iterator[dict[str, np.ndarray]]:
    """Each shard's arrays, up to the document that reaches ``limit`` tokens."""
    left = limit
    for number in range(n_shards):
        part = _load(job.path(number))
        lengths = part["lengths"]
        if left is not None:
            n_kept = int(np.searchsorted(np.cumsum(lengths), left, side="left")) + 1
            left -= int(lengths.sum())
            part = {name: array if name in ("tokens", "counts") else array[:n_kept] for name, array in part.items()}
            part["tokens"] = part["tokens"][: part["lengths"].sum()]
        yield part


def _load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _append(writer: TokenFileWriter, part: dict[str, np.ndarray], heldout: bool) -> None:
    """Write the documents of one side of the split."""
    chosen = part["heldout"] == heldout
    tokens = part["tokens"][np.repeat(chosen, part["lengths"])]
    writer.append(tokens, part["lengths"][chosen], part["target_bytes"][chosen])
