"""The full grid's runner: what it keeps, what it runs again, and when it fails. Rows are stubs here."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console

from fivefold.mesh.pool import PoolError

from . import full
from .grid import Row, row

ROWS = [row("fsdp2", "dense"), row("tp2", "dense", 3)]
GOOD = {"loss": 1e-15, "grad_norm": 2e-15, "gradient": 3e-15, "parameter": 4e-14, "passed": True}


class FakePool:
    """Answers for rank 0, and remembers what it was asked."""

    asked: list[str] = []

    def __init__(self, world: int, **_: Any) -> None:
        self.world = world

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[dict[str, Any], str, list[str]]]:
    """``run(answer, stamp)``: results, what was printed, and the rows that ran."""

    def of(answer: Callable[[Row], dict[str, Any]], stamp: str = "a") -> tuple[dict[str, Any], str, list[str]]:
        ran: list[str] = []

        def run_row(pool: FakePool, row: Row, stamp: str) -> dict[str, Any]:
            assert pool.world == row.world
            ran.append(str(row))
            return {"row": str(row), "fingerprint": stamp, "seconds": 1.0, **answer(row)}

        monkeypatch.setattr(full, "Pool", FakePool)
        monkeypatch.setattr(full, "run_row", run_row)
        console = Console(file=io.StringIO(), width=160)
        results = full.run_rows(ROWS, tmp_path / "deep" / "parity.jsonl", stamp, console)
        return results, console.file.getvalue(), ran  # type: ignore[attr-defined]

    return of


def good(row: Row) -> dict[str, Any]:
    return GOOD


def test_finished_rows_are_kept(run: Callable[..., Any]) -> None:
    first, said, ran = run(good)
    assert ran == [str(r) for r in ROWS] and "2/2" in said and "00:00 left" in said
    again, said, ran = run(good)
    assert ran == [] and again == first and "2 of 2 rows are finished" in said


def test_a_changed_package_starts_over(run: Callable[..., Any]) -> None:
    run(good)
    assert run(good, "b")[2] == [str(r) for r in ROWS]


def test_failed_rows_run_again(run: Callable[..., Any]) -> None:
    run(lambda row: GOOD | {"passed": row.zero == 1})
    results, _, ran = run(good)
    assert ran == [str(ROWS[1])] and all(map(full.passed, results.values()))


def test_a_line_cut_short_is_left_out(run: Callable[..., Any], tmp_path: Path) -> None:
    run(good)
    path = tmp_path / "deep" / "parity.jsonl"
    path.write_text(path.read_text()[:-20])
    assert run(good)[2] == [str(ROWS[1])]


def test_the_fingerprint_follows_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(full.fivefold, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "deep").mkdir()
    stamps = set()
    for text in ("x = 1", "x = 2"):
        (tmp_path / "deep" / "a.py").write_text(text)
        stamps |= {full.fingerprint(), full.fingerprint()}
    assert len(stamps) == 2


@pytest.mark.parametrize("bad", [{"passed": False, "gradient": 0.5}, {"passed": False, "error": "PoolError: rank 1"}])
def test_status_and_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bad: dict[str, Any],
                          capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    for answers, status in ((GOOD, 0), (GOOD | bad, 1)):
        if "error" in answers:
            answers = {"error": answers["error"]}
        monkeypatch.setattr(full, "Pool", FakePool)
        monkeypatch.setattr(full, "run_row", lambda pool, row, stamp, a=answers: {"row": str(row), "fingerprint": stamp,
                                                                               "seconds": 1.0, **a})  # fmt: skip
        arguments = ["--fresh", "--only", "fsdp2 dense zero1 mb1 none", "--results", str(tmp_path / "p.jsonl")]
        assert full.main(arguments) == status
    said = capsys.readouterr().out
    assert "rows equal one rank" in said and ("5.0e-01" in said or "ERROR" in said)
    assert json.loads((tmp_path / "p.jsonl").read_text().splitlines()[0])["row"] == "fsdp2 dense zero1 mb1 none"
    assert full.main(["--only", "no such row", "--results", str(tmp_path / "p.jsonl")]) == 1


def test_an_error_is_a_result() -> None:
    class Broken:
        def run(self, *_: Any, **__: Any) -> Any:
            raise PoolError("rank 1 of 2 failed\nmore", rank=1, case="c", kind="k")

    result = full.run_row(Broken(), ROWS[0], "a")  # type: ignore[arg-type]
    assert result["error"].startswith("rank 1") and not full.passed(result)
    assert full.describe(result) == f"ERROR  {ROWS[0]}: rank 1 of 2 failed"
