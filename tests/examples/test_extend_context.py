"""The example of longer contexts: in small it shows the break and its end, and it can fail."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import numpy as np
import pytest

from fivefold.data.prepare import prepare
from fivefold.data.request import Request
from fivefold.recipes import load
from fivefold.train.evaluate import PositionLoss
from tests.architecture.source import ROOT

EXAMPLE = ROOT / "examples" / "extend_context.py"


@pytest.mark.time_limit(300)
def test_in_small(tmp_path: Path) -> None:
    """On some modules of the standard library with few words: the quick model learns from them in a minute."""
    modules = [f for f in sorted(Path(os.__file__).parent.glob("*.py")) if 20_000 < f.stat().st_size < 60_000]
    sources = tuple(map(str, modules))
    prepare(Request(sources=sources, out=str(tmp_path / "data" / "stdlib"), vocab_size=512, heldout=0.04, workers=1))
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--quick", "--data-dir", str(tmp_path / "data"), "--out", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = re.findall(r"^ *(\d+)-\d+ +([\d.]+) +([\d.]+) +([\d.]+)$", done.stdout, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(0, 128, 8))
    svg = ElementTree.parse(tmp_path / "out" / "loss_by_position.svg")
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}polyline"))) == 3
    assert load(str(tmp_path / "out" / "second")).config.parallel == "cp4"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("extend_context", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loss(*quarters: float) -> PositionLoss:
    """The same at all 4 positions of each quarter of a row."""
    return PositionLoss(np.repeat(quarters, 4) * 10, np.full(16, 10))


def test_the_check_can_fail(capsys: pytest.CaptureFixture[str]) -> None:
    check = example().check
    climbs, flat = loss(4.0, 4.1, 4.2, 4.4), loss(4.01, 4.0, 4.0, 3.99)
    check(climbs, flat, 4)
    assert "12 to 15 against 0 to 3 as trained: +0.400 nats before, -0.010 after" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="does not climb"):
        check(flat, flat, 4)
    with pytest.raises(SystemExit, match="after the extension"):
        check(climbs, climbs, 4)
