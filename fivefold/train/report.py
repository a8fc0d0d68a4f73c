"""What rank 0 tells of a run: console, metrics.jsonl, TensorBoard, Weights & Biases."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..config.optional import optional
from ..config.run import RunConfig
from ..mesh.collectives import gather_values, max_values, sum_values
from ..mesh.mesh import Mesh
from ..observe.console import Console, quantity
from ..observe.hardware import mfu, peak_flops
from ..observe.memory import MemoryWatch
from ..observe.metrics import JsonlReporter, Reporter, Reporters, WandbReporter
from ..observe.spans import Span
from ..observe.tensorboard import TensorBoardReporter
from ..observe.timeline import achieved_bubble, busy_and_makespan, from_rows, to_rows, write_trace
from ..schedule.plan import Plan, schedule_name
from ..schedule.simulate import simulate
from .evaluate import Evaluation
from .state import TrainState, precision
from .step import StepStats


class Reporting:
    """Turns steps into metrics. All ranks take part, since peaks are maxima over ranks; rank 0 writes."""

    def __init__(self, config: RunConfig, mesh: Mesh, folder: Path, console: Console) -> None:
        self._config, self._mesh, self._folder, self._console = config, mesh, folder, console
        self._reporters = Reporters(_reporters(config, folder) if mesh.rank == 0 else [])
        self._memory = MemoryWatch(mesh.device)
        dtype = str(precision(config.train, mesh.device).compute).removeprefix("torch.")
        name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else ""
        self._peak = peak_flops(name, dtype) if name else None
        self._flops: float | None = None
        self._since, self._last_step, self._waited_s = time.perf_counter(), 0, 0.0
        self.tokens_per_step = config.data.batch_size * config.data.sequence_length

    def header(self, state: TrainState, folder: Path) -> None:
        """Say what runs."""
        config, mesh = self._config, self._mesh
        total = sum(torch.Size(shape).numel() for shape in state.shapes.values())
        flops = config.model.flops_per_token(config.data.sequence_length)
        self._flops = 6.0 * total if flops is None else flops
        dtypes = precision(config.train, mesh.device)
        self._console.header({
            "model": f"{quantity(total)} parameters, {quantity(self._flops)}FLOP a token forward and backward",
            "layout": f"{mesh.dims} on {mesh.dims.world} {mesh.device.type} ranks, ZeRO {config.zero}",
            "dtypes": ", ".join(f"{use} {_short(getattr(dtypes, use))}" for use in ("compute", "master", "reduce")),
            "batch": f"{config.data.batch_size} x {config.data.sequence_length} tokens a step, "
                     f"{config.train.microbatches} microbatches a data rank, {config.train.steps} steps",
            **_schedule(config, state.pipeline),
            "run folder": str(folder),
        })  # fmt: skip

    def start(self, step: int) -> None:
        """Time steps from here on, where ``step`` of them are done."""
        self._since, self._last_step, self._waited_s = time.perf_counter(), step, 0.0

    def step(self, state: TrainState, stats: StepStats, waited_s: float) -> None:
        """Report step ``state.step`` if it is due: every ``metrics.every``, the first and the last."""
        step, every = state.step, self._config.metrics.every
        self._waited_s += waited_s
        if step % every and step not in (1, self._config.train.steps):
            self._console.step(step)
            return
        spans = self._mesh.recorder.step_spans()
        values = self._values(state, stats, spans)
        self._console.step(step, values)
        self._reporters.report(step, values)
        if self._config.metrics.timeline:
            self._timeline(step, spans, values)
        if warning := self._memory.warning():
            self._console.warn(warning)
        self._memory.reset()
        self.start(step)

    def _values(self, state: TrainState, stats: StepStats, spans: Sequence[Span]) -> dict[str, object]:
        loss = stats.loss.item()  # waits for the device, so that the time below is the steps' own
        elapsed_s, steps = time.perf_counter() - self._since, max(1, state.step - self._last_step)
        rate = steps * self.tokens_per_step / elapsed_s
        own = [*self._memory.values().values(), self._waited_s / elapsed_s, *busy_and_makespan(spans)]
        peaks = torch.tensor(own, dtype=torch.float64, device=self._mesh.device)
        *memory, wait, busy_s, makespan_s = max_values(peaks, self._mesh.world).tolist()
        values: dict[str, object] = {
            "loss": loss,
            "grad_norm": stats.grad_norm,
            "lr": stats.lr,
            "tokens": state.step * self.tokens_per_step,
            "targets": state.targets,
            "tokens_per_s": rate,
            "step_s": elapsed_s / steps,
            "model_flops_per_s": rate * (self._flops or 0.0),
            "mfu": mfu(self._flops or 0.0, rate, self._mesh.dims.world, self._peak),
            "data_wait": wait,
            "largest_rank_loss": stats.largest_rank_loss.item(),
            **dict(zip(self._memory.values(), memory, strict=True)),
        }
        if self._mesh.pp.size > 1:
            values["bubble"] = achieved_bubble(busy_s, makespan_s)
        if stats.load.counts:
            values |= {"expert_load": stats.load.imbalance(), "balance_loss": stats.load.balance_loss.item(),
                       "z_loss": stats.load.z_loss.item()}  # fmt: skip
        if self._config.metrics.norms:
            values |= parameter_norms(state)
        return values

    def _timeline(self, step: int, spans: Sequence[Span], values: Mapping[str, object]) -> None:
        """Write the step's trace: the ``pp`` ranks of the first data rank."""
        ranks = gather_spans(spans, self._mesh)
        if self._mesh.rank == 0:
            facts = {"layout": str(self._mesh.dims), "bubble": values.get("bubble")}
            write_trace(self._folder / "timeline" / f"step{step}.json", ranks, step=step, **facts)

    def evaluation(self, step: int, found: Evaluation) -> None:
        """Report an evaluation."""
        values = {"eval_loss": found.loss, "eval_bits_per_byte": found.bits_per_byte, "eval_targets": found.n_targets}
        self._console.evaluation(step, values)
        self._reporters.report(step, values)

    def summary(self, evaluations: Mapping[str, Evaluation], reference: Mapping[str, float]) -> None:
        """The run's last word: held-out loss before and after, beside general compressors on the same text."""
        rows = [[name, f"{e.loss:.4f}", f"{e.bits_per_byte:.4f}"] for name, e in evaluations.items()]
        rows += [[f"{name}, file by file", "", f"{bits:.4f}"] for name, bits in reference.items()]
        if rows:
            self._console.summary(rows, header=("held-out text", "nats per token", "bits per byte"))

    def close(self) -> None:
        """Write what is held back."""
        self._reporters.close()
        self._console.close()


def gather_spans(spans: Sequence[Span], mesh: Mesh) -> list[list[Span]]:
    """The spans of every rank of this ``pp`` axis, by place on it, in seconds since each one's step began."""
    numbers = to_rows(spans)
    rows = torch.tensor(numbers, dtype=torch.float64).view(len(numbers), 5)
    most = int(max_values(torch.tensor([float(len(rows))], device=mesh.device), mesh.pp).item())
    padded = rows.new_full((most, 5), -1.0)
    padded[: len(rows)] = rows
    return [from_rows(rank) for rank in gather_values(padded.to(mesh.device), mesh.pp).tolist()]


def parameter_norms(state: TrainState) -> dict[str, object]:
    """Gradient (after clipping) and weight norm of every parameter."""
    names = {name: i for i, name in enumerate(state.shapes)}
    squares = torch.zeros(2, len(names), dtype=torch.float64, device=state.mesh.device)
    for s in (s for s in state.shards if s.original):
        if s.value.grad is not None:
            squares[0, names[s.piece.name]] += s.value.grad.double().square().sum()
        squares[1, names[s.piece.name]] += s.piece.data.double().square().sum()
    both = sum_values(squares, state.mesh.join("pp", "fsdp", "cp", "tp")).sqrt().tolist()
    return {
        kind: dict(zip(names, values, strict=True))
        for kind, values in zip(("grad_norms", "weight_norms"), both, strict=True)
    }


def _schedule(config: RunConfig, pipeline: Plan) -> dict[str, str]:
    """The schedule and its bubble, where there is more than one stage."""
    if len(pipeline.owners) == 1:
        return {}
    bubble = simulate(pipeline.table).bubble
    return {"schedule": f"{schedule_name(config)}, {len(pipeline.owners)} stages, bubble {bubble:.1%} at unit costs"}


def _reporters(config: RunConfig, folder: Path) -> list[Reporter]:
    found: list[Reporter] = [JsonlReporter(folder / "metrics.jsonl")]
    if config.metrics.tensorboard:
        found.append(TensorBoardReporter(folder / "tensorboard"))
    if config.metrics.wandb:
        module = optional("wandb", extra="wandb")
        found.append(WandbReporter(module, config.metrics.wandb, folder.name, config.model_dump(mode="json"), folder))
    return found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
