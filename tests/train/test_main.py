"""A whole run: join, evaluate, train, report, save, leave; alone in this process, and on two ranks."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fivefold.config.run import RunConfig
from fivefold.recipes import save
from fivefold.train import main
from tests.parity.grid import row

RUN = """
import sys
from fivefold.recipes import load
from fivefold.train import run
recipe = load(sys.argv[1])
run(recipe.config, recipe.name, sys.argv[2])
"""
ROOT = Path(__file__).parents[2]
SAME = {"loss", "grad_norm", "lr", "tokens", "targets", "eval_loss", "eval_bits_per_byte"}


def config_of(layout: str, **changes: Any) -> RunConfig:
    own = {"train__steps": 5, "train__eval_every": 2, "metrics__every": 2, "train__device": "cpu", "train__gc_every": 2}
    return row(layout, "moe", 3, **{**own, **changes}).config


def start(layout: str, tmp_path: Path, **changes: Any) -> list[subprocess.CompletedProcess[str]]:
    """A run of several processes, as a launcher would start it; each rank is told another folder."""
    config = config_of(layout, **changes)
    save(tmp_path / "config.json", "moe_tiny", config)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world = config.dims.world
    size = str(world)
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(tmp_path / "config.json"), str(tmp_path / ("wrong" if rank else "run"))],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]  # fmt: skip
    done = []
    try:
        for p in processes:
            out, err = p.communicate(timeout=100)
            done.append(subprocess.CompletedProcess(p.args, p.returncode, out, err))
    finally:
        for p in processes:
            p.kill()
    return done


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_ranks_do_what_one_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main.run(config_of("single"), "moe_tiny", str(tmp_path / "single"))
    alone = capsys.readouterr().out
    zero, one = start("fsdp2", tmp_path)
    assert (zero.returncode, one.returncode) == (0, 0), zero.stderr + one.stderr
    assert one.stdout == "" and not (tmp_path / "wrong").exists()  # rank 0 alone speaks, in its own folder
    for said in (alone, zero.stdout):
        assert "step 1/5" in said and "step 5/5" in said and "eval at step 5" in said
        assert "before training" in said and "after training" in said and "weights:" in said
    assert "fsdp2 on 2 cpu ranks" in zero.stdout

    a, b = metrics(tmp_path / "single"), metrics(tmp_path / "run")
    assert [line["step"] for line in b] == [line["step"] for line in a] == [0, 1, 2, 2, 4, 4, 5, 5]
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for key in x.keys() & SAME:
            assert x[key] == pytest.approx(y[key], rel=1e-12), key
        assert x.get("z_loss", 0.0) == pytest.approx(y.get("z_loss", 0.0), rel=1e-6)  # counted in float32
        assert x.get("expert_load") == y.get("expert_load")
    assert a[-2]["loss"] != a[1]["loss"] and a[-1]["eval_loss"] != a[0]["eval_loss"]

    weights = [load_file(tmp_path / run / "weights" / "model-00001.safetensors") for run in ("single", "run")]
    assert weights[0].keys() == weights[1].keys()
    assert all((x - weights[1][n]).abs().max() <= 1e-11 * x.abs().max() for n, x in weights[0].items())


def test_what_is_turned_off_does_not_happen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    off = {"train__evaluate": False, "train__save_final": False, "train__eval_every": 0, "metrics__tensorboard": False}
    main.run(config_of("single", **off), "moe_tiny", str(tmp_path / "run"))
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["config.json", "metrics.jsonl"]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 4, 5]
    assert "eval" not in capsys.readouterr().out


class Collector:
    """Stands for the gc module: notes when garbage is collected, and whether by itself."""

    def __init__(self) -> None:
        self.collected: list[int] = []
        self.step, self.automatic = 0, True

    def collect(self) -> None:
        self.collected.append(self.step)

    def disable(self) -> None:
        self.automatic = False


@pytest.mark.parametrize(("every", "collected"), [(3, [1, 3, 6, 9]), (1, list(range(1, 11))), (50, [1]), (0, [])])
def test_garbage_is_collected_on_the_same_steps(
    monkeypatch: pytest.MonkeyPatch, every: int, collected: list[int]
) -> None:
    collector = Collector()
    monkeypatch.setattr(main, "gc", collector)
    for collector.step in range(1, 11):
        main._collect_garbage(collector.step, every)
    assert collector.collected == collected and collector.automatic == (every == 0)


def test_a_run_leaves_the_callers_collector_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of("single", train__steps=1, train__eval_every=0, train__save_final=False)
    main.run(config, "moe_tiny", str(tmp_path))
    assert gc.isenabled()
