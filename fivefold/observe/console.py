"""What the user of a run reads: a progress bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Self

import rich.console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

PACE_REPORTS = 20
"""Reports over which the pace behind the time left is measured."""
REFRESH_S = 0.2
"""Shortest time between two drawings of the bar. Each takes about a millisecond of the training process."""


class _Terminal(rich.console.Console):
    """A console that never hides the cursor: a run ended by a signal could not bring it back."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class Console:
    """Header, progress, evaluations, notes and summary of a run. Says nothing unless ``enabled``: on rank 0.

    On a terminal the progress is one bar that moves; elsewhere, in a file or a CI log, it is one line a report.
    """

    def __init__(self, steps: int, *, plain: bool | None = None, enabled: bool = True,
                 console: rich.console.Console | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:  # fmt: skip
        """
        Args:
            steps: the run's last step.
            plain: lines instead of a bar; None decides by whether the console is a terminal.
            console: where to write; standard output by default.
            clock: seconds.
        """
        self.steps, self.enabled = steps, enabled
        self._console = console or _Terminal(highlight=False)
        self.plain = not self._console.is_terminal if plain is None else plain
        self._clock, self._began = clock, clock()
        self._pace: deque[tuple[int, float]] = deque(maxlen=PACE_REPORTS)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._drawn = -math.inf

    def header(self, facts: Mapping[str, str]) -> None:
        """Print the run's facts, such as its model and layout."""
        if not self.enabled:
            return
        if self.plain:
            width = max(map(len, facts), default=0)
            for key, value in facts.items():
                self._line(f"{key:<{width}}  {value}")
        else:
            grid = Table.grid(padding=(0, 2))
            for key, value in facts.items():
                grid.add_row(Text(key, "bold"), Text(value))
            self._console.print(Panel(grid, title="fivefold", title_align="left", expand=False))

    def step(self, step: int, values: Mapping[str, object] | None = None) -> None:
        """Move the progress to ``step``; with the values of a report also show those, which takes a line if plain."""
        if not self.enabled:
            return
        if values is not None:
            self._pace.append((step, self._clock()))
        if not self.plain:
            self._bar(step, values)
        elif values is not None:
            times = f"{duration(self._clock() - self._began)} elapsed  {self._left(step)} left"
            self._line(f"step {step:>{len(str(self.steps))}}/{self.steps}  {describe(values)}  {times}")

    def evaluation(self, step: int, values: Mapping[str, object]) -> None:
        """Print what the held-out data gave: ``eval_loss`` and ``eval_bits_per_byte``."""
        self._line(f"eval at step {step}: {describe(values)}", "green")

    def note(self, text: str) -> None:
        """Print a line."""
        self._line(text)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._line(f"warning: {text}", "bold yellow")

    def summary(self, rows: Sequence[Sequence[str]], *, header: Sequence[str] = (), title: str = "") -> None:
        """Print a table, the first column being names; ends the progress bar."""
        self.close()
        if not self.enabled:
            return
        if self.plain:  # a log has no width: never cut what it says
            rows = [header, *rows] if header else rows
            widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
            lines = [f"{row[0]:<{widths[0]}}  " + "  ".join(map(str.rjust, row[1:], widths[1:])) for row in rows]
            for line in [title, *lines] if title else lines:
                self._line(line)
            return
        table = Table(title=Text(title) if title else None, show_header=bool(header), title_justify="left")
        for i in range(max((len(row) for row in [header, *rows]), default=0)):
            table.add_column(header[i] if i < len(header) else "", justify="right" if i else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        self._console.print(table)

    def close(self) -> None:
        """End the progress bar, leaving it as it is. May be called again."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, text: str, style: str = "") -> None:
        if self.enabled:
            self._console.print(Text(text, style), soft_wrap=True)

    def _left(self, step: int) -> str:
        """The time left at the pace of the last reports. The first step, which compiles and warms up, is not in it."""
        (first, began), (last, now) = (self._pace[0], self._pace[-1]) if self._pace else ((0, 0.0), (0, 0.0))
        if step >= self.steps:
            return duration(0)
        return duration((now - began) / (last - first) * (self.steps - step)) if last > first else "--:--"

    def _bar(self, step: int, values: Mapping[str, object] | None) -> None:
        if self._progress is None:
            self._progress = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[times]}", style="cyan", markup=False),
                TextColumn("{task.fields[values]}", markup=False),
                console=self._console,
                auto_refresh=False,  # no thread beside training
            )
            self._task = self._progress.add_task("", total=self.steps, times="", values="")
        changed: dict[str, Any] = {"times": f"{duration(self._clock() - self._began)}<{self._left(step)}"}
        if values is not None:
            changed["values"] = describe(values, brief=True)
        self._progress.update(self._task, completed=step, **changed)
        if values is not None or self._clock() - self._drawn >= REFRESH_S:
            self._drawn = self._clock()
            self._progress.start()  # nothing if it has; here, so that its first frame has something to show
            self._progress.refresh()


def duration(seconds: float) -> str:
    """``1:02:03`` or ``02:03``."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m:02}:{s:02}"


def quantity(value: float) -> str:
    """A number with a decimal prefix and three digits: ``12.3k``, ``671G``."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.3g}{prefix}"
    return f"{value:.3g}"


def size(n_bytes: float) -> str:
    """Bytes with a binary prefix: ``1.50 GiB``."""
    for power, prefix in ((40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
        if abs(n_bytes) >= 2**power:
            return f"{n_bytes / 2**power:.2f} {prefix}B"
    return f"{n_bytes:.0f} B"


# What a report shows, in this order, if it is there: key, how it is written, whether a narrow bar shows it too.
_SHOWN: tuple[tuple[str, Callable[[float], str], bool], ...] = (
    ("loss", lambda x: f"loss {x:.4f} nats", True),
    ("eval_loss", lambda x: f"loss {x:.4f} nats", True),
    ("eval_bits_per_byte", lambda x: f"{x:.4f} bits/byte", True),
    ("grad_norm", lambda x: f"grad {x:.3g}", False),
    ("lr", lambda x: f"lr {x:.2e}", False),
    ("tokens_per_s", lambda x: f"{quantity(x)} tokens/s", True),
    ("mfu", lambda x: f"MFU {x:.1%}", True),
    ("bubble", lambda x: f"bubble {x:.1%}", False),
    ("memory_bytes", size, False),
    ("data_wait", lambda x: f"data {x:.0%}", False),
)


def describe(values: Mapping[str, object], *, brief: bool = False) -> str:
    """The known values in one line, in a fixed order; unknown and missing ones are left out."""
    words = []
    for key, write, in_brief in _SHOWN:
        value = values.get(key)
        if value is not None and (in_brief or not brief):
            number = float(value)  # type: ignore[arg-type]
            words.append(write(number) if math.isfinite(number) else f"{key} {number}")
    return "  ".join(words)
