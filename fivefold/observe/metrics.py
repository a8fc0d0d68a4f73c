"""Where the numbers of a step go: reporters that take the same mapping and each write it their way.

Keys that scripts rely on: ``step``, ``loss`` (nats per target token), ``grad_norm``, ``lr``, ``tokens`` (read
so far), ``tokens_per_s``, ``step_s``, ``mfu``, ``memory_bytes``, ``data_wait`` (share of the step), ``bubble`` (with
pp, of the step that reports: the share of the pipeline's time in which even the busiest rank does not compute),
``expert_load`` (largest over mean, one value a layer), ``eval_loss``, ``eval_bits_per_byte``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol


class Reporter(Protocol):
    """Takes the values of a step."""

    def report(self, step: int, values: Mapping[str, object]) -> None:
        """Write ``values``, which may nest mappings and sequences, as those of ``step``."""
        ...

    def close(self) -> None:
        """Write what is still held back. May be called again."""
        ...


def plain(value: object) -> Any:
    """``value`` of Python's own types only: arrays and tensors become numbers or lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # numpy and torch both have it, and it leaves a number where there is one
        return value.tolist()  # type: ignore[attr-defined]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def scalars(values: object, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Name and number of every number inside, names joined by ``/``: ``{"load": [1, 2]}`` has load/0 and load/1."""
    values = plain(values)
    if isinstance(values, dict | list):
        for key, item in values.items() if isinstance(values, dict) else enumerate(values):
            yield from scalars(item, f"{prefix}/{key}" if prefix else str(key))
    elif isinstance(values, int | float):
        yield prefix, float(values)


class JsonlReporter:
    """Appends one JSON object a line to a file, ``step`` first, each line on its way to the disk when it is written.

    JSON has no NaN and no infinity: they become the strings ``NaN``, ``Infinity`` and ``-Infinity``, which ``float``
    reads. A line that a killed run left unfinished is closed, so that it spoils none but itself.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def report(self, step: int, values: Mapping[str, object]) -> None:
        line = json.dumps(_finite({"step": step, **plain(values)}), allow_nan=False)
        self._file.write(line.encode() + b"\n")  # one write a line: a reader never sees half of it

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


class WandbReporter:
    """Logs to a Weights & Biases run, every number under its joined name. The caller imports the library."""

    def __init__(self, wandb: ModuleType, project: str, run_name: str, config: Mapping[str, object],
                 folder: str | Path) -> None:  # fmt: skip
        self._run: Any = wandb.init(project=project, name=run_name, config=dict(config), dir=str(folder))

    def report(self, step: int, values: Mapping[str, object]) -> None:
        self._run.log(dict(scalars(values)), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
        self._run = None


class Reporters:
    """Several reporters as one. An empty list reports nothing."""

    def __init__(self, reporters: Sequence[Reporter] = ()) -> None:
        self._reporters = tuple(reporters)

    def report(self, step: int, values: Mapping[str, object]) -> None:
        values = plain(values)  # a tensor on a GPU is fetched once, not once a reporter
        for reporter in self._reporters:
            reporter.report(step, values)

    def close(self) -> None:
        """Close all, also when one of them fails."""
        with ExitStack() as stack:
            for reporter in self._reporters:
                stack.callback(reporter.close)
