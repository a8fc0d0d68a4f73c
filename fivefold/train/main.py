"""The training run as each rank lives it: join, build, evaluate, train, evaluate, save, leave."""

from __future__ import annotations

import gc
import time
from functools import partial
from pathlib import Path

import torch

from ..config.run import RunConfig
from ..mesh.mesh import Mesh
from ..mesh.process import join, leave, make_deterministic, set_step_timeouts
from ..mesh.text import gather_text
from ..observe.console import Console
from ..observe.memory import oom_snapshot
from ..observe.profile import Profiler, RangeRecorder
from ..observe.progress import Progress, progress_file
from ..observe.recorder import SpanRecorder
from ..observe.spans import EventClock, Spans
from ..recipes import save
from ..schedule.plan import Plan, plan
from .batch import Batches
from .evaluate import Evaluation, evaluate
from .replan import Replanner
from .report import Reporting
from .save import save_weights
from .source import Opened, open_source
from .state import TrainState, build_state
from .step import train_step


def run(config: RunConfig, recipe: str, run_dir: str) -> None:
    """One rank's whole run. An error leaves at once: the launcher ends the other ranks.

    Args:
        config: checked, its layout's sizes all given.
        recipe: name the configuration came from.
        run_dir: folder of the run; rank 0's counts.
    """
    device = config.train.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.train.deterministic:
        make_deterministic()
    process = join(config.comm, device)
    pipeline = plan(config)
    mesh = Mesh(config.dims, process.rank, device=process.device, recorder=_recorder(config, process.device),
                timeout_s=config.comm.init_timeout_s, ends=pipeline.ends)  # fmt: skip
    folder = Path(gather_text(run_dir, mesh.world, mesh.device)[0])
    if process.rank == 0:  # after all have joined: a later rank would take its own folder for that of another run
        folder.mkdir(parents=True, exist_ok=True)
        save(folder / "config.json", recipe, config)
    progress = Progress(progress_file(folder / "logs", process.rank) if process.world > 1 else None)
    with oom_snapshot(folder / "profile" / f"out-of-memory-rank{process.rank}.pickle"):
        _train(config, mesh, folder, progress, pipeline)
    progress.close()
    leave(process, config.comm.shutdown_timeout_s)


def _recorder(config: RunConfig, device: torch.device) -> SpanRecorder:
    """What records the run: the schedule's actions always, collectives where it is profiled."""
    queues = device.type != "cpu"
    spans = Spans(EventClock(partial(torch.Event, device, enable_timing=True)) if queues else None)
    return RangeRecorder(spans=spans) if config.profile.every else SpanRecorder(spans=spans)


def _train(config: RunConfig, mesh: Mesh, folder: Path, progress: Progress, pipeline: Plan) -> None:
    profiler = Profiler(folder / "profile", config.profile.every, config.profile.ranks, mesh.rank,
                        memory=config.profile.memory, device=mesh.device,
                        recorder=mesh.recorder if isinstance(mesh.recorder, RangeRecorder) else None)  # fmt: skip
    progress.at("building the model")
    state = build_state(config, mesh, progress=progress, pipeline=pipeline)
    source = open_source(config)
    batches = Batches(source.training, config, mesh)
    with Console(config.train.steps, enabled=mesh.rank == 0) as console:
        reporting = Reporting(config, mesh, folder, console)
        reporting.header(state, folder)
        found: dict[str, Evaluation] = {}
        evaluates = config.train.evaluate and source.heldout.n_rows > 0
        if config.train.evaluate and not evaluates:
            console.warn("nothing is evaluated: the data has no held-out documents; prepare it with a larger --heldout")
        if evaluates:
            found["before training"] = _evaluate(state, source, reporting)
        reporting.start(state.step)
        replanner = Replanner(state)
        for step in range(1, config.train.steps + 1):
            _step(state, batches, reporting, profiler)
            if found_faster := replanner.after_step(state):
                console.note(found_faster)
            if step == 1:
                set_step_timeouts(mesh.groups, config.comm.step_timeout_s)
            every = config.train.eval_every
            if evaluates and (step == config.train.steps or (every and step % every == 0)):
                found["after training"] = _evaluate(state, source, reporting)
                reporting.start(state.step)
        reporting.summary(found, source.reference)
        if config.train.save_final:
            save_weights(state, folder / "weights")
            console.note(f"weights: {folder / 'weights'}")
        reporting.close()
    profiler.close()
    batches.close()
    gc.enable()  # a run of one rank lives in its caller's process


def _step(state: TrainState, batches: Batches, reporting: Reporting, profiler: Profiler) -> None:
    """One step with what goes around it: data, garbage collection on the same step everywhere, metrics."""
    step = state.step + 1
    state.run.progress.step(step)
    _collect_garbage(step, state.config.train.gc_every)
    with profiler.step(step):
        asked = time.perf_counter()
        rows = batches.rows(step)
        waited_s = time.perf_counter() - asked
        stats = train_step(state, batches.batch(rows))
    reporting.step(state, stats, waited_s)


def _collect_garbage(step: int, every: int) -> None:
    """Python collects when it likes, and one rank that does makes all others wait; so all collect on the same step."""
    if not every:
        return
    if step == 1:
        gc.disable()
    if step == 1 or step % every == 0:
        gc.collect()


def _evaluate(state: TrainState, source: Opened, reporting: Reporting) -> Evaluation:
    state.run.progress.at("evaluation")
    found = evaluate(state, source.heldout)
    reporting.evaluation(state.step, found)
    return found
