"""Reporters: what they write can be read back."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fivefold.observe.metrics import JsonlReporter, Reporters, WandbReporter, scalars
from fivefold.observe.tensorboard import TensorBoardReporter

VALUES = {"loss": 2.5, "tokens": 4096, "expert_load": [1.5, 2.0], "norms": {"head": {"grad": 0.25}}, "layout": "fsdp2"}
FLAT = {"loss": 2.5, "tokens": 4096, "expert_load/0": 1.5, "expert_load/1": 2.0, "norms/head/grad": 0.25}


def strict_lines(path):
    """The file's objects, refusing what JSON does not have."""

    def refuse(name):
        raise ValueError(name)

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_scalars_flatten_and_leave_text_out():
    assert dict(scalars(VALUES)) == FLAT
    assert dict(scalars({"a": torch.tensor([1.0, 2.0]), "b": np.float32(3), "c": None, "d": (4, [5])})) == {
        "a/0": 1.0,
        "a/1": 2.0,
        "b": 3.0,
        "d/0": 4.0,
        "d/1/0": 5.0,
    }


def test_jsonl_is_valid_and_readable_at_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    reporter = JsonlReporter(path)
    reporter.report(1, VALUES)
    assert strict_lines(path) == [{"step": 1, **VALUES}]  # before any close
    assert path.read_text().startswith('{"step": 1, "loss": 2.5')
    reporter.report(2, {"loss": math.nan, "grad_norm": torch.tensor(math.inf), "expert_load": [-math.inf, np.int64(3)]})
    reporter.close()
    reporter.close()
    line = strict_lines(path)[1]
    assert line == {"step": 2, "loss": "NaN", "grad_norm": "Infinity", "expert_load": ["-Infinity", 3]}
    assert math.isnan(float(line["loss"]))


def test_jsonl_goes_on_after_an_unfinished_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    reporter = JsonlReporter(path)
    reporter.report(3, {"loss": 1.0})
    reporter.close()
    again = JsonlReporter(path)
    again.report(4, {})
    again.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2, "lo\n{"step": 3, "loss": 1.0}\n{"step": 4}\n'


def test_tensorboard_reads_back(tmp_path):
    reporter = TensorBoardReporter(tmp_path / "events")
    reporter.report(1, VALUES)
    reporter.report(2, {"loss": torch.tensor(1.25), "grad_norm": math.nan})
    reporter.close()
    reporter.close()
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {*FLAT, "grad_norm"}
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.5), (2, 1.25)]
    assert [(e.step, e.value) for e in events.Scalars("norms/head/grad")] == [(1, 0.25)]
    assert math.isnan(events.Scalars("grad_norm")[0].value)
    with pytest.raises(AssertionError):
        reporter.report(3, {})


class FakeWandb(SimpleNamespace):
    """As much of the library as the reporter uses."""

    def init(self, **options):
        self.options, self.logged, self.finished = options, [], 0
        return SimpleNamespace(log=lambda values, step: self.logged.append((step, values)), finish=self.finish)

    def finish(self):
        self.finished += 1


def test_wandb_gets_flat_numbers(tmp_path):
    wandb = FakeWandb()
    reporter = WandbReporter(wandb, "project", "run", {"lr": 1e-3}, tmp_path)  # type: ignore[arg-type]
    reporter.report(7, VALUES)
    reporter.close()
    reporter.close()
    assert wandb.options == {"project": "project", "name": "run", "config": {"lr": 1e-3}, "dir": str(tmp_path)}
    assert wandb.logged == [(7, FLAT)]
    assert wandb.finished == 1


class Memory:
    """A reporter that keeps what it got, and may fail to close."""

    def __init__(self, broken=False):
        self.seen, self.closed, self.broken = [], False, broken

    def report(self, step, values):
        self.seen.append((step, values))

    def close(self):
        self.closed = True
        if self.broken:
            raise OSError("disk full")


def test_reporters_fan_out_and_close_all():
    parts = [Memory(), Memory(broken=True), Memory()]
    reporters = Reporters(parts)
    reporters.report(1, {"loss": torch.tensor(1.0)})
    with pytest.raises(OSError, match="disk full"):
        reporters.close()
    assert [part.seen for part in parts] == [[(1, {"loss": 1.0})]] * 3
    assert type(parts[0].seen[0][1]["loss"]) is float
    assert all(part.closed for part in parts)
    Reporters().report(1, {})
    Reporters().close()
