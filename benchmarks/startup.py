"""From the command to the end of the first training step: the ``fivefold`` launcher beside a plain Python process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from .contest import ratio
from .table import Table, seconds

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300.0
PLAIN = ("-c", "from benchmarks.plain import PlainLoop; PlainLoop('llama').step(); print('done', flush=True)")
LAYOUTS = {"plain": None, "single": "single", "fsdp2-tp2": "fsdp2-tp2"}
"""What is started; None is the plain process."""


def start(layout: str | None) -> tuple[float, float]:
    """Start one run of one step in new processes.

    Returns:
        Wall seconds until the first step is done, and CPU seconds of all its processes until they have ended.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = [sys.executable, *(PLAIN if layout is None else _train(layout, folder))]
        begin = time.perf_counter()
        with (Path(folder) / "out.txt").open("w+") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT,
                                       env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})  # fmt: skip
            try:
                while process.poll() is None and not _done(metrics if layout else Path(out.name)):
                    assert time.perf_counter() - begin < LIMIT_S, "no first step within the time limit"
                    time.sleep(0.02)
                wall_s = time.perf_counter() - begin
                status = process.wait(LIMIT_S)
            finally:
                process.kill()
            out.seek(0)
            assert status == 0, f"{' '.join(command)} ended with status {status}:\n{out.read()}"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _train(layout: str, folder: str) -> Sequence[str]:
    return ("-m", "fivefold", "train", "benchmarks/work.py:llama", "--parallel", layout, "--run-dir", folder,
            "--train.steps", "1")  # fmt: skip


def _done(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def measure(rounds: int, say: Callable[[str], None]) -> Table:
    """A row for each way to start, in turns."""
    table = Table("Start-up to the end of the first step (llama), new processes each time",
                  ("what", "wall s", "wall ratio", "CPU s", "CPU ratio"))  # fmt: skip
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in LAYOUTS}
    for i in range(rounds):
        for name, layout in LAYOUTS.items():
            say(f"{name}, round {i + 1} of {rounds}")
            found[name].append(start(layout))
    walls, cpus = ({name: [t[i] for t in times] for name, times in found.items()} for i in (0, 1))
    table.add("plain", seconds(walls["plain"]), "", seconds(cpus["plain"]), "")
    for name in list(LAYOUTS)[1:]:
        wall, cpu = ratio(walls[name], walls["plain"]), ratio(cpus[name], cpus["plain"])
        table.add(f"fivefold train, {name}", seconds(walls[name]), str(wall), seconds(cpus[name]), str(cpu),
                  data={"wall_ratio": asdict(wall), "cpu_ratio": asdict(cpu), "rounds": rounds})  # fmt: skip
    return table
