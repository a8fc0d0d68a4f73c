"""What is said about bad data before a run starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fivefold.config.parts import DataConfig
from fivefold.data.check import locate, open_files, problems
from fivefold.data.writer import TokenFileWriter


@pytest.fixture
def data(build, tmp_path: Path) -> DataConfig:
    build([33, 8], [20], vocab_size=100)  # five rows of 8
    return DataConfig(files=("set",), dir=str(tmp_path), batch_size=4, sequence_length=8)


def test_good_data(data: DataConfig, build, tmp_path: Path) -> None:
    assert problems(data, 100) == []
    assert problems(data.model_copy(update={"batch_size": 5}), 100) == []
    by_path = data.model_copy(update={"files": ("set", str(tmp_path / "set")), "weights": (1.0, 2.0)})
    assert problems(by_path, 128) == []
    assert locate(by_path) == (tmp_path / "set",) * 2
    assert [file.n_tokens for file in open_files(by_path)] == [61, 61]


@pytest.mark.parametrize(
    ("changes", "vocab_size", "messages"),
    [
        ({}, 99, ["data.files=set has a vocabulary of 100, more than the model's (model.vocab_size=99)."]),
        ({"batch_size": 6}, 100, ["data.batch_size=6 exceeds the rows of the training data (5 rows of"]),
        ({"sequence_length": 41}, 100, ["Set data.sequence_length to at most 40"]),
        ({"weights": (1.0, 2.0)}, 100, ["data.weights=1.0,2.0 has 2 values for 1 files (data.files=set)."]),
        ({"weights": (0.0,)}, 100, ["data.weights=0.0 has a weight that is not positive."]),
        ({"files": ()}, 100, ["data.files is empty."]),
        ({"files": ("sett",)}, 100, ["data.files=sett is not prepared (data.dir="]),
        (
            {"files": ("stdlib", "none"), "weights": (1.0,)},
            9,
            ["1 values", "fivefold prepare stdlib", "prepare SOURCE"],
        ),
    ],
)
def test_problems(data: DataConfig, changes: dict, vocab_size: int, messages: list[str]) -> None:
    found = problems(data.model_copy(update=changes), vocab_size)
    assert len(found) == len(messages)
    for message, problem in zip(messages, found):
        assert message in problem


def test_the_nearest_prepared_set_is_named(data: DataConfig) -> None:
    (problem,) = problems(data.model_copy(update={"files": ("sett",)}), 100)
    assert "holds set). Did you mean set? If not, run `fivefold prepare SOURCE --out" in problem


def test_sets_of_different_tokenizers_do_not_mix(data: DataConfig, tmp_path: Path) -> None:
    writer = TokenFileWriter(tmp_path / "other", vocab_size=100, tokenizer={"tokenizer.json": "{ }"})
    writer.append(np.arange(41), [41], [41])
    writer.start_heldout()
    writer.finish(text_bytes=41)
    (problem,) = problems(data.model_copy(update={"files": ("set", "other", "set")}), 100)
    assert "of different tokenizers (those of set and other)" in problem
    assert problem.endswith(f"--tokenizer {tmp_path / 'set'}`.")


def test_damage(data: DataConfig) -> None:
    path = Path(data.dir) / "set" / "tokens.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    (problem,) = problems(data, 100)
    assert f"{path} is truncated (120 bytes, 122 by index.json)" in problem
    path.write_bytes(content[:-2] + b"\x07\x00")
    (problem,) = problems(data, 100)
    assert f"{path} fails its checksum" in problem
