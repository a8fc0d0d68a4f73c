"""Reading sources: every document once, however the files are cut."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.errors import ConfigError
from fivefold.data.hub import cut_stream
from fivefold.data.sources import Document, SourceFile, cut, find_files, first_problem


def read(files: list[SourceFile], shard_bytes: int, field: str = "text") -> list[Document]:
    shards = list(cut(files, shard_bytes))
    assert [shard.number for shard in shards] == list(range(len(shards)))
    return [document for shard in shards for document in shard.read(field)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=20), max_size=12), st.integers(1, 200), st.sampled_from(["\n", "\n\n", "\r\n"]))
def test_json_lines_are_read_once_wherever_they_are_cut(
    tmp_path_factory, texts, shard_bytes: int, newline: str
) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes(newline.join(json.dumps({"n": 1, "text": text}) for text in texts).encode())
    (file,) = find_files(str(path), "auto")
    whole = read([file], 10**9)
    assert [document.text for document in whole] == texts
    assert read([file], shard_bytes) == whole  # the same places too, so the same held-out documents


def test_parquet_row_groups(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(25)]
    pq.write_table(pa.table({"id": range(25), "body": [*texts[:-1], None]}), tmp_path / "x.parquet", row_group_size=4)
    (file,) = find_files(str(tmp_path / "x.parquet"), "auto")
    assert [document.text for document in read([file], 10**9, "body")] == [*texts[:-1], ""]
    assert len(list(cut([file], 1))) == 7
    assert read([file], 1, "body") == read([file], 10**9, "body")
    with pytest.raises(ConfigError, match=r"field=text is missing .*\['id', 'body'\]"):
        read([file], 1)


def test_folders_patterns_and_suffixes(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "deep/c.py", ".hidden/d.txt", "deep/.e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(b'{"text": "zipped"}\n{"text": "twice"}\n'))
    (tmp_path / "f.txt.gz").write_bytes(gzip.compress(b"plain"))
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    documents = read(find_files(str(tmp_path), "auto"), 10**9)
    assert [document.text for document in documents] == [
        "a.md", "b.txt", None, "deep/c.py", "plain", "zipped", "twice"
    ]  # fmt: skip
    found = find_files(str(tmp_path / "**/*.py"), "auto")
    assert [Path(file.path).name for file in found] == ["c.py"]
    assert [file.kind for file in find_files(str(tmp_path / "b.txt"), "jsonl")] == ["jsonl"]
    with pytest.raises(ConfigError, match=r"source=.*nothing names no file"):
        find_files(str(tmp_path / "nothing"), "auto")


def test_the_standard_library_has_no_tests_in_it() -> None:
    files = find_files("stdlib", "auto")
    names = {Path(file.path).name for file in files}
    assert {"argparse.py", "ast.py", "pathlib.py"} <= names
    assert not [file for file in files if "/test/" in file.path or "/tests/" in file.path or "-packages" in file.path]
    assert all(name.endswith(".py") for name in names)
    assert len(files) > 500


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"txt": "a"}', r"field=text is missing \(.* at byte 0\). Use --field with one of \['txt'\], such as txt."),
        ('{"text": 3}', r"field=text is not text \(.* has int\). Mend or remove it"),
        ('{"text": 3, "body": "a", "n": 1}', r"field=text is not text .* Use --field with one of \['body'\]"),
        ("{", r"at byte 0 is not a line of JSON"),
        ("[1]", r"field=text is missing"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(line + "\n")
    files = find_files(str(tmp_path / "x.jsonl"), "auto")
    with pytest.raises(ConfigError, match=message):
        read(files, 100)
    assert first_problem(files, "text") is not None


def test_a_file_that_is_not_parquet(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("no")
    assert "is not a Parquet file" in str(first_problem(find_files(str(tmp_path), "auto"), "text"))


class Stream(list):
    """What ``datasets`` gives, as far as it is used."""

    def skip(self, n: int) -> Stream:
        return Stream(self[n:])


@given(st.lists(st.text(max_size=9), max_size=20), st.integers(1, 30), st.integers(0, 5))
def test_a_stream_goes_on_where_it_stopped(texts: list[str], shard_bytes: int, n_finished: int) -> None:
    stream = Stream({"text": text} for text in texts)
    whole = list(cut_stream(stream, "text", shard_bytes))
    assert [document.text for shard in whole for document in shard.documents] == texts
    finished = [len(shard.documents) for shard in whole[:n_finished]]
    assert list(cut_stream(stream, "text", shard_bytes, finished)) == whole[n_finished:]
