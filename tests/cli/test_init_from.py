"""``--init-from``: a run goes on from another's weights; what cannot be is said before any process or folder exists."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fivefold.cli.main import main
from tests.architecture.source import ROOT

COMMON = ["--metrics.tensorboard", "false", "--train.evaluate", "false", "--train.device", "cpu"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def start(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fivefold", "train", *words, *COMMON], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=180, check=False)  # fmt: skip


@pytest.mark.time_limit(300)
def test_a_run_goes_on_from_anothers_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = start("moe_tiny", "--run-dir", "one", "--train.steps", "5", "--parallel", "tp2")
    assert done.returncode == 0, done.stderr
    still = ["--train.steps", "1", "--optim.warmup-steps", "1", "--optim.lr", "1e-30", "--optim.weight-decay", "0"]
    done = start("moe_tiny", "--run-dir", "two", "--init-from", "one", "--parallel", "cp2", *still)
    assert done.returncode == 0, done.stderr
    one, two = (load_file(folder / name / "weights" / "model-00001.safetensors") for name in ("one", "two"))
    kept = [name for name in one if not name.endswith("ffn.bias")]  # which move by the load of a step
    assert all(one[name].equal(two[name]) for name in kept)
    saved = json.loads((folder / "two" / "config.json").read_text())["config"]
    assert saved["train"]["init_from"] == "one"

    for line, words in (
        ("moe_tiny --init-from none", "train.init_from=none is not a folder"),
        ("moe_tiny --init-from .", "train.init_from=. holds no saved weights"),
        ("moe_tiny --train.init-from two/logs", "train.init_from=two/logs holds no saved weights"),
        ("moe_tiny --init-from=", "init_from= is empty"),
        ("dense_tiny --init-from one", "has tensors that the model lacks (layers.0.attention.kv_down"),
        ("moe_tiny --init-from one/weights --model.dim 32", "of another shape (embed.weight (37, 16) for (37, 32)"),
        ("moe_tiny --init-from one --model.n-layers 5", "lacks tensors of the model (layers.4.attention_norm.weight"),
    ):  # fmt: skip
        assert main(["train", *line.split(), "--run-dir", "three"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and words in err and all(text.startswith("error: ") for text in err.splitlines())
        assert not (folder / "three").exists()
