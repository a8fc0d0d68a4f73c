"""What the tests of the engine run on each rank of a pool."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from fivefold.config.run import RunConfig
from fivefold.data.synthetic import Synthetic
from fivefold.mesh.collectives import sum_values
from fivefold.mesh.init import initial_values
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.parameter import Init, attach, parameter, spec_of
from fivefold.mesh.pool_worker import RankContext
from fivefold.mesh.run import Run
from fivefold.observe.recorder import FlightRecorder
from fivefold.train.batch import Batches
from fivefold.train.state import TrainState, build_state
from fivefold.train.step import train_step
from fivefold.wrap.buffer import Precision
from fivefold.wrap.data import Stage


def batches(config: RunConfig, mesh: Mesh) -> Batches:
    """The hard rows of a configuration."""
    data, seed = config.data, config.train.seed
    return Batches(Synthetic(config.model.vocab_size, data.sequence_length, data.batch_size, seed), config, mesh)


def stage_of(state: TrainState) -> Stage:
    (stage,) = state.stages.values()
    return stage


def whole_value(p: nn.Parameter, name: str, seed: int) -> Tensor:
    """This rank's block of a parameter as its initial values are defined, with zeros where it is padded. float64."""
    spec = spec_of(p)
    index = torch.arange(torch.Size(spec.global_shape).numel()).view(spec.global_shape)
    whole = initial_values(spec.init, seed, spec.init_name or name, index)
    for dim, (start, size) in enumerate(zip(spec.offset, p.shape, strict=True)):
        part = whole.narrow(dim, start, max(0, min(size, whole.shape[dim] - start)))
        shape = list(part.shape)
        shape[dim] = size - shape[dim]
        whole = torch.cat([part, part.new_zeros(shape)], dim)
    return whole


@dataclass
class Stored:
    """What one rank's engine holds after it was built."""

    pieces: list[tuple[str, int, int, int]]
    """Name, start, stop and row of each piece."""
    elements: int
    """Of all parameters of this rank, padding of the vocabulary left out."""
    capacity: int
    """Of all whole buffers."""
    padding: int
    """Told by the arrangements."""
    wrong: list[str]
    """Parameters whose gathered values are not their initial ones."""
    bytes_before: int
    bytes_gathered: int
    bytes_after: int
    whole_bytes: int


def storage_bytes(stage: Stage) -> int:
    """Bytes of gathered parameters that exist now, beside the shards."""
    return sum(b._storage.nbytes() for b in stage.buffers if not b.stored_as_used)


def stored(context: RankContext, config: RunConfig) -> Stored:
    """Build the engine, gather everything, compare it with the definition of the initial values, and free it."""
    mesh = context.mesh(config.parallel)
    stage = stage_of(build_state(config, mesh))
    before = storage_bytes(stage)
    units = [*stage.units, stage._shared]
    for unit in units:
        unit.unshard()
    gathered, wrong = storage_bytes(stage), []
    for b in stage.buffers:
        for entry, p in zip(b.entries, b.params, strict=True):
            if not torch.equal(p.detach().double(), whole_value(p, entry.name, config.train.seed).to(p.dtype).double()):
                wrong.append(entry.name)
    for unit in units:
        unit.reshard()
    pieces = [(s.piece.name, s.piece.start, s.piece.stop, s.piece.block_size[-1] if len(s.piece.block_size) > 1 else 1)
              for s in stage.shards]  # fmt: skip
    return Stored(
        pieces=pieces,
        elements=sum(p.numel() for b in stage.buffers for p in b.params),
        capacity=sum(b.per_rank * b.axis.size for b in stage.buffers),
        padding=sum(b.arrangement.padding for b in stage.buffers),
        wrong=wrong,
        bytes_before=before,
        bytes_gathered=gathered,
        bytes_after=storage_bytes(stage),
        whole_bytes=sum(b.per_rank * b.axis.size * b.compute.itemsize for b in stage.buffers if not b.stored_as_used),
    )


@dataclass
class Traffic:
    """What one rank saw of a step."""

    events: list[dict[str, Any]]
    buffers: list[tuple[str, int, int, int, bool]]
    """Unit, size of the storage axis, elements a rank, bytes an element as gathered, whether it trains."""
    ddp: int
    master_bytes: int
    reduce_bytes: int
    held: dict[str, list[bool]]
    """By part: which units were gathered when the part's output was ready."""
    dtypes: dict[str, str]
    losses: list[float]
    state_dtypes: set[str]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def traffic(context: RankContext, config: RunConfig, steps: int = 1) -> Traffic:
    """Run steps, recording the last one's events."""
    recorder = FlightRecorder()
    mesh = context.mesh(config.parallel, recorder)
    held: dict[str, list[bool]] = {}
    stages: list[Stage] = []
    dtypes: dict[str, str] = {}

    def watch(name: str, x: Tensor) -> None:
        held[name] = [bool(u.buffers) and all(b.gathered for b in u.buffers) for u in stages[0].units]
        dtypes[name] = _name(x.dtype)

    state = build_state(config, mesh, watch)
    stages.append(stage_of(state))
    source, losses = batches(config, mesh), []
    for step in range(1, steps + 1):
        batch = source.batch(source.rows(step))
        recorder.clear()
        losses.append(train_step(state, batch).loss.item())
    source.close()
    buffers = [(b._unit, b.axis.size, b.per_rank, b.compute.itemsize, b.trainable) for b in stages[0].buffers]
    one = stages[0].buffers[0]
    optimizer = state.optimizer.state.values() if state.optimizer else ()
    kinds = {_name(x.dtype) for held in optimizer for key, x in held.items() if key != "step"}
    return Traffic([asdict(e) for e in recorder.events], buffers, mesh.ddp.size, one.precision.master.itemsize,
                   one.precision.reduce.itemsize, held, dtypes, losses, kinds)  # fmt: skip


# ---- a stage of hand-made parts --------------------------------------------------------------------------------------


class Product(nn.Module):
    """``x * wide * narrow``, where ``narrow`` is computed in float32 whatever the run's dtype is; ``idle`` unused."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.wide = parameter(mesh, SHAPES["wide"], (None, None), Init(std=1.0))
        self.narrow = parameter(mesh, SHAPES["narrow"], (None, None), Init(std=1.0))
        self.idle = parameter(mesh, SHAPES["idle"], (None, None), Init(std=1.0))
        self.still = parameter(mesh, SHAPES["still"], (None, None), Init(std=1.0))
        attach(self.narrow, replace(spec_of(self.narrow), dtype=torch.float32))
        self.still.requires_grad_(False)

    def forward(self, x: None, mb: Tensor) -> Tensor:
        assert self.narrow.dtype == torch.float32
        return (mb * self.wide * self.narrow).sum() * self.still.sum()


SHAPES = {"wide": (6, 5), "narrow": (6, 5), "idle": (4, 3), "still": (3, 5)}


def initial(name: str) -> Tensor:
    """The whole initial value of one of ``Product``'s parameters."""
    index = torch.arange(torch.Size(SHAPES[name]).numel()).view(SHAPES[name])
    return initial_values(Init(std=1.0), 5, f"product.{name}", index)


@dataclass
class Mixed:
    """What became of ``Product``'s parameters."""

    dtypes: dict[str, str]
    gradients: dict[str, Tensor]
    """Whole, summed over the data axes; absent for what is frozen."""
    buffers: int
    reduced: int
    """Reductions in the step."""


def mixed(context: RankContext, layout: str, compute: str, microbatches: int) -> Mixed:
    """One step of ``Product`` through the engine: parameters of two dtypes, one unused, one frozen, in one unit."""
    recorder = FlightRecorder()
    mesh = context.mesh(layout, recorder)
    precision = Precision(master=torch.float64, compute=getattr(torch, compute), reduce=torch.float64)
    stage = Stage({"product": Product(mesh)}, Run(mesh), zero=3, precision=precision, seed=5)
    data = mesh.data_rank()
    stage.begin()
    for m in range(microbatches):
        loss = stage.forward(None, torch.tensor(1.0 + data + 10 * m, dtype=torch.float64))
        stage.backward(get_gradient_edge(loss), torch.ones_like(loss), last=m == microbatches - 1)
    stage.finish()
    gradients = {}
    for name, shape in ((n, SHAPES[n]) for n in ("wide", "narrow", "idle")):
        whole = torch.zeros(shape, dtype=torch.float64)
        for s in stage.shards:
            if s.piece.name == f"product.{name}":
                assert s.value.grad is not None
                whole.view(-1)[s.piece.place()] += s.value.grad
        gradients[name] = sum_values(whole, mesh.join("fsdp", "cp", "tp"))
    still = [s for s in stage.shards if s.piece.name == "product.still"]
    assert all(s.value.grad is None and not s.value.requires_grad for s in still)
    both = [pair for b in stage.buffers for pair in zip(b.entries, b.params, strict=True)]
    dtypes = {entry.name.partition(".")[2]: _name(p.dtype) for entry, p in both}
    return Mixed(dtypes, gradients, len(stage.buffers), sum(e.scope.phase == "reduce" for e in recorder.events))


def unused_after(context: RankContext, config: RunConfig, steps: int) -> dict[str, Tensor]:
    """Whole values of the plain model's unused parameters after some steps; their gradients must have been zero."""
    mesh = context.mesh(config.parallel)
    state, found = build_state(config, mesh), {}
    source = batches(config, mesh)
    for step in range(1, steps + 1):
        train_step(state, source.batch(source.rows(step)))
        assert all(not s.value.grad.any() for s in state.shards if ".idle." in s.piece.name)  # type: ignore[union-attr]
    source.close()
    for name, shape in state.shapes.items():
        if ".idle." in name:
            whole = torch.zeros(shape, dtype=torch.float64)
            for s in state.shards:
                if s.piece.name == name:
                    whole.view(-1)[s.piece.place()] += s.piece.data
            found[name] = sum_values(whole, mesh.join("fsdp", "cp", "tp"))
    return found
