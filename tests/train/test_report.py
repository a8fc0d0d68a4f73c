"""What a run reports: keys, rates that do not count evaluations, norms."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rich.console
import torch

from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool import Pool
from fivefold.observe.console import Console
from fivefold.observe.recorder import SpanRecorder
from fivefold.train import report
from fivefold.train.evaluate import Evaluation
from fivefold.train.report import Reporting, parameter_norms
from fivefold.train.state import TrainState, build_state
from fivefold.train.step import StepStats, train_step
from tests.parity.grid import row
from tests.train import spans
from tests.wrap.cases import batches


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


def one_step(microbatches: int = 1, **changes: Any) -> tuple[TrainState, StepStats]:
    config = row("single", "moe", 1, microbatches, train__steps=20, **changes).config
    state = build_state(config, Mesh.single(recorder=SpanRecorder()))
    source = batches(config, state.mesh)
    stats = train_step(state, source.batch(source.rows(1)))
    source.close()
    return state, stats


def reporting(state: TrainState, folder: Path) -> tuple[Reporting, io.StringIO]:
    text = io.StringIO()
    console = Console(20, plain=True, console=rich.console.Console(file=text, width=200))
    return Reporting(state.config, state.mesh, folder, console), text


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_keys_of_a_step_and_of_an_evaluation(tmp_path: Path) -> None:
    state, stats = one_step(metrics__tensorboard=False, metrics__norms=True)
    told, text = reporting(state, tmp_path)
    told.header(state, tmp_path)
    told.start(0)
    told.step(state, stats, 0.0)
    told.evaluation(1, Evaluation(2.0, 1.5, 59))
    told.summary({"before": Evaluation(3.0, 2.5, 59), "after": Evaluation(2.0, 1.5, 59)}, {"gzip -9": 2.25})
    told.close()
    step, evaluation = lines(tmp_path)
    assert {
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "targets",
        "tokens_per_s",
        "step_s",
        "model_flops_per_s",
        "mfu",
        "data_wait",
        "largest_rank_loss",
        "memory_bytes",
        "expert_load",
        "balance_loss",
        "z_loss",
        "grad_norms",
        "weight_norms",
    } <= step.keys()
    assert step["step"] == 1 and step["loss"] == stats.loss.item()
    assert step["tokens"] == 8 * 16 and step["targets"] == 59
    assert step["expert_load"].keys() == {f"layers.{i}.ffn" for i in (1, 2, 3)}
    assert min(step["expert_load"].values()) >= 1
    assert step["largest_rank_loss"] == pytest.approx(step["loss"]) and step["mfu"] is None
    assert evaluation == {"step": 1, "eval_loss": 2.0, "eval_bits_per_byte": 1.5, "eval_targets": 59}
    said = text.getvalue()
    assert "ZeRO 1" in said and "single on 1 cpu ranks" in said and "2.2500" in said and "compute float64" in said


def test_evaluations_between_reports_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Reports every 10 steps of a second each; after step 5 an evaluation takes 100 s and the clock starts anew."""
    clock = Clock()
    monkeypatch.setattr(report, "time", clock)
    state, stats = one_step(metrics__tensorboard=False, metrics__every=10)
    told, _ = reporting(state, tmp_path)
    told.start(0)
    for step in range(1, 21):
        clock.now += 1.0
        state.step = step
        told.step(state, stats, 0.25)
        if step == 5:
            clock.now += 100.0
            told.start(step)
    told.close()
    found = lines(tmp_path)
    assert [line["step"] for line in found] == [1, 10, 20]
    assert [line["step_s"] for line in found] == pytest.approx([1.0] * 3)
    assert [line["tokens_per_s"] for line in found] == pytest.approx([128.0] * 3)
    assert [line["data_wait"] for line in found] == pytest.approx([0.25] * 3)


def test_norms_of_every_parameter() -> None:
    state, _ = one_step()
    norms = parameter_norms(state)
    for s in state.shards:
        assert s.value.grad is not None
        assert norms["grad_norms"][s.piece.name] == pytest.approx(s.value.grad.norm().item())  # type: ignore[index]
        assert norms["weight_norms"][s.piece.name] == pytest.approx(s.piece.data.norm().item())  # type: ignore[index]


def test_the_first_the_last_and_every_nth_step_report(tmp_path: Path) -> None:
    state, stats = one_step(metrics__tensorboard=False, metrics__every=7)
    told, _ = reporting(state, tmp_path)
    told.start(0)
    for step in range(1, 21):
        state.step = step
        told.step(state, stats, 0.0)
    told.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 7, 14, 20]
    assert torch.isfinite(torch.tensor([line["tokens_per_s"] for line in lines(tmp_path)])).all()


def actions(path: Path, rank: int) -> list[str]:
    """The actions of a ``pp`` rank in a trace, in order."""
    events = json.loads(path.read_text())["traceEvents"]
    return [e["name"] for e in events if (e["ph"], e["pid"], e.get("tid")) == ("X", rank, 0)]


def test_one_ranks_timeline_of_each_reported_step(tmp_path: Path) -> None:
    state, stats = one_step(2, metrics__tensorboard=False, metrics__every=7, metrics__timeline=True)
    told, _ = reporting(state, tmp_path)
    told.start(0)
    for state.step in (1, 2, 20):
        told.step(state, stats, 0.0)
    told.close()
    assert sorted(path.name for path in (tmp_path / "timeline").iterdir()) == ["step1.json", "step20.json"]
    assert actions(tmp_path / "timeline" / "step1.json", 0) == ["F0.0", "B0.0", "F0.1", "B0.1"]
    assert not any("bubble" in line for line in lines(tmp_path))


def test_the_bubble_of_a_pipeline_is_that_of_its_timeline(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    config = row("pp2", "moe", 1, 4, metrics__timeline=True, metrics__every=2, metrics__tensorboard=False).config
    pool(2).run(spans.reported, config, tmp_path, 2)
    found = lines(tmp_path)
    assert [line["step"] for line in found] == [1, 2]
    for line in found:
        path = tmp_path / "timeline" / f"step{line['step']}.json"
        assert actions(path, 0) == ["F0.0", "F0.1", "B0.0", "F0.2", "B0.1", "F0.3", "B0.2", "B0.3"]
        assert actions(path, 1) == [f"{kind}1.{m}" for m in range(4) for kind in "FB"]
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X" and e["tid"] == 0]
        busy = [sum(e["dur"] for e in events if e["pid"] == rank) for rank in (0, 1)]
        assert line["bubble"] == pytest.approx(1 - max(busy) / max(e["ts"] + e["dur"] for e in events))
        assert 0 < line["bubble"] < 1


def test_spans_of_all_pipeline_ranks(pool: Callable[[int], Pool]) -> None:
    """Each rank has one span more than the one before it, on a clock of its own."""
    for ranks in pool(4).run(spans.gathered, "pp4"):
        assert [len(spans) for spans in ranks] == [1, 2, 3, 4]
        assert [span.name for span in ranks[2]] == ["F2.0", "F2.1", "F2.2"]
        assert [(span.begin, span.end) for span in ranks[2]] == [(0, 3), (1, 4), (2, 5)]
    assert pool(2).run(spans.gathered, "fsdp2")[1] == [[spans.of(0, 0)]]
