"""Bytes that the recorder counts in a training step beside a closed form computed from shapes alone.

Letters: D width, V vocabulary, H heads, L latent width, N and R and V a head's widths, F hidden width, E experts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fivefold.config.model import DecoderConfig, GqaConfig
from fivefold.config.run import RunConfig
from fivefold.mesh.pool import Pool
from fivefold.mesh.pool_worker import RankContext
from fivefold.observe.recorder import FlightRecorder
from fivefold.schedule.plan import plan
from fivefold.train.batch import Batches
from fivefold.train.step import train_step

from .steps import make_state
from .table import Table
from .work import MODELS, UniformRows

FLOAT, WIDE = 4, 8
"""Bytes: of parameters, gradients and activations; of statistics, which are int64 or float64."""
DENSE_STORE, WHOLE_STORE, EXPERT_STORE = "fsdp+cp", "fsdp+cp+tp", "efsdp"
"""Axes that storage is cut over: of what ``tp`` cuts, of what it does not, and of experts."""

Key = tuple[str, str, str]
"""Operation, axis, phase: how the recorder adds bytes up."""
Padding = dict[tuple[str, str], int]
"""Elements of padding that the engine reports, by unit and storage axis."""


@dataclass(frozen=True)
class Case:
    """A step to count."""

    model: str
    layout: str
    zero: int
    microbatches: int

    @property
    def config(self) -> RunConfig:
        config = MODELS[self.model]()
        train = config.train.model_copy(update={"zero": self.zero, "microbatches": self.microbatches})
        return config.model_copy(update={"parallel": self.layout, "train": train})


CASES = (
    *(Case("llama", "fsdp2", zero, 2) for zero in (1, 2, 3)),
    Case("llama", "ddp2", 1, 1),
    Case("llama", "tp2", 3, 1),
    *(Case("dsv3", "fsdp2-tp2", zero, 2) for zero in (1, 3)),
    Case("dsv3", "ddp2-fsdp2", 3, 1),
    Case("llama", "pp2", 1, 4),
    *(Case("dsv3", "pp2-fsdp2-tp2", zero, 2) for zero in (1, 3)),
)
QUICK = (CASES[0], Case("llama", "pp2", 1, 4))


# ---- recorded --------------------------------------------------------------------------------------------------------


def record(context: RankContext, case: Case) -> tuple[Counter[Key], Padding]:
    """Bytes one rank sends in its second step, and the padding of its buffers."""
    recorder = FlightRecorder()
    state = make_state(case.config, context.mesh(case.layout, recorder))
    batches = Batches(UniformRows(), state.config, state.mesh)
    for step in (1, 2):
        recorder.clear()
        train_step(state, batches.batch(batches.rows(step)))
    batches.close()
    units = [(u.name, b) for s in state.stages.values() for u in (*s.units, s._shared) for b in u.buffers]
    return recorder.totals, {(name, b.axis.name): b.arrangement.padding for name, b in units}


# ---- closed form -----------------------------------------------------------------------------------------------------


def held(config: RunConfig, place: int) -> tuple[str, ...]:
    """The parts on that place of ``pp``, in order: one stage."""
    m = config.model
    assert isinstance(m, DecoderConfig)
    return plan(config).names(place) or ("embed", *(f"layers.{i}" for i in range(m.n_layers)), "head")


def turns(config: RunConfig, place: int) -> int:
    """How often a backward comes right after a forward there: the stage's last unit then stays gathered between."""
    return sum(a.kind == "F" and b.kind != "F" for a, b in pairwise(plan(config).table[place]))


def parameter_sets(m: DecoderConfig, tp: int) -> Iterator[tuple[str, str, int]]:
    """(unit, storage axis, elements on one rank of ``tp``) of every set of parameters that is stored together."""
    d, a = m.dim, m.attention
    yield "embed", DENSE_STORE, m.vocab_size * d // tp
    for i in range(m.n_layers):
        whole = 2 * d
        if isinstance(a, GqaConfig):
            cut = d * a.head_dim * (2 * a.n_heads + 2 * a.n_kv_heads)
        else:
            cut = a.n_heads * (d * (a.nope_dim + a.rope_dim) + a.kv_rank * (a.nope_dim + a.v_dim) + d * a.v_dim)
            whole += d * (a.kv_rank + a.rope_dim) + a.kv_rank
        if m.moe is not None and m.is_moe(i):
            cut += 3 * d * m.moe.n_shared * m.moe.expert_dim
            whole += m.moe.n_experts * d
            yield f"layers.{i}", EXPERT_STORE, 3 * d * m.moe.n_experts * m.moe.expert_dim
        else:
            cut += 3 * d * m.ffn_dim
        yield f"layers.{i}", DENSE_STORE, cut // tp
        yield f"layers.{i}", WHOLE_STORE, whole
    yield "head", DENSE_STORE, m.vocab_size * d // tp
    yield "head", WHOLE_STORE, d


def _stored(config: RunConfig, padding: Padding, parts: Sequence[str]) -> dict[tuple[str, str], int]:
    """Elements of each buffer: sets below the threshold share one."""
    dims, found = config.dims, defaultdict(int)
    for unit, axis, n in parameter_sets(config.model, dims.tp):  # type: ignore[arg-type]
        small = n < config.train.small_buffer
        if unit in parts:
            found["small" if small else unit, axis] += n
    return {key: n + padding[key] for key, n in found.items()}


def parameters_and_gradients(config: RunConfig, padding: Padding, place: int) -> Counter[Key]:
    """ZeRO: how often buffers are gathered and reduced, times ``(n-1)/n`` of their size."""
    parts = held(config, place)
    dims, zero, microbatches = config.dims, config.zero, config.train.microbatches
    sizes = {DENSE_STORE: dims.fsdp, WHOLE_STORE: dims.fsdp * dims.tp, EXPERT_STORE: dims.fsdp * dims.tp}
    total: Counter[Key] = Counter()
    for (unit, axis), elements in _stored(config, padding, parts).items():
        n = sizes[axis]
        bytes_sent = (n - 1) * elements // n * FLOAT
        kept = unit == "small"  # gathered until the step's end
        forward_only = unit in ("embed", "head")  # reads no values in backward; begins backward at once
        if n > 1:
            spared = turns(config, place) if unit == parts[-1] and not forward_only else 0
            times = 1 if zero < 3 or kept else microbatches * (1 if forward_only else 2) - spared
            total["all_gather", axis, "gather"] += times * bytes_sent
            total["reduce_scatter", axis, "reduce"] += (1 if zero == 1 or kept else microbatches) * bytes_sent
        if dims.ddp > 1:
            total["all_reduce", "ddp", "reduce"] += 2 * (dims.ddp - 1) * (elements // n) * FLOAT // dims.ddp
    return total


def activations(config: RunConfig, parts: Sequence[str]) -> Counter[Key]:
    """Over ``tp`` each sub-layer gathers its tokens and scatters its sum, and backward does the opposite."""
    dims, m = config.dims, config.model
    assert isinstance(m, DecoderConfig)
    n, total = dims.tp, Counter()
    if n == 1:
        return total
    tokens = config.data.batch_size // dims.data * config.data.sequence_length  # of all microbatches
    slab = (n - 1) * tokens // n * FLOAT  # bytes for each value of a token
    latent = 0 if isinstance(m.attention, GqaConfig) else m.attention.kv_rank + m.attention.rope_dim
    layers, head = len({*parts} - {"embed", "head"}), "head" in parts
    gathered = layers * (2 * m.dim + latent) + head * m.dim  # attention and feed-forward of each layer, and the head
    scattered = layers * 2 * m.dim + ("embed" in parts) * m.dim
    total["all_gather", "tp", "forward"] = total["reduce_scatter", "tp", "backward"] = gathered * slab
    total["reduce_scatter", "tp", "forward"] = total["all_gather", "tp", "backward"] = scattered * slab
    total["all_reduce", "tp", "forward"] = head * 2 * (n - 1) * 3 * tokens * FLOAT // n  # largest logit, and two sums
    return +total


def messages(config: RunConfig, place: int) -> Counter[Key]:
    """With a stage a rank, every microbatch's activation goes to the next rank, and its gradient to the one before."""
    dims, m = config.dims, config.model
    assert isinstance(m, DecoderConfig)
    tokens = config.data.batch_size // dims.data * config.data.sequence_length // dims.tp
    size = tokens * m.dim * FLOAT
    total = {("send", "pp", "forward"): size * (place + 1 < dims.pp), ("send", "pp", "backward"): size * (place > 0)}
    return +Counter(total)


def statistics(config: RunConfig) -> Counter[Key]:
    """Once a step: targets, each data rank's loss, the gradient norm, expert loads and their losses."""
    dims, m, total = config.dims, config.model, Counter()
    assert isinstance(m, DecoderConfig)
    layers = sum(m.is_moe(i) for i in range(m.n_layers))
    sums = [("ddp+fsdp+cp", dims.data, 1), ("pp+ddp+fsdp+cp", dims.pp * dims.data, dims.data),
            ("pp+fsdp+cp+tp", dims.pp * dims.fsdp * dims.tp, 1)]  # fmt: skip
    if m.moe is not None:
        sums.append(("pp+ddp+fsdp+cp+tp", dims.world, layers * m.moe.n_experts + 2))
    for axis, n, numbers in sums:
        if n > 1:
            total["all_reduce", axis, ""] += round(2 * (n - 1) * numbers * WIDE / n)
    return total


def closed_form(config: RunConfig, padding: Padding, place: int) -> Counter[Key]:
    """All that a rank at that place of ``pp`` sends."""
    return (parameters_and_gradients(config, padding, place) + activations(config, held(config, place))
            + messages(config, place) + statistics(config))  # fmt: skip


# ---- both ------------------------------------------------------------------------------------------------------------

KINDS = {
    "parameters": ("gather",),
    "gradients": ("reduce",),
    "activations": ("forward", "backward"),
    "statistics": ("",),
}
"""Kinds of traffic by their phases."""


def measure(cases: tuple[Case, ...], say: Callable[[str], None]) -> Table:
    """A row for each case and kind of traffic; equal means equal for every operation and axis, on every stage."""
    columns = ("model", "layout", "ZeRO", "microbatches", "traffic", "recorded", "closed form", "equal")
    table = Table("Bytes that a rank sends in a step; in a pipeline, one rank of each stage", columns)
    for world in sorted({c.config.dims.world for c in cases}):
        with Pool(world) as pool:
            for case in (c for c in cases if c.config.dims.world == world):
                say(f"{case.model} {case.layout} ZeRO {case.zero}")
                ranks, pp = pool.run(record, case), case.config.dims.pp
                both = [(recorded, closed_form(case.config, padding, place))
                        for place, (recorded, padding) in enumerate(ranks[:: world // pp])]  # fmt: skip
                for kind, phases in KINDS.items():
                    pairs = [[Counter({k: v for k, v in c.items() if k[2] in phases}) for c in pair] for pair in both]
                    ours, theirs = (sum(c.total() for c in side) for side in zip(*pairs, strict=True))
                    if ours or theirs:
                        row = (case.model, case.layout, str(case.zero), str(case.microbatches), kind)
                        equal = all(a == b for a, b in pairs)
                        table.add(*row, f"{ours:,}", f"{theirs:,}", "yes" if equal else "NO")
    return table
