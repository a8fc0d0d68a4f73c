"""Prove that a layout computes what one device computes: same loss, gradients, norm, parameters and expert bookkeeping.

Both runs start from the same configuration, see the same rows, hard on purpose (:mod:`fivefold.data.synthetic`), and
take the same few optimizer steps. Gradients are compared and not only losses: Adam hides a gradient of the wrong scale.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config.dims import ParallelDims
from ..config.errors import ConfigError
from ..config.parts import ContextConfig, PipelineConfig
from ..config.run import RunConfig
from ..data.synthetic import Synthetic
from ..mesh.mesh import Mesh
from ..mesh.pool import Pool
from ..mesh.pool_worker import RankContext
from ..schedule.plan import check_run, plan
from ..train.balance import routing_biases
from ..train.batch import Batches
from ..train.state import build_state
from ..train.step import train_step
from ..wrap.buffer import Shard
from .compare import Watcher, gather_whole, reduce_everywhere, relative_error, worst

TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
"""Largest error that passes, by dtype."""


@dataclass(frozen=True)
class Report:
    """How far a layout is from one rank. Errors are ``max|a-b| / max|b|`` over a whole tensor, the largest found."""

    layout: str
    dtype: str
    steps: int
    loss: float
    grad_norm: float
    gradient: float
    """Of the first step's gradients, before clipping."""
    parameter: float
    """Of the parameters after the last step."""
    experts: bool
    """Whether expert counts and routing biases are equal bit for bit, on every rank."""
    replicas: bool
    """Whether all copies of an element are equal bit for bit."""
    owners: bool
    """Whether each element is stored once in a replica."""
    worst: tuple[str, float]
    """The parameter with the largest error, of gradient or value, and that error."""
    first_difference: str | None
    """The first part whose output, or else the last whose output's gradient, is beyond the tolerance."""
    passed: bool


@dataclass(frozen=True)
class Outcome:
    """What a run did. Tensors are whole, the same on every rank."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    experts: dict[str, list[Tensor]]
    owners: bool
    replicas: bool
    seen: dict[tuple[str, str], Tensor]
    """Each part's output and gradient in the first step, where they were watched."""


def one_rank(config: RunConfig) -> RunConfig:
    """The same run on one rank, in one piece, nothing recomputed or compiled: the oracle."""
    plain = {"microbatches": 1, "recompute": "none", "compile": "none", "zero": 1}
    train = config.train.model_copy(update=plain)
    return config.model_copy(
        update={"parallel": "single", "train": train, "pipeline": PipelineConfig(), "context": ContextConfig()}
    )


def run_steps(config: RunConfig, mesh: Mesh, steps: int, *, documents: bool = True, watch: bool = False) -> Outcome:
    """Train ``steps`` steps on the hard rows and gather what happened.

    Args:
        documents: whether rows hold several documents.
        watch: whether every part's output and its gradient are kept.
    """
    watcher = Watcher() if watch else None
    state = build_state(config, mesh, watcher)
    data, seed = config.data, config.train.seed
    source = Synthetic(config.model.vocab_size, data.sequence_length, data.batch_size, seed, documents=documents)
    batches = Batches(source, config, mesh)
    losses, norms, experts = [], [], {name: [] for name in state.expert_layers}
    first, seen = None, {}
    for step in range(1, steps + 1):
        batch = batches.batch(batches.rows(step))
        stats = train_step(state, batch)
        losses.append(stats.loss.item())
        norms.append(stats.grad_norm)
        if first is None:
            first = gather_whole(state, partial(_unclipped, norm=stats.grad_norm, max_norm=config.optim.max_norm))
            seen = watcher.whole(mesh, batch.microbatches) if watcher else {}
        for name, bias in routing_biases(state.experts, state.expert_layers, mesh).items():
            experts[name] += [stats.load.counts[name].clone(), bias.clone()]
    batches.close()
    assert first is not None
    last = gather_whole(state, lambda s: s.piece.data)
    return Outcome(losses, norms, first.tensors, last.tensors, experts, first.owners and last.owners,
                   first.replicas and last.replicas, seen)  # fmt: skip


def _unclipped(shard: Shard, norm: float, max_norm: float) -> Tensor:
    """The gradient as it was before a clipping to ``max_norm`` (0: none)."""
    clipped = shard.value.grad
    if clipped is None:
        return torch.zeros_like(shard.piece.data)
    return clipped.detach() * max(1.0, norm / max_norm if max_norm else 1.0)


def compare(config: RunConfig, outcome: Outcome, oracle: Outcome, experts: bool, tolerance: float) -> Report:
    """The report of ``outcome`` against ``oracle``."""
    loss = max(_scalar_error(a, b) for a, b in zip(outcome.losses, oracle.losses, strict=True))
    norm = max(_scalar_error(a, b) for a, b in zip(outcome.norms, oracle.norms, strict=True))
    gradient, parameter = worst(outcome.gradients, oracle.gradients), worst(outcome.parameters, oracle.parameters)
    close = max(loss, norm, gradient[1], parameter[1]) <= tolerance
    return Report(
        layout=config.parallel,
        dtype=config.train.dtype,
        steps=len(outcome.losses),
        loss=loss,
        grad_norm=norm,
        gradient=gradient[1],
        parameter=parameter[1],
        experts=experts,
        replicas=outcome.replicas,
        owners=outcome.owners,
        worst=max(gradient, parameter, key=lambda w: w[1]),
        first_difference=None,
        passed=close and experts and outcome.owners and outcome.replicas,
    )


def _scalar_error(a: float, b: float) -> float:
    return relative_error(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))


def _agree(values: dict[str, list[Tensor]], mesh: Mesh) -> bool:
    """Whether all ranks hold the same bits."""
    flat = (
        torch.cat([x.double() for held in values.values() for x in held])
        if values
        else torch.zeros(1, dtype=torch.float64)
    )
    high, low = flat.clone(), flat.clone()
    reduce_everywhere(high, mesh, "max")
    reduce_everywhere(low, mesh, "min")
    return torch.equal(high, low)


def first_difference(outcome: Outcome, oracle: Outcome, tolerance: float) -> str | None:
    """The first part whose output differs, or else the one where a gradient that differs arose."""
    for (name, kind), b in oracle.seen.items():
        a = outcome.seen.get((name, kind))
        if a is None or a.shape != b.shape or relative_error(a, b) > tolerance:
            return name if kind == "activation" else f"{name} (gradient of its output)"
    return None


def verify_rank(context: RankContext, config: RunConfig, steps: int, tolerance: float,
                documents: bool = True) -> Report | None:  # fmt: skip
    """One rank's part of comparing ``config`` with one rank; rank 0 runs the oracle and judges.

    Only when something differs are both run again, for a step, with every part watched.
    """
    mesh = context.mesh(config.parallel, ends=plan(config).ends)
    outcome = run_steps(config, mesh, steps, documents=documents)
    experts = _agree(outcome.experts, mesh)
    report = None
    if mesh.rank == 0:
        oracle = _oracle(context, config, steps, documents)
        same = all(torch.equal(x, y) for name, held in oracle.experts.items()
                   for x, y in zip(outcome.experts[name], held, strict=True))  # fmt: skip
        report = compare(config, outcome, oracle, experts and same, tolerance)
    failed = torch.tensor(float(report is not None and not report.passed))
    reduce_everywhere(failed, mesh, "sum")
    if failed:
        again = run_steps(config, mesh, 1, documents=documents, watch=True)
        if report is not None:
            oracle = run_steps(one_rank(config), Mesh.single(), 1, documents=documents, watch=True)
            report = replace(report, first_difference=first_difference(again, oracle, tolerance))
    return report


def _oracle(context: RankContext, config: RunConfig, steps: int, documents: bool) -> Outcome:
    """The one-rank run, kept for the next layout of the same configuration."""
    plain = one_rank(config)
    key = f"{plain.model_dump_json()} {steps} {documents}"
    if key not in context.cache:
        context.cache.clear()
        context.cache[key] = run_steps(plain, Mesh.single(), steps, documents=documents)
    return context.cache[key]


def check_verifiable(config: RunConfig) -> None:
    """Refuse what cannot be compared.

    Raises:
        ConfigError: for a dtype without a tolerance.
    """
    if config.train.dtype not in TOLERANCE:
        raise ConfigError([f"train.dtype={config.train.dtype} cannot be verified: rounding hides mistakes. "
                           f"Use one of {', '.join(TOLERANCE)}."])  # fmt: skip


def forked_pool(world: int) -> Pool:
    """Ranks forked from this process; ten minutes for one layout."""
    return Pool(world, timeout_s=600, method="fork")


def verify(
    config: RunConfig,
    layouts: Sequence[str],
    *,
    documents: bool = True,
    tolerance: float | None = None,
    progress: Callable[[Report], None] | None = None,
    pools: Callable[[int], Pool] = forked_pool,
) -> list[Report]:
    """Compare each layout of ``config`` with one rank, layouts of one size in one pool of local processes.

    Args:
        config: ``train.steps`` and ``train.dtype`` say how long and how exactly.
        layouts: layout strings.
        documents: whether rows hold several documents, which attention must not cross.
        tolerance: largest error that passes; by default that of the dtype.
        progress: called with each report as it comes.
        pools: makes the pool of so many ranks; by default forked from this process, which must not have run a torch
            operator yet.

    Raises:
        ConfigError: if the dtype cannot be verified, or a layout does not fit the configuration.
    """
    check_verifiable(config)
    problems = [p for layout in layouts for p in check_run(config.model_copy(update={"parallel": layout}))]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    limit = TOLERANCE[config.train.dtype] if tolerance is None else tolerance
    cases = [config.model_copy(update={"parallel": str(ParallelDims.parse(layout))}) for layout in layouts]
    reports: dict[int, Report] = {}
    for world in sorted({c.dims.world for c in cases}):
        with pools(world) as pool:
            for i in (i for i, c in enumerate(cases) if c.dims.world == world):
                reports[i] = pool.run(verify_rank, cases[i], config.train.steps, limit, documents)[0]
                if progress:
                    progress(reports[i])
    return [reports[i] for i in range(len(cases))]


def as_json(reports: Sequence[Report]) -> str:
    """The reports as JSON: one object, or a list of several."""
    rows: list[dict[str, Any]] = [asdict(r) for r in reports]
    return json.dumps(rows[0] if len(rows) == 1 else rows, indent=2)
