"""Tokenizers: exact, and begin and end tokens as the configuration says, never doubled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from fivefold.config.errors import ConfigError
from fivefold.data.tokenizer import SMALLEST_VOCABULARY, DocumentTokenizer, read_folder, train

TRAINED = train(["the cat sat on the mat, and the dog sat on the cat"] * 20, 280)
BEGIN, END = 0, 1


def folder_files(template: str | None, config: dict[str, Any] | None) -> dict[str, str]:
    """A tokenizer folder with a post-processor and a configuration of choice."""
    tokenizer = Tokenizer.from_str(TRAINED["tokenizer.json"])
    if template is not None:
        names = [("<|begin|>", BEGIN), ("<|end|>", END)]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=names)
    files = {"tokenizer.json": tokenizer.to_str()}
    return files if config is None else {**files, "tokenizer_config.json": json.dumps(config)}


@given(st.text())
def test_a_trained_tokenizer_gives_back_every_text(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    tokenizer = DocumentTokenizer(TRAINED)
    ids, n_bytes = tokenizer.encode(text)
    assert (ids[0], ids[-1]) == (BEGIN, END)
    assert not {BEGIN, END} & set(ids[1:-1])
    assert tokenizer.decode(ids) == text
    assert n_bytes == len(text.encode())


def test_training_is_deterministic_and_compresses() -> None:
    assert train(["the cat sat on the mat, and the dog sat on the cat"] * 20, 280) == TRAINED
    tokenizer = DocumentTokenizer(TRAINED)
    assert tokenizer.vocab_size == 276  # this text has no more pairs to merge
    assert len(tokenizer.encode("the cat sat on the mat")[0]) < 12


def test_the_smallest_vocabulary_is_every_byte_and_two_tokens() -> None:
    tokenizer = DocumentTokenizer(train(["abc"], SMALLEST_VOCABULARY))
    assert tokenizer.vocab_size == SMALLEST_VOCABULARY == 258
    assert len(tokenizer.encode("abc é")[0]) == 2 + 6


BOTH = "<|begin|> $A <|end|>"
NAMES = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}


@pytest.mark.parametrize(
    ("template", "config", "begin", "end"),
    [
        (None, None, [], []),
        (None, NAMES, [], []),
        (None, {**NAMES, "add_bos_token": True}, [BEGIN], []),
        (None, {**NAMES, "add_bos_token": True, "add_eos_token": True}, [BEGIN], [END]),
        (None, {**NAMES, "add_bos_token": None, "add_eos_token": True}, [], [END]),
        (BOTH, None, [BEGIN], [END]),
        (BOTH, {**NAMES, "add_bos_token": True, "add_eos_token": True}, [BEGIN], [END]),  # asked for twice, added once
        ("<|begin|> $A", {**NAMES, "add_bos_token": True, "add_eos_token": False}, [BEGIN], []),
        (BOTH, {**NAMES, "add_eos_token": False}, [BEGIN], []),
        (BOTH, {**NAMES, "add_bos_token": False, "add_eos_token": False}, [], []),
    ],
)
def test_begin_and_end_as_configured(template, config, begin: list[int], end: list[int]) -> None:
    tokenizer = DocumentTokenizer(folder_files(template, config))
    assert (list(tokenizer.begin_ids), list(tokenizer.end_ids)) == (begin, end)
    ids, _ = tokenizer.encode("the cat<|end|><|begin|>")
    assert ids[: len(begin)] == begin
    assert ids[len(ids) - len(end) :] == end
    inner = ids[len(begin) : len(ids) - len(end)]
    assert BEGIN not in inner
    assert END not in inner


def test_bytes_of_a_first_token_that_nothing_predicts() -> None:
    tokenizer = DocumentTokenizer(folder_files(None, None))
    ids, n_bytes = tokenizer.encode("the cat")
    assert n_bytes == len("the cat") - len(tokenizer.decode(ids[:1]))
    assert tokenizer.encode("") == ([], 0)
    assert tokenizer.encode("é")[1] == 0  # the first token is half the letter; all of it counts as seen


def test_saved_limits_are_lifted() -> None:
    tokenizer = Tokenizer.from_str(TRAINED["tokenizer.json"])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    limited = DocumentTokenizer({**TRAINED, "tokenizer.json": tokenizer.to_str()})
    assert limited.encode("the dog sat on the mat") == DocumentTokenizer(TRAINED).encode("the dog sat on the mat")


def test_bad_tokenizer_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer.json"):
        read_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"tokenizer cannot be read"):
        DocumentTokenizer({"tokenizer.json": "{}"})
    with pytest.raises(ConfigError, match=r"add_bos_token=true needs a bos_token in the vocabulary \(bos_token=<s>\)"):
        DocumentTokenizer(folder_files(None, {"add_bos_token": True, "bos_token": "<s>"}))
