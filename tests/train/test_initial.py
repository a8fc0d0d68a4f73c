"""Starting from saved weights: bit-equal under any layout, nothing read twice, and what does not fit is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fivefold.config import weights
from fivefold.config.errors import ConfigError
from fivefold.config.parts import PipelineConfig
from fivefold.config.run import RunConfig
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool import Pool
from fivefold.train.initial import boxes, check_initial
from fivefold.train.state import build_state
from tests.parity.grid import Row, row

from . import cases

Pools = Callable[[int], Pool]
ROWS = [
    row("single", "moe_q"),
    row("fsdp2", "moe_q", 3),
    row("fsdp4", "moe_q", 2, train__small_buffer=0),
    row("ddp2-tp2", "moe_q", 1),
    row("fsdp2-tp2", "moe_q", 3),
    row("cp2", "moe_q", 3),
    row("cp2-tp2", "moe_q", 1),
    row("pp2-fsdp2", "moe_q", 3, 2),
]


def starting_from(config: RunConfig, path: Path, **train: object) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"init_from": str(path), **train})})


@pytest.fixture(scope="module")
def trained(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder: weights after two steps of a layout that cuts everything."""
    folder = tmp_path_factory.mktemp("run")
    config = row("fsdp2-tp2", "moe_q", 3).config
    pool(4).run(cases.saved, config, str(folder / "weights"), 2)
    return folder


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_any_layout_starts_from_what_was_saved(pool: Pools, trained: Path, row: Row) -> None:
    """With another seed, and step 0's optimizer; the file is what it is compared with."""
    expected = load_file(trained / "weights" / "model-00001.safetensors")
    config = starting_from(row.config, trained, seed=5)
    for found in pool(row.world).run(cases.started, config):
        assert found.step == 0 and found.moments == 0
        assert found.tensors.keys() == expected.keys()
        assert [n for n, x in expected.items() if not torch.equal(found.tensors[n], x)] == []
        assert found.owners and found.replicas
    assert expected["layers.1.ffn.bias"].any()


def test_each_element_is_read_once(pool: Pools, trained: Path) -> None:
    """By all ranks of a replica together: none reads what another stores."""
    sizes = load_file(trained / "weights" / "model-00001.safetensors")
    total = sum(x.numel() for n, x in sizes.items() if not n.endswith("ffn.bias"))
    for layout, replicas in (("fsdp4", 1), ("fsdp2-tp2", 1), ("cp2-tp2", 1), ("ddp2-tp2", 2)):
        config = starting_from(row(layout, "moe_q", 3).config, trained / "weights")
        assert sum(pool(4).run(cases.elements_read, config)) == total * replicas, layout


TIED = [row("tp2", "dense", tied=True), row("pp2-fsdp2", "dense", 3, 2, "none", "1f1b", True)]


@pytest.mark.parametrize("tied", TIED, ids=str)
def test_a_tied_matrix_starts_everywhere_it_is(pool: Pools, tmp_path: Path, tied: Row) -> None:
    pool(tied.world).run(cases.saved, tied.config, str(tmp_path / "one"), 2)
    pool(tied.world).run(cases.saved, starting_from(tied.config, tmp_path / "one", seed=3), str(tmp_path / "two"), 0)
    one, two = (load_file(tmp_path / name / "model-00001.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    # the second stage's copy too: training goes on as on one rank
    config = starting_from(tied.config, tmp_path / "one")
    alone = config.model_copy(update={"parallel": "single", "pipeline": PipelineConfig()})
    (expected,) = pool(1).run(cases.losses, alone, 1)
    assert pool(tied.world).run(cases.losses, config, 1)[0] == pytest.approx(expected, rel=1e-12)


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_are_the_range_in_order(size: list[int], data: st.DataObject) -> None:
    n = math.prod(size)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    block = torch.arange(n).view(size)
    found = [block[box].reshape(-1) for box in boxes(tuple(size), start, stop)]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(size) - 1)
    assert all(len(box) == len(size) for box in boxes(tuple(size), start, stop))


# ---- what is refused -------------------------------------------------------------------------------------------------


def dense(path: Path) -> RunConfig:
    return starting_from(row("single", "moe_q").config, path)


def changed(trained: Path, to: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of the saved weights with some tensors replaced, added or, where None, left out."""
    held = load_file(trained / "weights" / "model-00001.safetensors")
    held = {name: x for name, x in {**held, **tensors}.items() if x is not None}
    to.mkdir()
    save_file(held, to / "model-00001.safetensors")
    (to / weights.INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(held, "model-00001.safetensors")}))
    return to


def test_tensors_that_do_not_fit_are_listed(trained: Path, tmp_path: Path) -> None:
    path = changed(trained, tmp_path / "w", **{
        "head.weight": None, "layers.1.ffn.bias": None, "extra": torch.zeros(2), "embed.weight": torch.zeros(36, 16),
    })  # fmt: skip
    for start in (check_initial, lambda config: build_state(config, Mesh.single())):
        with pytest.raises(ConfigError) as caught:
            start(dense(path))
        assert [p.replace(str(path), "P") for p in caught.value.problems] == [
            f"train.init_from=P {what}. "
            "Use weights that were saved from a model of this shape, or set model.* to theirs."
            for what in (
                "lacks tensors of the model (head.weight, layers.1.ffn.bias)",
                "has tensors that the model lacks (extra)",
                "has tensors of another shape (embed.weight (36, 16) for (37, 16))",
            )
        ]


def test_many_tensors_are_counted(trained: Path) -> None:
    config = row("single", "dense").config
    with pytest.raises(ConfigError, match=r"\(.*(, .*){7} and \d+ more\)"):
        check_initial(starting_from(config, trained))


def test_weights_that_fit_pass_the_check(trained: Path) -> None:
    for path in (trained, trained / "weights"):
        assert weights.problems(str(path)) == []
        check_initial(dense(path))
    assert weights.problems("") == []
    check_initial(row("single").config)


def test_damaged_folders(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    none = said(tmp_path / "none", tmp_path)
    assert "P/none is not a folder (there is neither model.safetensors.index.json nor" in none
    assert "P/empty holds no saved weights (" in said(tmp_path / "empty", tmp_path)
    assert "the folder of a run that was trained to its end" in said(tmp_path / "empty", tmp_path)
    path = changed(trained, tmp_path / "w")
    assert weights.problems(str(path)) == []
    index = (path / weights.INDEX).read_text()
    (path / weights.INDEX).write_text(index.replace('"head.weight"', '"had.weight"'))
    assert "P/w lacks had.weight, which its index names. Use the weights of another run" in said(path, tmp_path)
    for text in ("{", "[]", '{"weight_map": 3}'):
        (path / weights.INDEX).write_text(text)
        assert "P/w has a damaged index (P/w/model.safetensors.index.json)" in said(path, tmp_path)
    (path / weights.INDEX).write_text(index)
    file = path / "model-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert "P/w has a damaged file (P/w/model-00001.safetensors: " in said(path, tmp_path)
    file.unlink()
    assert "P/w lacks the file model-00001.safetensors, which its index names" in said(path, tmp_path)


def said(path: Path, root: Path) -> str:
    (problem,) = weights.problems(str(path))
    assert problem.startswith(f"train.init_from={path} ")
    return problem.replace(str(root), "P")


def test_another_dtype_is_cast(trained: Path) -> None:
    """Weights saved in float64 start a run in float32."""
    config = row("single", "moe_q", train__dtype="float32", train__master_dtype="float32").config
    state = build_state(starting_from(config, trained), Mesh.single())
    with safe_open(trained / "weights" / "model-00001.safetensors", "pt") as f:
        for s in state.shards:
            assert torch.equal(s.piece.data, f.get_tensor(s.piece.name).float().flatten())
