"""``prepare``: from text to a token file, in parallel, resumable, and published whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import shutil
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import count
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..config.errors import ConfigError
from .assemble import assemble
from .encode import Job, Outcome, encode_shard, read_outcome, start_worker
from .hub import cut_stream, open_stream
from .permutation import permute
from .request import Request
from .sources import Shard, cut
from .tokenfile import INDEX, Index, TokenFile
from .tokenizer import TOKENIZER, TOKENIZER_CONFIG, read_folder, train
from .writer import publish, write_synced

COMPARED_BYTES = 64 * 2**20  # held-out text up to here is compressed for comparison: half a minute on one CPU
TEXT_BYTES_PER_TOKEN = 4  # about, to tell how much a stream of so many tokens will hold


def prepare(request: Request, console: Console | None = None) -> Path:
    """Make the token file that ``request`` asks for, or find it already made, and return its folder.

    An interrupted call leaves its finished work in a hidden folder beside the target, and the same call again goes
    on from there.

    Raises:
        ConfigError: if the request cannot be met.
    """
    if problems := request.problems():
        raise ConfigError(problems)
    console = console or Console(stderr=True)
    fingerprint, target = request.fingerprint(), request.target
    with work_folder(target, fingerprint) as work:
        if (target / INDEX).exists() and (done := _made_before(request, fingerprint)):
            console.print(f"{target} is already prepared: {_summary(done)}", highlight=False)
            return target
        job = Job(
            folder=work,
            fingerprint=fingerprint,
            field=request.field,
            heldout=request.heldout,
            split_seed=request.split_seed,
            compare=_estimated_bytes(request) * request.heldout <= COMPARED_BYTES,
        )
        (work / "shards").mkdir(exist_ok=True)
        _provide_tokenizer(request, job, console)
        n_shards = _encode_all(request, job, console)
        with console.status("Writing the token file"):
            index = assemble(request, job, n_shards)
            publish(work / "result", target)
    console.print(f"Wrote {target}: {_summary(index)}", highlight=False)
    return target


@contextlib.contextmanager
def work_folder(target: Path, fingerprint: str) -> Iterator[Path]:
    """The hidden folder of unfinished work, emptied if it is another request's, and removed when all is done.

    Raises:
        ConfigError: if another process is using it.
    """
    folder = target.with_name(f".{target.name}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"out={target} is being prepared by another process. Wait for it, or choose another --out."
            raise ConfigError([message]) from None
        stamp = folder / "fingerprint"
        if not stamp.exists() or stamp.read_text() != fingerprint:
            for child in folder.iterdir():
                if child.is_dir():
                    shutil.rmtree(child)
                elif child.name != "lock":
                    child.unlink()
            write_synced(stamp, fingerprint)
        yield folder
        shutil.rmtree(folder)


def _made_before(request: Request, fingerprint: str) -> Index | None:
    """The index at the target if it came of the same request; None if it is to be replaced."""
    try:
        index = TokenFile.open(request.target).index
    except ConfigError:
        if request.overwrite:
            return None
        raise
    if index.fingerprint == fingerprint:
        return index
    if request.overwrite:
        return None
    shutil.rmtree(request.target.with_name(f".{request.target.name}.partial"))
    raise ConfigError(
        [
            f"out={request.target} already holds a token file of another request, or its sources have changed "
            f"({index.source}). Use --overwrite to replace it, or choose another --out."
        ]
    )


def _estimated_bytes(request: Request) -> float:
    """About how much text the request will read."""
    limit = float("inf") if request.tokens is None else request.tokens * TEXT_BYTES_PER_TOKEN
    return limit if request.hub else min(limit, sum(file.text_bytes for file in request.files))


def _shards(request: Request, finished: list[int] | None = None) -> Iterator[Shard]:
    """The shards of the request; a stream starts after its first ``finished`` ones, given by their records."""
    if request.hub:
        dataset = open_stream(request.sources[0], request.hub_split)
        return cut_stream(dataset, request.field, request.shard_bytes, finished or ())
    return cut(request.files, request.shard_bytes)


def _provide_tokenizer(request: Request, job: Job, console: Console) -> None:
    """Put the tokenizer's files in the work folder, training it first unless one is given or was trained before."""
    if (job.folder / TOKENIZER).exists():
        return
    if request.tokenizer:
        files = read_folder(request.tokenizer)
    else:
        with console.status(f"Training a tokenizer of {request.trained_vocab_size} tokens"):
            files = train(_tokenizer_texts(request, job), request.trained_vocab_size)
    for name in (TOKENIZER_CONFIG, TOKENIZER):  # the last one marks both as there
        if name in files:
            write_synced(job.folder / name, files[name])


def _tokenizer_texts(request: Request, job: Job) -> Iterator[str]:
    """Training documents up to ``tokenizer_bytes``: of shards all over the files, or the first ones of a stream."""
    shards = _shards(request)
    if not request.hub:
        listed = list(shards)
        shards = (listed[i] for i in permute(np.arange(len(listed)), len(listed), request.split_seed))
    left = request.tokenizer_bytes
    for shard in shards:
        for file, place, text in shard.read(request.field):
            if text and not job.is_heldout(file, place):
                text = text.encode("utf-8", "replace")[:left].decode("utf-8", "ignore")
                left -= max(len(text.encode()), 1)
                yield text
            if left <= 0:
                return


def _encode_all(request: Request, job: Job, console: Console) -> int:
    """Encode every shard that no earlier run has finished, and return how many make up the token file."""
    finished = _finished_first(job) if request.hub else []  # files are cheap to pass over, a stream is not
    tally = _Tally(request.tokens)
    for outcome in finished:
        tally.add(outcome)
    if tally.enough:
        return tally.n_shards
    total = request.tokens or (None if request.hub else sum(file.text_bytes for file in request.files))
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress, _pool(request) as pool:
        bar = progress.add_task("Encoding", total=total)
        shards = _shards(request, [outcome.n_read for outcome in finished])
        for outcome in _outcomes(pool, job, shards, request.n_workers + 1):
            tally.add(outcome)
            done = tally.n_tokens if request.tokens else tally.n_bytes
            progress.update(bar, completed=done, description=f"Encoded {tally.n_tokens:,} tokens")
            if tally.enough:
                break
    return tally.n_shards


def _finished_first(job: Job) -> list[Outcome]:
    """The shards an earlier run finished, up to the first it did not."""
    outcomes = []
    for number in count():
        if (outcome := read_outcome(job, number)) is None:
            return outcomes
        outcomes.append(outcome)
    raise AssertionError("counting ends")


@contextlib.contextmanager
def _pool(request: Request) -> Iterator[Executor]:
    """Processes to encode in; when something goes wrong they end at once, and what they had not finished is lost."""
    if request.n_workers == 1:
        with ThreadPoolExecutor(1) as pool:
            yield pool
        return
    # Spawned, not forked: the tokenizer's threads do not survive a fork.
    others = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(request.n_workers, mp_context=spawn, initializer=start_worker)
    try:
        yield pool
    except BrokenProcessPool:
        message = f"workers={request.n_workers} lost one of its processes, perhaps for lack of memory. "
        raise ConfigError([message + "Use fewer workers; finished work is kept."]) from None
    except BaseException:  # a second interrupt while the pool waits for its workers would leave both waiting for ever
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _outcomes(pool: Executor, job: Job, shards: Iterator[Shard], at_once: int) -> Iterator[Outcome]:
    """The outcome of every shard, as they finish, with at most ``at_once`` under way."""
    pending: set[Future[Outcome]] = set()
    for shard in shards:
        if (known := read_outcome(job, shard.number, shard.n_bytes)) is not None:
            yield known
            continue
        pending.add(pool.submit(encode_shard, job, shard))
        if len(pending) >= at_once:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    while pending:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        yield from (future.result() for future in done)


class _Tally:
    """Adds up outcomes in the order of their shards, whatever order they come in."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._waiting: dict[int, Outcome] = {}
        self.n_shards = self.n_tokens = self.n_bytes = 0

    def add(self, outcome: Outcome) -> None:
        """Take one outcome.

        Raises:
            ConfigError: if the shard could not be read.
        """
        if outcome.problems:
            raise ConfigError(outcome.problems)
        self._waiting[outcome.number] = outcome
        while not self.enough and (following := self._waiting.pop(self.n_shards, None)) is not None:
            self.n_shards += 1
            self.n_tokens += following.n_tokens
            self.n_bytes += following.n_bytes

    @property
    def enough(self) -> bool:
        """Whether the limit of tokens is reached."""
        return self._limit is not None and self.n_tokens >= self._limit


def _summary(index: Index) -> str:
    """What a token file holds, in words."""
    heldout = index.n_documents - index.n_training_documents
    per_token = index.text_bytes / max(index.n_tokens, 1)
    lines = [
        f"{index.n_documents:,} documents of {index.source}",
        f"  {index.n_tokens:,} tokens, {index.text_bytes:,} bytes, {per_token:.3f} bytes per token",
        f"  vocabulary {index.vocab_size:,} ({index.dtype}); begin {index.begin_ids}, end {index.end_ids}",
        f"  {heldout:,} documents held out" + ("" if heldout else ": too few documents; raise --heldout to evaluate"),
    ]
    if index.reference:
        values = ", ".join(f"{name} {value:.3f}" for name, value in index.reference.items())
        lines.append(f"  bits per byte of the held-out documents, one by one: {values}")
    return "\n".join(lines)
