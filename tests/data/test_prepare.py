"""Preparation: the same file whatever the workers, the cuts and the interruptions."""

from __future__ import annotations

import fcntl
import gzip
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from fivefold.config.errors import ConfigError
from fivefold.data import hub
from fivefold.data import prepare as prepare_module
from fivefold.data.encode import encode_shard
from fivefold.data.prepare import prepare
from fivefold.data.request import Request
from fivefold.data.tokenfile import TokenFile
from fivefold.data.tokenizer import DocumentTokenizer, read_folder

QUIET = Console(quiet=True)
BINARIES = ("tokens.bin", "documents.bin", "bytes.bin", "index.json", "tokenizer.json")


def texts(n: int = 60) -> list[str]:
    """Documents of words, some empty, of very different lengths."""
    words = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "ran", "off", "é", "日本", "42"]
    random = np.random.default_rng(0)
    return [" ".join(random.choice(words, size=int(size))) for size in random.geometric(0.02, size=n) - 1]


def write_jsonl(path: Path, documents: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(path)


def request_for(source: str, out: Path, **options: Any) -> Request:
    defaults = {"vocab_size": 300, "workers": 1, "shard_bytes": 2000, "heldout": 0.2}
    return Request(sources=(source,), out=str(out), **{**defaults, **options})


def documents_of(file: TokenFile) -> tuple[list[str], list[str]]:
    """The texts that are trained on and those held out."""
    tokenizer = DocumentTokenizer(read_folder(file.path))
    decoded = [
        tokenizer.decode(file.tokens[start:stop].tolist()) for start, stop in zip(file.starts[:-1], file.starts[1:])
    ]
    return decoded[: file.index.n_training_documents], decoded[file.index.n_training_documents :]


def same(a: Path, b: Path) -> bool:
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in BINARIES)


def test_every_document_is_there_once(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", texts())
    file = TokenFile.open(prepare(request_for(source, tmp_path / "out"), QUIET))
    training, heldout = documents_of(file)
    kept = [text for text in texts() if text]
    assert len(kept) < 60
    assert sorted(training + heldout) == sorted(kept)
    assert [text for text in kept if text in set(training)] == training  # in order
    assert 4 <= len(heldout) <= 20
    assert file.index.text_bytes == sum(len(text.encode()) for text in kept)
    assert file.document_bytes.tolist() == [len(text.encode()) for text in training + heldout]
    assert (file.tokens[file.starts[:-1]] == file.index.begin_ids[0]).all()
    assert (file.tokens[file.starts[1:] - 1] == file.index.end_ids[0]).all()
    assert (file.tokens == file.index.begin_ids[0]).sum() == file.n_documents
    assert file.check(full=True) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "x.jsonl"]


def test_the_reference_is_gzip_and_xz_of_each_heldout_document(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", texts())
    file = TokenFile.open(prepare(request_for(source, tmp_path / "out"), QUIET))
    heldout = [text.encode() for text in documents_of(file)[1]]
    n_bytes = sum(map(len, heldout))
    assert file.index.reference == {
        "gzip -9": 8 * sum(len(gzip.compress(text, 9)) for text in heldout) / n_bytes,
        "xz -9": 8 * sum(len(lzma.compress(text, preset=9)) for text in heldout) / n_bytes,
    }


def test_workers_and_shards_do_not_matter(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", texts())
    one, three = (prepare(request_for(source, tmp_path / str(n), workers=n), QUIET) for n in (1, 3))
    assert same(one, three)
    other = TokenFile.open(prepare(request_for(source, tmp_path / "other", shard_bytes=700), QUIET))
    assert documents_of(other) == documents_of(TokenFile.open(one))


def test_the_split_follows_its_seed(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", texts())
    splits = [
        documents_of(TokenFile.open(prepare(request_for(source, tmp_path / str(seed), split_seed=seed), QUIET)))[1]
        for seed in (0, 1)
    ]
    assert splits[0] != splits[1]


def test_parquet_text_files_and_a_stream_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [text for text in texts() if text]
    pq.write_table(pa.table({"text": kept}), tmp_path / "x.parquet", row_group_size=7)
    (tmp_path / "folder").mkdir()
    for i, text in enumerate(kept):
        (tmp_path / "folder" / f"{i:03d}.txt").write_text(text)
    monkeypatch.setattr(hub, "optional", lambda name, extra: FakeDatasets(kept))
    monkeypatch.setattr("fivefold.data.request.optional", lambda name, extra: None)
    sources = [str(tmp_path / "x.parquet"), str(tmp_path / "folder"), "hf:owner/set:config"]
    files = [
        TokenFile.open(prepare(request_for(source, tmp_path / f"out{i}", heldout=0.0), QUIET))
        for i, source in enumerate(sources)
    ]
    assert [documents_of(file)[0] for file in files] == [kept] * 3


class FakeDatasets:
    """Stands in for the library: a stream of records that counts what is read of it."""

    def __init__(self, kept: list[str]) -> None:
        self.records = [{"text": text} for text in kept]
        self.n_read = 0

    def load_dataset(self, name: str, config: str | None, *, split: str, streaming: bool) -> FakeDatasets:
        assert (name, config, split, streaming) == ("owner/set", "config", "train", True)
        return self

    def skip(self, n: int) -> FakeDatasets:
        rest = FakeDatasets([])
        rest.records = self.records[n:]
        return rest

    def __iter__(self):
        for record in self.records:
            self.n_read += 1
            yield record


def test_a_stream_ends_at_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = FakeDatasets(texts(400))
    monkeypatch.setattr(hub, "optional", lambda name, extra: datasets)
    monkeypatch.setattr("fivefold.data.request.optional", lambda name, extra: None)
    options = {"tokens": 3000, "tokenizer_bytes": 1000}
    file = TokenFile.open(prepare(request_for("hf:owner/set:config", tmp_path / "out", **options), QUIET))
    assert datasets.n_read < 150
    lengths = np.diff(file.starts)
    assert 3000 <= file.n_tokens < 3000 + lengths.max()
    training, heldout = documents_of(file)
    first = [text for text in texts(400) if text][: file.n_documents]
    assert sorted(training + heldout) == sorted(first)


def test_a_broken_stream_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.data.request.optional", lambda name, extra: None)
    request = request_for("hf:owner/set:config", tmp_path / "out", tokenizer_bytes=1000)
    broken, whole = FakeDatasets(texts(150)), FakeDatasets(texts(400))
    broken.records = [*whole.records[:150], {}]  # a record without text ends the first run
    monkeypatch.setattr(hub, "optional", lambda name, extra: broken)
    with pytest.raises(ConfigError, match="record 150"):
        prepare(request, QUIET)
    assert broken.n_read > 150
    monkeypatch.setattr(hub, "optional", lambda name, extra: whole)
    resumed = prepare(request, QUIET)
    assert whole.n_read == 0  # only what follows the finished shards was read
    assert same(resumed, prepare(replace(request, out=str(tmp_path / "fresh")), QUIET))


def test_real_datasets_library(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the optional library datasets is not installed")
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", texts())
    file = TokenFile.open(prepare(request_for(f"hf:{tmp_path / 'set'}", tmp_path / "out", heldout=0.0), QUIET))
    assert documents_of(file)[0] == [text for text in texts() if text]
    with pytest.raises(ConfigError, match=r"source=hf:.*nothing cannot be opened"):
        prepare(request_for(f"hf:{tmp_path / 'nothing'}", tmp_path / "none"), QUIET)


def test_without_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'fivefold\[datasets\]'"):
        prepare(request_for("hf:x", tmp_path / "out"), QUIET)


def test_tokens_limit_files_too(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", texts())
    one, two = (prepare(request_for(source, tmp_path / str(n), tokens=2000, workers=n), QUIET) for n in (1, 2))
    assert same(one, two)
    file = TokenFile.open(one)
    assert 2000 <= file.n_tokens < 2000 + np.diff(file.starts).max()


# A shell that runs tests in the background lets them ignore SIGINT, and a child inherits that.
CHILD = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from rich.console import Console
from fivefold.data.prepare import prepare
from fivefold.data.request import Request
prepare(Request(**{options!r}), Console(quiet=True))
"""


@pytest.mark.parametrize(
    ("workers", "signals"),
    [(1, [signal.SIGKILL]), (2, [signal.SIGKILL]), (2, [signal.SIGINT, signal.SIGINT])],
    ids=["killed alone", "killed with workers", "interrupted twice"],
)
def test_a_stopped_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, signals: list[signal.Signals]
) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", texts(300) * 4)
    request = request_for(source, tmp_path / "out", tokenizer_bytes=10_000, workers=workers)
    options = {"sources": (source,), "out": request.out, "vocab_size": 300, "workers": workers, "shard_bytes": 2000}
    options |= {"heldout": 0.2, "tokenizer_bytes": 10_000}
    with subprocess.Popen([sys.executable, "-c", CHILD.format(options=options)], stderr=subprocess.DEVNULL) as process:
        shards = tmp_path / ".out.partial" / "shards"
        deadline = time.monotonic() + 60
        while not (shards.exists() and len(list(shards.glob("*.npz"))) >= 5):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for number in signals:
            process.send_signal(number)
            time.sleep(0.02)
        process.wait(timeout=20)
    wait_for_end(children)
    assert not (tmp_path / "out").exists()
    finished = {int(path.stem) for path in shards.glob("*.npz")}

    encoded = []

    def spy(job, shard):
        encoded.append(shard.number)
        return encode_shard(job, shard)

    monkeypatch.setattr(prepare_module, "encode_shard", spy)
    monkeypatch.setattr(prepare_module, "train", None)  # the tokenizer is there: training again would fail
    resumed = prepare(replace(request, workers=1), QUIET)
    monkeypatch.undo()
    assert encoded
    assert not finished & set(encoded)
    assert not (tmp_path / ".out.partial").exists()
    assert same(resumed, prepare(replace(request, out=str(tmp_path / "fresh")), QUIET))


def wait_for_end(pids: list[str]) -> None:
    """Workers end with their parent, even when it is killed."""
    deadline = time.monotonic() + 20
    while running := [pid for pid in pids if _is_running(pid)]:
        assert time.monotonic() < deadline, f"processes {running} outlived their parent"
        time.sleep(0.01)


def _is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_changed_request_starts_afresh(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", texts())
    request = request_for(source, tmp_path / "out")
    with prepare_module.work_folder(request.target, "another") as work:
        (work / "shards").mkdir()
        (work / "shards" / "0000000.npz").write_bytes(b"stale")
        (work / "tokenizer.json").write_text("stale")
        lock_free = work.with_name("kept")
        work.rename(lock_free)  # as if the run had been killed here
        work.mkdir()
    lock_free.rename(tmp_path / ".out.partial")
    assert same(prepare(request, QUIET), prepare(replace(request, out=str(tmp_path / "fresh")), QUIET))


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", texts())
    (tmp_path / ".out.partial").mkdir()
    with (tmp_path / ".out.partial" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is being prepared by another process"):
            prepare(request_for(source, tmp_path / "out"), QUIET)


def test_prepared_again(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", texts())
    request = request_for(source, tmp_path / "out")
    stamp = (prepare(request, QUIET) / "index.json").stat().st_mtime_ns
    console = Console(record=True, file=open(os.devnull, "w"), width=200)  # noqa: SIM115
    assert (prepare(replace(request, workers=2), console) / "index.json").stat().st_mtime_ns == stamp
    assert "is already prepared" in console.export_text()
    changed = replace(request, vocab_size=290)
    with pytest.raises(ConfigError, match=r"out=.* already holds a token file of another request.*--overwrite"):
        prepare(changed, QUIET)
    assert TokenFile.open(prepare(replace(changed, overwrite=True), QUIET)).vocab_size == 290
    write_jsonl(tmp_path / "x.jsonl", texts(61))  # the source has changed
    with pytest.raises(ConfigError, match="or its sources have changed"):
        prepare(changed, QUIET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "x.jsonl"]


def test_a_damaged_token_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    request = request_for(write_jsonl(tmp_path / "x.jsonl", texts()), tmp_path / "out")
    (prepare(request, QUIET) / "tokens.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="is truncated"):
        prepare(request, QUIET)
    assert TokenFile.open(prepare(replace(request, overwrite=True), QUIET)).check() == []


def test_a_prepared_folder_is_a_tokenizer_folder(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", texts())
    first = TokenFile.open(prepare(request_for(source, tmp_path / "a"), QUIET))
    again = request_for(source, tmp_path / "b", tokenizer=str(tmp_path / "a"), vocab_size=None)
    second = TokenFile.open(prepare(again, QUIET))
    assert np.array_equal(first.tokens, second.tokens)
    assert (second.index.begin_ids, second.index.end_ids) == ((0,), (1,))


def test_a_bad_line_deep_in_a_file_stops_the_run(tmp_path: Path) -> None:
    source = Path(write_jsonl(tmp_path / "x.jsonl", texts()))
    source.write_text(source.read_text() + '{"body": "x"}\n')
    for workers in (1, 2):
        with pytest.raises(ConfigError, match=r"field=text is missing \(.*x.jsonl at byte \d+\)") as caught:
            prepare(request_for(str(source), tmp_path / "out", workers=workers, tokenizer_bytes=500), QUIET)
        assert len(caught.value.problems) == 1


def test_the_standard_library(tmp_path: Path) -> None:
    small = {"tokens": 100_000, "tokenizer_bytes": 300_000, "shard_bytes": 400_000}
    request = Request(sources=("stdlib",), out=str(tmp_path / "out"), workers=1, **small)
    console = Console(record=True, file=open(os.devnull, "w"), width=200)  # noqa: SIM115
    file = TokenFile.open(prepare(request, console))
    assert file.vocab_size == 4096
    assert file.tokens.dtype == np.uint16
    assert file.n_tokens >= 100_000
    assert 2.5 < file.index.text_bytes / file.n_tokens < 5
    summary = console.export_text()
    assert f"{file.n_tokens:,} tokens" in summary
    assert "standard library" in summary
    assert str(tmp_path / "out") in summary


def test_files_that_are_not_utf8_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "good.txt").write_text("good " * 50)
    (tmp_path / "in" / "bad.txt").write_bytes(b"\xff\xff")
    file = TokenFile.open(prepare(request_for(str(tmp_path / "in"), tmp_path / "out", heldout=0.0), QUIET))
    assert file.n_documents == 1
    assert "1 that are not UTF-8 left out" in file.index.source


def test_half_a_surrogate_pair(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a\\ud800b"}\n')
    request = request_for(str(tmp_path / "x.jsonl"), tmp_path / "out", heldout=0.0)
    assert documents_of(TokenFile.open(prepare(request, QUIET)))[0] == ["a?b"]


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"vocab_size": 257}, [r"vocab_size=257 is out of range. Set vocab_size in \[258,"]),
        (
            {"heldout": 1.0, "tokens": 0, "workers": -1},
            [r"heldout=1.0 is not a share", r"tokens=0 is not positive", r"workers=-1 is not positive"],
        ),
        ({"split_seed": -1}, [r"split_seed=-1 is negative"]),
        ({"sources": ()}, [r"sources is empty"]),
        ({"sources": ("/no/such/*.txt",)}, [r"source=/no/such/\*.txt names no file"]),
        ({"sources": ("stdlib", "hf:x")}, [r"mixes a Hugging Face dataset|datasets is not installed"]),
        ({"field": "body"}, [r"field=body is missing"]),
        ({"tokenizer": "/no/such"}, [r"tokenizer=/no/such has no tokenizer.json", r"vocab_size=300 cannot be chosen"]),
    ],
)
def test_bad_requests_are_refused_at_once(tmp_path: Path, options: dict[str, Any], messages: list[str]) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", texts())
    request = replace(request_for(source, tmp_path / "out"), **options)
    with pytest.raises(ConfigError) as caught:
        prepare(request, QUIET)
    assert len(caught.value.problems) == len(messages)
    for message in messages:
        assert any(re.search(message, problem) for problem in caught.value.problems)
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", texts())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="holds something that is not a token file"):
        prepare(request_for(source, tmp_path / "out", overwrite=True), QUIET)


def test_nothing_left_to_train_on(tmp_path: Path) -> None:
    request = request_for(str(tmp_path / "x.txt"), tmp_path / "out")
    for content, message in (
        (b"", r"hold no text \(every document is empty\)"),
        (b"caf\xe9", r"hold no text \(1 documents are not UTF-8\)"),
        (b"text", r"heldout=0.999999 leaves no document to train on"),
    ):
        (tmp_path / "x.txt").write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            prepare(replace(request, heldout=0.999999), QUIET)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("stdlib", "stdlib"),
        ("hf:owner/fine-web:sample-10BT", "fine-web-sample-10BT"),
        ("texts/book.txt", "book"),
        ("texts/**/*.txt", "texts"),
        ("c4.00.jsonl.gz", "c4.00"),
        ("*.txt", "text"),
    ],
)
def test_default_folder(source: str, name: str) -> None:
    assert Request(sources=(source,)).target == Path("data") / name
