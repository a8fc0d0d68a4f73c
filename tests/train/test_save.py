"""The final weights: the same files from any layout, whole, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from fivefold.config.parts import PipelineConfig
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool import Pool
from fivefold.train import save
from fivefold.train.state import build_state
from tests.parity.grid import Row, row

from . import cases

Pools = Callable[[int], Pool]
LAYOUTS = ["fsdp2", "ddp2", "tp2", "ddp2-tp2", "fsdp2-tp2", "tp4", "pp2", "pp4", "pp2-fsdp2"]


def written(pool: Pools, layout: str, folder: Path, steps: int, model: str = "moe_q") -> dict[str, Tensor]:
    config = row(layout, model).config
    pool(config.dims.world).run(cases.saved, config, str(folder), steps)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        found |= load_file(folder / file)
    assert set(found) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    return found


def test_names_shapes_and_values_before_training(pool: Pools, tmp_path: Path) -> None:
    config = row("single", "moe_q").config
    state = build_state(config, Mesh.single())
    one = written(pool, "single", tmp_path / "single", 0)
    biases = {f"layers.{i}.ffn.bias": (8,) for i in (1, 2, 3)}
    assert {n: tuple(x.shape) for n, x in one.items()} == {**state.shapes, **biases}
    assert one["embed.weight"].shape == one["head.weight"].shape == (37, 16)
    values = {s.piece.name: s.piece.data.view(s.piece.global_shape) for s in state.shards}
    assert all(torch.equal(one[n], x) for n, x in values.items())
    for layout in LAYOUTS:
        other = written(pool, layout, tmp_path / layout, 0)
        assert other.keys() == one.keys() and all(torch.equal(other[n], one[n]) for n in one), layout


@pytest.mark.parametrize("layout", ["fsdp2", "ddp2-tp2", "pp2-fsdp2"])
def test_after_training(pool: Pools, tmp_path: Path, layout: str) -> None:
    one = written(pool, "single", tmp_path / "single", 3)
    other = written(pool, layout, tmp_path / layout, 3)
    assert all((other[n] - one[n]).abs().max() <= 1e-12 * one[n].abs().max().clamp(min=1e-9) for n in one)
    assert all(one[f"layers.{i}.ffn.bias"].any() for i in (1, 2, 3))
    assert one["layers.1.ffn.bias"].dtype == torch.float32 and one["embed.weight"].dtype == torch.float64


TIED = [row("tp2", "dense", tied=True), row("pp2-fsdp2", "dense", 3, 2, "none", "zb_v", True),
        row("pp2-fsdp2", "dense", 3, 2, "none", "1f1b", True)]  # fmt: skip


@pytest.mark.parametrize("tied", TIED, ids=str)
def test_a_tied_matrix_is_written_once(pool: Pools, tmp_path: Path, tied: Row) -> None:
    """Also where two stages, on one rank or on two, have it."""
    pool(tied.world).run(cases.saved, tied.config, str(tmp_path / "found"), 2)
    one = tied.config.model_copy(update={"parallel": "single", "pipeline": PipelineConfig()})
    pool(1).run(cases.saved, one, str(tmp_path / "one"), 2)
    found, expected = (load_file(tmp_path / name / "model-00001.safetensors") for name in ("found", "one"))
    assert "head.weight" not in found and found["embed.weight"].shape == (37, 16)
    assert found.keys() == expected.keys()
    assert all((found[n] - x).abs().max() <= 1e-12 * x.abs().max() for n, x in expected.items())


def test_large_weights_are_split_over_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(save, "FILE_BYTES", 5000)
    state = build_state(row("single", "dense").config, Mesh.single())
    save.save_weights(state, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and {f.name for f in files} == set(index.values())
    for file in files:
        found = load_file(file)
        assert {n for n, f in index.items() if f == file.name} == set(found)
        assert len(found) == 1 or sum(x.nbytes for x in found.values()) <= 5000
        with safe_open(file, "pt") as f:
            assert f.metadata() == {"format": "pt"}
