"""What the tests of the training run do on each rank of a pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor

from fivefold.config.run import RunConfig
from fivefold.data.synthetic import Synthetic
from fivefold.mesh.pool_worker import RankContext
from fivefold.schedule.plan import plan
from fivefold.tools.compare import Whole, gather_whole
from fivefold.train import initial
from fivefold.train.balance import routing_biases
from fivefold.train.evaluate import Evaluation, PositionLoss, evaluate, loss_by_position
from fivefold.train.gradients import NonFiniteGradient
from fivefold.train.save import save_weights
from fivefold.train.state import TrainState, build_state
from fivefold.train.step import train_step
from fivefold.wrap.buffer import Buffer
from tests.wrap.cases import batches, storage_bytes


def train(state: TrainState, steps: int) -> list[float]:
    """Steps on the hard rows; their losses."""
    source, losses = batches(state.config, state.mesh), []
    for step in range(state.step + 1, state.step + steps + 1):
        losses.append(train_step(state, source.batch(source.rows(step))).loss.item())
    source.close()
    return losses


def losses(context: RankContext, config: RunConfig, steps: int) -> list[float]:
    """Losses of a run."""
    return train(build_state(config, context.mesh(config.parallel, ends=plan(config).ends)), steps)


def initial_weights(context: RankContext, config: RunConfig) -> Whole:
    """Whole parameters before the first step."""
    return gather_whole(
        build_state(config, context.mesh(config.parallel, ends=plan(config).ends)), lambda s: s.piece.data
    )


def everything(state: TrainState) -> dict[str, Tensor]:
    """Copies of all that a step may change on this rank."""
    held = {f"value {i}": s.piece.data.clone() for i, s in enumerate(state.shards)}
    for name, moe in state.experts.items():
        held |= {f"{name} {n}": getattr(moe, n).clone() for n in ("bias", "load", "balance_loss", "z_loss")}
    for i, moments in enumerate(state.optimizer.state.values() if state.optimizer else ()):
        held |= {f"{n} {i}": x.clone() for n, x in moments.items()}
    return held


def gradients(state: TrainState) -> dict[str, Tensor]:
    return {f"gradient {i}": s.value.grad.clone() for i, s in enumerate(state.shards) if s.value.grad is not None}


def changed_names(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    """What is not equal bit for bit."""
    assert before.keys() <= after.keys()
    return [name for name, x in before.items() if not torch.equal(x, after[name])]


@dataclass
class Evaluated:
    """An evaluation between steps."""

    found: Evaluation
    touched: list[str]
    """What the evaluation changed on this rank."""
    gathered_bytes: int
    training: bool
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """Whole, after the steps that follow."""


def evaluated(context: RankContext, config: RunConfig, n_rows: int, between: bool = True) -> Evaluated:
    """Train a step, evaluate ``n_rows`` made-up rows unless ``between`` is off, train another."""
    state = build_state(config, context.mesh(config.parallel, ends=plan(config).ends))
    data = config.data
    heldout = Synthetic(config.model.vocab_size, data.sequence_length, n_rows, config.train.seed + 1).heldout
    train(state, 1)
    before = everything(state) | gradients(state)
    found = evaluate(state, heldout) if between else Evaluation(0.0, 0.0, 0)
    result = Evaluated(
        found=found,
        touched=changed_names(before, everything(state) | gradients(state)),
        gathered_bytes=sum(storage_bytes(stage) for stage in state.stages.values()),
        training=all(m.training for stage in state.stages.values() for m in stage.modules()),
    )
    train(state, 1)
    result.parameters = gather_whole(state, lambda s: s.piece.data).tensors
    return result


def saved(context: RankContext, config: RunConfig, folder: str, steps: int) -> None:
    """Train and write the weights."""
    from pathlib import Path

    state = build_state(config, context.mesh(config.parallel, ends=plan(config).ends))
    train(state, steps)
    save_weights(state, Path(folder))


@dataclass
class Stopped:
    """How a step with a gradient that is not finite ended."""

    message: str
    changed: list[str]
    step: int
    targets: int


def not_finite(context: RankContext, config: RunConfig, rank: int, value: float, name: str) -> Stopped:
    """One good step, then one in which ``value`` is in the gradient of ``name`` on one rank (everywhere if -1)."""
    state = build_state(config, context.mesh(config.parallel, ends=plan(config).ends))
    train(state, 1)
    before, targets = everything(state), state.targets
    real = Buffer._publish

    def publish(self: Buffer) -> None:
        real(self)
        for s in self.shards:
            if s.piece.name == name and rank in (-1, context.rank):
                assert s.value.grad is not None
                s.value.grad[-1] = value

    message = ""
    with patch.object(Buffer, "_publish", publish):
        try:
            train(state, 1)
        except NonFiniteGradient as error:
            message = str(error)
    after = everything(state)
    counters = ("load", "balance_loss", "z_loss")  # a step's counts start with it
    return Stopped(message, [n for n in changed_names(before, after) if not n.endswith(counters)], state.step,
                   state.targets - targets)  # fmt: skip


@dataclass
class Known:
    """What a rank knows of the whole model, and of the experts on all stages after two steps."""

    shapes: list[tuple[str, tuple[int, ...]]]
    expert_layers: list[tuple[str, int]]
    own: list[str]
    """Expert layers of this rank."""
    counts: dict[str, Tensor]
    biases: dict[str, Tensor]
    losses: tuple[float, float]
    imbalance: dict[str, float]


def known(context: RankContext, config: RunConfig) -> Known:
    """Train two steps."""
    state = build_state(config, context.mesh(config.parallel, ends=plan(config).ends))
    source = batches(config, state.mesh)
    load = None
    for step in (1, 2):
        load = train_step(state, source.batch(source.rows(step))).load
    source.close()
    assert load is not None
    biases = routing_biases(state.experts, state.expert_layers, state.mesh)
    return Known(list(state.shapes.items()), list(state.expert_layers.items()), list(state.experts), load.counts,
                 biases, (load.balance_loss.item(), load.z_loss.item()), load.imbalance())  # fmt: skip


def clipped(context: RankContext, config: RunConfig) -> dict[str, Any]:
    """Norm and clipped gradients of a step, whole."""
    state = build_state(config, context.mesh(config.parallel, ends=plan(config).ends))
    source = batches(config, state.mesh)
    stats = train_step(state, source.batch(source.rows(1)))
    source.close()
    whole = gather_whole(state, lambda s: s.value.grad if s.value.grad is not None else torch.zeros_like(s.piece.data))
    return {"norm": stats.grad_norm, "gradients": whole.tensors}


@dataclass
class Started:
    """A state before its first step."""

    step: int
    moments: int
    """Parameters that the optimizer has seen."""
    tensors: dict[str, Tensor]
    """All that ``save_weights`` writes."""
    owners: bool
    replicas: bool


def started(context: RankContext, config: RunConfig) -> Started:
    """Build the state only."""
    state = build_state(config, context.mesh(config.parallel, ends=plan(config).ends))
    whole = gather_whole(state, lambda s: s.piece.data)
    biases = routing_biases(state.experts, state.expert_layers, state.mesh)
    return Started(state.step, len(state.optimizer.state) if state.optimizer else 0,
                   {**whole.tensors, **{f"{name}.bias": bias for name, bias in biases.items()}},
                   whole.owners, whole.replicas)  # fmt: skip


def elements_read(context: RankContext, config: RunConfig) -> int:
    """How many elements of parameters this rank reads while it builds its state."""
    read = 0
    real = initial.safe_open

    class Counting:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = real(*args, **options)

        def __enter__(self) -> Self:
            self.file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.file.__exit__(*error)

        def get_slice(self, name: str) -> Any:
            part = self.file.get_slice(name)

            class Slice:
                def __getitem__(self, place: Any) -> Tensor:
                    nonlocal read
                    found = part[place]
                    read += found.numel()
                    return found

            return Slice()

        def get_tensor(self, name: str) -> Tensor:
            assert name.endswith("ffn.bias")  # whole tensors: routing biases alone
            return self.file.get_tensor(name)

    with patch.object(initial, "safe_open", Counting):
        build_state(config, context.mesh(config.parallel, ends=plan(config).ends))
    return read


@dataclass
class Placed:
    """A loss by position after a step, beside the mean loss of the same rows."""

    found: PositionLoss
    whole: Evaluation
    touched: list[str]
    """What it changed on this rank."""
    gathered_bytes: int


def placed(context: RankContext, config: RunConfig, n_rows: int) -> Placed:
    """Train a step, then evaluate ``n_rows`` made-up rows by position, and as a whole."""
    state = build_state(config, context.mesh(config.parallel, ends=plan(config).ends))
    data = config.data
    heldout = Synthetic(config.model.vocab_size, data.sequence_length, n_rows, config.train.seed + 1).heldout
    train(state, 1)
    before = everything(state) | gradients(state)
    found = loss_by_position(state, heldout)
    gathered_bytes = sum(storage_bytes(stage) for stage in state.stages.values())
    touched = changed_names(before, everything(state) | gradients(state))
    return Placed(found, evaluate(state, heldout), touched, gathered_bytes)
