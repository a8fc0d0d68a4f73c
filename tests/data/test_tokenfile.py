"""Token files: what is written is read, and damage is found."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from fivefold.config.errors import ConfigError
from fivefold.data import tokenfile
from fivefold.data.tokenfile import CHUNK_BYTES, Index, TokenFile
from fivefold.data.writer import CheckedFile, publish


def test_round_trip(build) -> None:
    file = build([4, 0, 3], [2, 5])
    assert file.tokens.tolist() == list(range(14))
    assert file.starts.tolist() == [0, 4, 4, 7, 9, 14]
    assert file.document_bytes.tolist() == [12, 0, 9, 6, 15]
    assert file.heldout.tolist() == [False, False, False, True, True]
    assert (file.n_tokens, file.n_documents, file.n_training_tokens) == (14, 5, 7)
    assert file.check() == file.check(full=True) == []


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(2, "uint16"), (65535, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_dtype_holds_the_last_id(build, vocab_size: int, dtype: str) -> None:
    last = vocab_size - 1
    file = build([2], [1], vocab_size=vocab_size, tokens=np.array([0, last, last]))
    assert file.tokens.dtype == dtype
    assert file.tokens.tolist() == [0, last, last]
    assert (file.path / "tokens.bin").stat().st_size == 3 * np.dtype(dtype).itemsize


def test_an_id_outside_the_vocabulary_is_refused(build) -> None:
    with pytest.raises(AssertionError):
        build([2], vocab_size=65536, tokens=np.array([0, 65536]))


def test_checksums_do_not_depend_on_the_size_of_writes(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(2 * CHUNK_BYTES + 12345)
    file = CheckedFile(tmp_path / "x")
    at = 0
    for size in (1, CHUNK_BYTES - 1, 5, CHUNK_BYTES + 7, 10**9):
        file.write(data[at : at + size])
        at += size
    assert file.close() == tuple(zlib.crc32(data[i : i + CHUNK_BYTES]) for i in range(0, len(data), CHUNK_BYTES))
    assert (tmp_path / "x").read_bytes() == data


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "bytes.bin", "tokenizer.json"])
def test_one_flipped_bit_is_found(build, name: str) -> None:
    path = build([40, 30], [20]).path
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)
    (problem,) = TokenFile.open(path).check()
    assert f"{path / name} fails its checksum" in problem
    assert "fivefold prepare" in problem


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "bytes.bin"])
def test_truncated_and_missing_files(build, name: str) -> None:
    path = build([40, 30], [20]).path
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[:-1])
    with pytest.raises(ConfigError, match=rf"{name} is truncated \({len(data) - 1} bytes, {len(data)} by index.json\)"):
        TokenFile.open(path)
    (path / name).unlink()
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        TokenFile.open(path)


@pytest.mark.parametrize(
    "change", [("18", "19"), ('"n_tokens"', '"n_tokenz"'), ('{"crc32"', ""), ('"format": 1', '"format": 9')]
)
def test_a_changed_index_is_found(build, change: tuple[str, str]) -> None:
    path = build([9], [9]).path
    text = (path / "index.json").read_text()
    assert change[0] in text
    (path / "index.json").write_text(text.replace(*change))
    with pytest.raises(ConfigError, match=r"index.json is damaged"):
        TokenFile.open(path)


def test_missing_token_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is not a token file"):
        TokenFile.open(tmp_path / "nothing")


def test_large_files_are_checked_in_part_unless_full(build, monkeypatch: pytest.MonkeyPatch) -> None:
    file = build([5 * CHUNK_BYTES // 4])  # five chunks of uint32
    monkeypatch.setattr(tokenfile, "QUICK_CHECK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(tokenfile, "SAMPLED_CHUNKS", 2)
    for place, found_quickly in ((5 * CHUNK_BYTES - 1, True), (CHUNK_BYTES + 5, False)):
        with (file.path / "tokens.bin").open("r+b") as raw:
            raw.seek(place)
            raw.write(b"\xff")
        assert bool(file.check()) == found_quickly
        assert len(file.check(full=True)) == 1
        with (file.path / "tokens.bin").open("r+b") as raw:
            np.arange(5 * CHUNK_BYTES // 4, dtype="<u4").tofile(raw)
    assert file.check(full=True) == []


def test_publish_replaces_a_folder(tmp_path: Path) -> None:
    for text in ("old", "new"):
        (tmp_path / "work").mkdir()
        (tmp_path / "work" / "x").write_text(text)
        publish(tmp_path / "work", tmp_path / "deep" / "target")
    assert (tmp_path / "deep" / "target" / "x").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_index_survives_its_own_text() -> None:
    index = Index(
        dtype="uint16", vocab_size=7, n_documents=1, n_training_documents=1, n_tokens=3, text_bytes=9, source="é\n"
    )
    assert Index.loads(index.dumps()) == index


def test_documents_that_go_back_are_found(build, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build([40, 30], [20]).path
    monkeypatch.setattr(tokenfile, "_first_wrong_chunk", lambda *_: None)  # as if they had been written so
    for starts, what in (
        ([0, 70, 40, 90], "document 2 starts at token 40, before document 1 (token 70)"),
        (
            [0, 40, 70, 60],
            "the last document ends at token 60, before document 2 (token 70)",
        ),
    ):
        np.array(starts, "<i8").tofile(path / "documents.bin")
        (problem,) = TokenFile.open(path).check()
        assert problem.startswith(f"{path / 'documents.bin'} goes back: {what}. ")
