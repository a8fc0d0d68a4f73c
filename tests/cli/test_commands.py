"""The commands as a user meets them: help, lists, numbers, exit statuses, files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fivefold import __version__, recipes
from fivefold.cli import train
from fivefold.cli.main import COMMANDS, main
from fivefold.config import fields
from fivefold.config.errors import ConfigError
from fivefold.data.writer import TokenFileWriter
from fivefold.recipes import RECIPES
from fivefold.schedule.named import NAMES
from fivefold.tools import footprint, verify
from fivefold.train import run as train_here

TWO_CHUNKS = ("interleaved", "interleaved_split", "looped_bfs", "zb_v", "dualpipe_v")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working folder, outside of any launcher."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def output(capsys, *words: str, status: int = 0) -> str:
    assert main(words) == status
    out, err = capsys.readouterr()
    assert err == ""
    return out


def run(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "fivefold", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=env, check=False)


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"fivefold {__version__}\n"


def test_a_set_without_held_out_text_is_not_evaluated(capsys, folder):
    writer = TokenFileWriter(folder / "data" / "text", vocab_size=37, tokenizer={"tokenizer.json": "{}"})
    writer.append(np.arange(64) % 37, [64], [200])
    writer.start_heldout()
    writer.finish(text_bytes=200)
    words = ["--data.files", "text", "--data.batch-size", "2", "--train.steps", "2", "--train.eval-every", "1"]
    text = output(capsys, "train", "dense_tiny", *words, "--run-dir", "run", "--train.device", "cpu")
    assert "warning: nothing is evaluated: the data has no held-out documents" in text
    assert "step 2/2" in text
    assert "bits" not in text
    assert "eval" not in (folder / "run" / "metrics.jsonl").read_text()


def test_python_refuses_what_the_command_refuses(folder):
    config = RECIPES["moe_tiny"]()
    exact = config.model_copy(update={"train": config.train.model_copy(update={"dtype": "float64"})})
    with pytest.raises(ConfigError, match=r"batch_size=8 is not a multiple of fsdp=3(.|\n)*tp=3"):
        verify.verify(exact, ["fsdp3", "tp3", "fsdp2"])
    uneven = config.model_copy(update={"train": config.train.model_copy(update={"microbatches": 3, "device": "cpu"})})
    with pytest.raises(ConfigError, match=r"batch_size=8 is not a multiple of .*train.microbatches=3"):
        train_here(uneven, "moe_tiny", str(folder))


def test_help(capsys):
    text = output(capsys)
    assert all(command in text for command in COMMANDS)
    for command in ("train", "verify", "show"):
        text = output(capsys, command, "--help")
        assert "RECIPE" in text
        assert "examples:" in text
        assert "--group.field value" in text


@pytest.mark.parametrize("name", ["moe_tiny", "llama3_405b"])
def test_help_of_a_recipe_shows_every_field(capsys, name):
    text = " ".join(output(capsys, "train", name, "--help").split())
    leaves = list(fields.leaves(RECIPES[name]()))
    assert len(leaves) > 50
    for leaf in leaves:
        assert leaf.doc, leaf.path
        if leaf.path != "parallel":
            flag = f"--{leaf.path.replace('_', '-')}"
            kind = leaf.kind[0].upper() + leaf.kind[1:]
            assert f"{flag} {leaf.value or chr(34) * 2} {leaf.doc} {kind}." in text, leaf


def test_what_help_shows_can_be_typed():
    for name in RECIPES:
        config = RECIPES[name]()
        given = {leaf.path: leaf.value for leaf in fields.leaves(config)}
        again, problems = train.configure(type("Args", (), {"recipe": name}), given)
        assert problems == []
        assert again.config == config


def test_recipes(capsys, folder):
    text = output(capsys, "recipes", "--json", "list.json")
    assert all(name in text for name in RECIPES)
    rows = {row["name"]: row for row in json.loads((folder / "list.json").read_text())}
    assert rows["deepseek_v3"]["parameters"] == 671_026_404_352
    assert all(row["about"].endswith(".") for row in rows.values())


def test_show(capsys, folder, monkeypatch):
    stage = footprint.Footprint(place=0, stages=(0,), ranks=4, n_parts=6, stored_bytes=3 * 2**30, gathered_bytes=2**20,
                                gradient_bytes=2**30, optimizer_bytes=2**31, padding_bytes=7)  # fmt: skip
    stages = [stage, stage.__class__(**{**vars(stage), "place": 1, "stages": (1,)})]
    monkeypatch.setattr(footprint, "footprint", lambda config: stages)
    text = output(capsys, "show", "deepseek_v3", "--parallel", "pp2-fsdp4", "--train.seed", "5", "--json", "show.json")
    for word in ("671.03 B", "671,026,404,352", "36.63 B", "250.46 GFLOP", "70,272 bytes", "pp2-fsdp4, 8 ranks"):
        assert word in text
    assert "train.seed                          5" in text
    assert "Pipeline: 1f1b, 60 microbatches, bubble 1.6% where F, I and W each take 1 and B 2" in text
    assert "1 1 50.3% layers.31 to 60, head" in " ".join(text.split())
    assert "0, 1 8 3.00 GiB 1.00 GiB 2.00 GiB 6.00 GiB" in " ".join(text.split())
    shown = json.loads((folder / "show.json").read_text())
    assert shown["recipe"] == "deepseek_v3"
    assert shown["config"]["train"]["seed"] == 5
    assert shown["kv_cache_bytes_per_token"] == 70_272
    assert [r["stored_bytes"] for r in shown["ranks"]] == [3 * 2**30] * 2
    assert [s["place"] for s in shown["pipeline"]["stages"]] == [0, 1]
    assert shown["pipeline"]["stages"][0]["parts"][:2] == ["embed", "layers.0"]
    assert recipes.load("show.json").config.train.seed == 5


def test_schedule(capsys, folder):
    words = ["--pp", "2", "--microbatches", "2", "--json", "s.json", "--svg", "s.svg"]
    text = output(capsys, "schedule", "1f1b", *words)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[:4] == [
        "1f1b: pp=2, microbatches=2, chunks=1, F=1 B=2",
        "",
        "rank 0 F0 F1 . . B0 ---- . B1 ----",
        "rank 1 . F0 B0 ---- F1 B1 ---- . .",
    ]
    assert "makespan 9 bubble 33.3% all ranks wait for the last" in lines
    assert "span 9 bubble 33.3% of the slowest rank; none waits" in lines
    assert lines[lines.index("rank stages held at once of these only for W") :][1:3] == ["0 0 2 0", "1 1 1 0"]
    assert lines[-2] == "4 messages, each rank posting its own in this order (producer, ranks):"
    assert lines[-1] == "F0.0 0>1 F0.1 0>1 B1.0 1>0 B1.1 1>0"
    found = json.loads((folder / "s.json").read_text())
    assert found["ranks"][1][1] == {"action": "B1.0", "start": 2.0, "end": 4.0}
    assert found["messages"][0] == {"producer": "F0.0", "consumer": "F1.0", "source": 0, "target": 1}
    assert (found["makespan"], found["peak"], found["owners"]) == (9.0, [2.0, 1.0], [0, 1])
    assert "1f1b: pp=2, microbatches=2" in (folder / "s.svg").read_text()


def test_schedules_are_priced(capsys, folder):
    for name in NAMES:
        text = output(capsys, "schedule", name)
        assert text.startswith(f"{name}: pp=4, microbatches=8, chunks={2 if name in TWO_CHUNKS else 1}, F=1")
    text = output(capsys, "schedule", "interleaved", "--chunks", "3", "--cost", "F=2,B=3,comm=0.5")
    assert "chunks=3, F=2 B=3 comm=0.5" in text
    assert "0, 4, 8" in text
    tight, wide = (
        output(capsys, "schedule", "auto", "--cost", "F=1,I=1,W=0.6", "--limit", limit, "--json", "a.json")
        and json.loads((folder / "a.json").read_text())
        for limit in ("2", "8")
    )
    assert max(tight["peak"]) == 2
    assert max(wide["peak"]) > 4
    assert wide["bubble"] < 0.15 < 0.4 < tight["bubble"]


def test_a_wide_schedule_is_not_broken_in_a_pipe_and_folded_in_a_terminal(capsys, monkeypatch):
    wide = output(capsys, "schedule", "zb_h1", "--microbatches", "40")
    assert sum(line.startswith("rank 0 ") for line in wide.splitlines()) == 1
    assert max(map(len, wide.splitlines())) > 500
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "70")
    folded = output(capsys, "schedule", "zb_h1", "--microbatches", "40")
    assert sum(line.startswith("rank 0 ") for line in folded.splitlines()) > 5
    assert all(len(line) <= 70 for line in folded.splitlines() if line.startswith(tuple(f"rank {r}" for r in range(4))))
    assert all(len(line) <= 70 for line in folded.splitlines() if ">" in line)


def test_many_messages_are_written_whole_only_to_a_file(capsys, folder):
    text = output(capsys, "schedule", "gpipe", "--pp", "3", "--microbatches", "150", "--json", "g.json")
    assert text.splitlines()[-1] == "and 200 more: --json FILE writes all of them."
    assert len(json.loads((folder / "g.json").read_text())["messages"]) == 600
    assert output(capsys, "schedule", "1f1b", "--pp", "1").endswith("\nNo messages.\n")


def test_a_schedule_of_ones_own_and_few_microbatches(capsys, folder):
    source = "def table(p, m, v):\n    return [[(k, r, i) for k in 'FB' for i in range(m)] for r in range(p)]\n"
    (folder / "own.py").write_text(source)
    assert main(["schedule", "own.py:table", "--pp", "3", "--microbatches", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("own.py:table: pp=3, microbatches=2, chunks=1, F=1 B=2\n")
    assert err == (
        "warning: microbatches=2 is below pp=3: a bubble of 50.0% at unit costs. "
        "Use microbatches=3 or more to shrink it.\n"
    )


def test_verify(capsys, folder, monkeypatch):
    good = verify.Report(layout="tp2", dtype="float64", steps=3, loss=1e-15, grad_norm=0.0, gradient=2e-15,
                         parameter=3e-15, experts=True, replicas=True, owners=True, worst=("a.b", 3e-15),
                         first_difference=None, passed=True)  # fmt: skip
    bad = verify.replace(good, layout="fsdp2", passed=False, worst=("layer.w", 0.5), first_difference="layer")
    asked = []

    def fake(config, layouts, *, documents):
        asked.append((config, documents))
        return [good if layout == "tp2" else bad for layout in layouts]

    monkeypatch.setattr(verify, "verify", fake)
    text = output(capsys, "verify", "moe_tiny", "--parallel", "tp2", "--json", "one.json")
    assert "passed" in text
    assert json.loads((folder / "one.json").read_text())["layout"] == "tp2"
    words = [
        "verify",
        "moe_tiny",
        "--parallel",
        "tp2",
        "fsdp2",
        "--steps",
        "2",
        "--dtype",
        "float32",
        "--json",
        "two.json",
    ]
    text = output(capsys, *words, "--train.zero", "1", status=1)
    assert "worst parameter layer.w (5.0e-01)" in text
    assert "first difference in layer" in text
    assert [r["passed"] for r in json.loads((folder / "two.json").read_text())] == [True, False]
    assert "float64" in output(capsys, "verify", "moe_tiny", "--parallel", "tp2")
    text = output(capsys, "verify", "moe_tiny", "--parallel", "tp2", "--no-documents")
    assert "float64, 3 steps, one document a row" in text
    assert [documents for _, documents in asked] == [True, True, True, False]
    first, second = (config.train for config, _ in asked[:2])
    assert (first.steps, first.dtype, first.device, first.zero) == (3, "float64", "cpu", "auto")
    assert (second.steps, second.dtype, second.zero) == (2, "float32", 1)


def test_fewer_microbatches_than_ranks_are_told_once(capsys, monkeypatch):
    monkeypatch.setattr(verify, "verify", lambda config, layouts, **options: [])
    assert main(["verify", "moe_tiny", "--parallel", "pp2", "pp2-tp2", "tp2"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: train.microbatches=1 is below pp=2: a bubble of 50.0%")
    assert main(["verify", "moe_tiny", "--parallel", "pp2", "--train.microbatches", "2"]) == 0
    assert capsys.readouterr().err == ""


def test_the_default_folder_is_new_each_time(folder, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "now")
    names = [str(train._make_folder(None, "/a/b.py:mine", "tp2")) for _ in range(3)]
    assert names == ["runs/mine-tp2-now", "runs/mine-tp2-now-2", "runs/mine-tp2-now-3"]
    assert train._make_folder("given/one", "moe_tiny", "tp2").is_dir()


def test_the_ranks_get_the_resolved_configuration(monkeypatch):
    seen = []
    monkeypatch.setattr("fivefold.train.main.run", lambda *args: seen.append(args))
    assert main(["train", "moe_tiny", "--train.steps", "3", "--run-dir", "here"]) == 0
    ((config, recipe, run_dir),) = seen
    assert (config.train.steps, recipe, run_dir) == (3, "moe_tiny", "here")
    assert config == recipes.restore("moe_tiny", config.model_dump(mode="json")).config


def test_under_torchrun_the_layout_takes_the_ranks(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    seen = []
    monkeypatch.setattr("fivefold.train.main.run", lambda *args: seen.append(args))
    assert main(["train", "moe_tiny", "--parallel", "fsdp*-tp2"]) == 0
    ((config, _, run_dir),) = seen
    assert (config.parallel, run_dir) == ("fsdp2-tp2", "")


def test_a_failing_run_ends_with_its_error(capsys, monkeypatch):
    def fail(*args):
        raise FloatingPointError("gradient of layer.w is nan at step 3")

    monkeypatch.setattr("fivefold.train.main.run", fail)
    assert main(["train", "moe_tiny", "--run-dir", "here"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "error: rank 0 of 1 failed: FloatingPointError: gradient of layer.w is nan at step 3"


@pytest.mark.slow
def test_train_for_real(folder):
    done = run("train", "moe_tiny", "--parallel", "fsdp2", "--train.steps", "2", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 2
    assert (folder / "run" / "logs" / "rank1.txt").exists()


@pytest.mark.slow
def test_verify_for_real(folder):
    done = run("verify", "dense_tiny", "--parallel", "tp2", "fsdp2", "--steps", "1", "--json", "report.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [r["passed"] for r in json.loads((folder / "report.json").read_text())] == [True, True]
