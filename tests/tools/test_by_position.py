"""The loss by position of saved weights, on windows of long documents, as a table and as a picture."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from fivefold.config.errors import ConfigError
from fivefold.config.run import RunConfig
from fivefold.data.heldout import Windows
from fivefold.data.prepare import prepare
from fivefold.data.request import Request
from fivefold.data.rows import IGNORE
from fivefold.data.tokenfile import TokenFile
from fivefold.mesh.pool import Pool
from fivefold.tools.by_position import by_position, picture, table
from fivefold.train.evaluate import PositionLoss
from tests.parity.grid import row
from tests.train import cases

STRIDE, LENGTH = 4, 16


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """Documents of 10 to 400 characters, half of them held out."""
    folder = tmp_path_factory.mktemp("data")
    for i in range(24):
        (folder / f"{i:02}.txt").write_text(f"{i} of all " * (1 + (i * 7) % 40))
    request = Request(sources=(str(folder / "*.txt"),), out=str(folder / "set"), vocab_size=300, heldout=0.5, workers=1)
    prepare(request)
    return TokenFile.open(folder / "set")


def config_of(layout: str, file: TokenFile, weights: Path) -> RunConfig:
    config = row(layout, "moe", 3, model__vocab_size=512, train__init_from=str(weights)).config
    return config.model_copy(update={"data": config.data.model_copy(update={"files": (str(file.path),)})})


@pytest.fixture(scope="module")
def weights(pool: Callable[[int], Pool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    pool(1).run(cases.saved, row("single", "moe", model__vocab_size=512).config, str(folder), 1)
    return folder


def test_windows_lie_inside_documents_and_give_each_token_every_place(file: TokenFile) -> None:
    windows = Windows([file], LENGTH, STRIDE)
    rows = windows.rows(0, windows.n_rows + 3)
    assert windows.n_rows > 20 and rows.single_document
    assert (rows.targets[: windows.n_rows] != IGNORE).all() and (rows.targets[windows.n_rows :] == IGNORE).all()
    expected = [
        file.tokens[at : at + LENGTH + 1].tolist()
        for document in range(file.index.n_training_documents, file.n_documents)
        for at in range(int(file.starts[document]), int(file.starts[document + 1]) - LENGTH, STRIDE)
    ]
    found = np.concatenate([rows.tokens, rows.targets[:, -1:]], 1)[: windows.n_rows].tolist()
    assert found == expected
    assert (rows.positions == np.arange(LENGTH)).all()
    parts = [windows.rows(i, i + 4) for i in range(0, windows.n_rows, 4)]
    assert np.array_equal(np.concatenate([p.tokens for p in parts])[: windows.n_rows], rows.tokens[: windows.n_rows])


def test_layouts_find_the_same(pool: Callable[[int], Pool], file: TokenFile, weights: Path) -> None:
    runs = {layout: config_of(layout, file, weights) for layout in ("cp2", "single", "fsdp2")}
    found = by_position(runs, STRIDE, pools=lambda world: nullcontext(pool(world)))  # type: ignore[arg-type]
    assert list(found) == list(runs)
    for one in found.values():
        assert (one.n_targets == Windows([file], LENGTH, STRIDE).n_rows).all()
        np.testing.assert_allclose(one.nats, found["single"].nats, rtol=1e-11)
    assert np.ptp(found["single"].nats) > 0


def test_what_cannot_be_measured(file: TokenFile, weights: Path) -> None:
    config = config_of("cp2", file, weights)
    data = config.data.model_copy(update={"sequence_length": 512, "batch_size": 1})
    longer = config.model_copy(update={"data": data})
    with pytest.raises(ConfigError, match=r"data\.sequence_length=512 is not below the length of any held-out"):
        by_position({"a": longer, "b": longer}, STRIDE)
    with pytest.raises(ConfigError, match=r"train\.init_from=\S+/none is not a folder"):
        by_position({"a": config_of("cp2", file, weights / "none")}, STRIDE)


MODELS = {
    "a < b": PositionLoss(np.array([4.0, 2.0, 1.0, 1.0, 0.0, 0.0]), np.array([2, 2, 1, 1, 0, 0])),
    "another one": PositionLoss(np.array([2.0, 2.0, 6.0, 2.0, 3.0, 3.0]), np.array([1, 1, 2, 2, 1, 1])),
}


def test_table() -> None:
    assert table(MODELS, 2).splitlines() == [
        "positions      a < b  another one",
        "      0-1     1.5000       2.0000",
        "      2-3     1.0000       2.0000",
        "      4-5        nan       3.0000",
    ]


def test_picture() -> None:
    text = picture(MODELS, 2, 4, "a title & more")
    svg = ElementTree.fromstring(text)
    words = [e.text for e in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a title & more", "a < b", "another one", "position in the document", "nats per token"} <= set(words)
    lines = [e.get("points", "") for e in svg.iter("{http://www.w3.org/2000/svg}polyline")]
    points = [[tuple(map(float, p.split(","))) for p in line.split()] for line in lines]
    assert list(map(len, points)) == [2, 3]  # nothing is drawn where nothing counts
    assert [x for x, _ in points[0]] == [x for x, _ in points[1][:2]]
    (y0, y1), (z0, z1, z2) = [[y for _, y in line] for line in points]
    assert z2 < z0 == z1 < y0 < y1  # a larger loss is higher up
    (mark,) = [e for e in svg.iter("{http://www.w3.org/2000/svg}line") if e.get("stroke-dasharray")]
    assert points[1][1][0] < float(mark.get("x1", "")) < points[1][2][0]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
