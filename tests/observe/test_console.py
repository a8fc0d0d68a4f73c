"""What the user reads, as lines and on a recorded terminal."""

from __future__ import annotations

import io
import math
import re

import pytest
import rich.console

from fivefold.observe.console import Console, describe, duration, quantity, size

VALUES = {
    "loss": 5.1234567,
    "grad_norm": 1.2345,
    "lr": 3e-4,
    "tokens_per_s": 12345.6,
    "mfu": 0.4567,
    "step_s": 0.1,
    "memory_bytes": 3 * 2**30,
    "data_wait": 0.02,
    "expert_load": [1.2],
}


class Clock:
    """Seconds that pass when told."""

    now = 100.0

    def __call__(self):
        return self.now


def terminal(is_terminal, width=140):
    file = io.StringIO()
    return rich.console.Console(file=file, force_terminal=is_terminal, width=width, record=True, highlight=False)


def test_plain_lines():
    out, clock = terminal(False, width=40), Clock()
    with Console(400, console=out, clock=clock) as console:
        assert console.plain
        console.header({"model": "moe_demo", "layout": "fsdp2-tp2", "run folder": "runs/x [not markup]"})
        clock.now += 5
        console.step(1, VALUES)
        console.step(2)  # nothing to report: no line
        clock.now += 9
        console.step(10, {"loss": 4.0})
        console.evaluation(10, {"eval_loss": 3.5, "eval_bits_per_byte": 1.456})
        console.note("a note that is longer than forty columns, and must stay one line")
        console.warn("hot")
        console.step(400, {"loss": math.nan})
    assert out.export_text().splitlines() == [
        "model       moe_demo",
        "layout      fsdp2-tp2",
        "run folder  runs/x [not markup]",
        "step   1/400  loss 5.1235 nats  grad 1.23  lr 3.00e-04  12.3k tokens/s  MFU 45.7%  3.00 GiB  data 2%  "
        "00:05 elapsed  --:-- left",
        "step  10/400  loss 4.0000 nats  00:14 elapsed  06:30 left",  # a second a step since the first report
        "eval at step 10: loss 3.5000 nats  1.4560 bits/byte",
        "a note that is longer than forty columns, and must stay one line",
        "warning: hot",
        "step 400/400  loss nan  00:14 elapsed  00:00 left",
    ]


def test_plain_summary_is_never_cut():
    out = terminal(False, width=20)
    rows = [("validation bits per byte", "4.1", "2.2"), ("gzip -9", "", "2.41")]
    Console(1, console=out).summary(rows, header=("", "before", "after"), title="[held-out]")
    assert out.export_text().splitlines() == [
        "[held-out]",
        "                          before  after",
        "validation bits per byte     4.1    2.2",
        "gzip -9                            2.41",
    ]


def test_terminal_bar():
    out, clock = terminal(True), Clock()
    with Console(400, console=out, clock=clock) as console:
        assert not console.plain
        console.header({"model": "moe_demo", "layout": "fsdp2-tp2"})
        console.step(1, VALUES)
        clock.now += 9
        console.step(10, VALUES)
        console.evaluation(10, {"eval_bits_per_byte": 1.456})
        clock.now += 1
        console.step(11)
        console.summary([("bits per byte", "1.456")])
    text = out.export_text()
    assert "╭─ fivefold ─" in text
    assert re.search(r"model +moe_demo", text)
    assert re.search(r"step 10/400 .*━ 00:09<06:30 loss 5.1235 nats  12.3k tokens/s  MFU 45.7%", text)
    assert "grad" not in text  # only what fits beside a bar
    assert "eval at step 10: 1.4560 bits/byte" in text
    assert "step 11/400" in text
    assert "step 0/400" not in text
    assert re.search("│ bits per byte │ 1.456 │", text)


def test_the_cursor_stays(monkeypatch):
    """A run that a signal ends cannot bring a hidden cursor back."""
    file = io.StringIO()
    console = Console(2, plain=False)
    console._console.file = file
    monkeypatch.setattr(console._console, "_force_terminal", True)
    console.step(1, VALUES)
    console.close()
    assert "loss" in file.getvalue()
    assert "\x1b[?25l" not in file.getvalue()


def test_other_ranks_say_nothing():
    out = terminal(True)
    with Console(2, console=out, enabled=False) as console:
        console.header({"a": "b"})
        console.step(1, VALUES)
        console.evaluation(1, VALUES)
        console.note("x")
        console.warn("x")
        console.summary([("a", "b")])
    assert out.file.getvalue() == ""  # type: ignore[attr-defined]


@pytest.mark.parametrize(("plain", "lines"), [(True, 2), (False, 0)])
def test_plain_can_be_chosen(plain, lines):
    out = terminal(not plain)
    with Console(2, console=out, plain=plain) as console:
        console.step(1, {"loss": 1.0})
        console.step(2, {"loss": 1.0})
    assert len(re.findall("^step .* left$", out.export_text(), re.MULTILINE)) == lines


def test_words():
    assert [duration(s) for s in (0, 59.6, 3723)] == ["00:00", "01:00", "1:02:03"]
    assert [quantity(x) for x in (12.3, 12345, 671.03e9)] == ["12.3", "12.3k", "671G"]
    assert [size(x) for x in (12, 1536, 3 * 2**40)] == ["12 B", "1.50 KiB", "3.00 TiB"]
    assert describe({"mfu": None, "loss": math.inf, "other": 1.0}) == "loss inf"


def test_a_pipelines_bubble_is_shown_between_rate_and_memory() -> None:
    values = {"memory_bytes": 2**30, "bubble": 0.25, "tokens_per_s": 1000.0}
    assert describe(values) == "1k tokens/s  bubble 25.0%  1.00 GiB"
    assert "bubble" not in describe(values, brief=True)
