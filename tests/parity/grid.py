"""What is proved equal to one rank: rows of a grid of layouts and options, and a small set that covers all their pairs.

A row is data. It names a layout, a model and the options that decide how a step is run; ``config`` is the run it means.
The rows of this grid have one stage and whole sequences; those of a pipeline are in :mod:`.pipelines`, those of cut
sequences in :mod:`.contexts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

from fivefold.config.base import Part
from fivefold.config.dims import ParallelDims
from fivefold.config.model import DecoderConfig
from fivefold.config.run import RunConfig
from fivefold.recipes.tiny import dense_tiny, moe_tiny
from fivefold.schedule.named import SCHEDULES

from . import plain

LAYOUTS = (
    "fsdp2", "fsdp4", "ddp2", "ddp4", "ddp2-fsdp2", "tp2", "tp4", "fsdp2-tp2", "ddp2-tp2", "ddp2-fsdp2-tp2",
)  # fmt: skip
OPTIONS: dict[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "model": ("moe", "moe_q", "dense"),
    "zero": (1, 2, 3),
    "microbatches": (1, 2),
    "recompute": ("none", "full"),
}
STEPS = 3
Legal = Callable[[Mapping[str, Any]], bool]


def changed(part: Part, name: str, value: Any) -> Any:
    """``part`` with the field of that dotted name set to ``value``."""
    head, _, rest = name.partition(".")
    assert head in type(part).model_fields, f"{type(part).__name__} has no {head}"
    return part.model_copy(update={head: changed(getattr(part, head), rest, value) if rest else value})


def _moe_q() -> RunConfig:
    return changed(moe_tiny(), "model.attention.q_rank", 6)


MODELS: Mapping[str, Callable[[], RunConfig]] = {
    "moe": moe_tiny,
    "moe_q": _moe_q,
    "dense": dense_tiny,
    "plain": plain.recipe,
    "between": plain.between,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison with one rank."""

    layout: str
    model: str = "moe"
    zero: int = 1
    microbatches: int = 1
    recompute: str = "none"
    schedule: str = ""
    """Of the pipeline; with one, the run has 24 short rows and an odd number of layers."""
    tied: bool = False
    """Whether the head is the embedding."""
    method: str = ""
    """Of context parallelism; empty leaves it to the recipe."""
    placement: str = ""
    """Of a sequence over ``cp``; empty leaves it to the recipe."""
    documents: bool = True
    """Whether rows of data hold several documents."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Other fields of the run by dotted name, with their values."""

    @property
    def config(self) -> RunConfig:
        """The run. Small buffers are off unless the row sets them: at parity size every parameter is small."""
        config = MODELS[self.model]().model_copy(update={"parallel": self.layout})
        own = {"train.steps": STEPS, "train.dtype": "float64", "train.small_buffer": 0, "train.zero": self.zero,
               "train.microbatches": self.microbatches, "train.recompute": self.recompute}  # fmt: skip
        if self.tied:
            own["model.tied"] = True
        if self.schedule:
            own |= {"pipeline.schedule": self.schedule, "data.batch_size": 24}
            own["data.sequence_length"] = 8 if config.dims.cp > 1 else 6  # cut in 2*cp*tp pieces
            if isinstance(config.model, DecoderConfig):
                own["model.n_layers"] = self.layers
        if self.schedule == "auto":
            own["pipeline.costs"] = "F=1,I=1.3,W=0.6,comm=0.2"
        own |= {f"context.{name}": getattr(self, name) for name in ("method", "placement") if getattr(self, name)}
        for name, value in [*own.items(), *self.changes]:
            config = changed(config, name, value)
        return config

    @property
    def layers(self) -> int:
        """Of a decoder under a schedule: odd, and no fewer than its stages need beside embedding and head."""
        chunks = SCHEDULES[self.schedule].chunks if self.schedule in SCHEDULES else 1
        return 7 if chunks * ParallelDims.parse(self.layout).pp > 7 else 5

    def place(self) -> tuple[Any, ...]:
        """Sorts rows so that those of one pool are together, and in them those of one oracle."""
        staged = bool(self.schedule)
        cut = staged and self.config.dims.cp > 1
        layers = self.layers if staged else 0
        return self.world, staged, cut, self.model, self.documents, self.tied, layers

    @property
    def world(self) -> int:
        """Ranks it takes."""
        return self.config.dims.world

    def __str__(self) -> str:
        words = [self.layout, self.model, f"zero{self.zero}", f"mb{self.microbatches}", self.recompute]
        words += [Path(name).name for name in (self.schedule, self.method, self.placement) if name]
        words += ["tied"] * self.tied + ["one-document"] * (not self.documents)
        return " ".join([*words, *(f"{name.split('.', 1)[1]}={value}" for name, value in self.changes)])


def row(layout: str, model: str = "moe", zero: int = 1, microbatches: int = 1, recompute: str = "none",
        schedule: str = "", tied: bool = False, method: str = "", placement: str = "", documents: bool = True,
        **changes: Any) -> Row:  # fmt: skip
    """A row; ``changes`` have two underscores for each dot."""
    dotted = tuple((name.replace("__", "."), value) for name, value in changes.items())
    return Row(layout=layout, model=model, zero=zero, microbatches=microbatches, recompute=recompute, schedule=schedule,
               tied=tied, method=method, placement=placement, documents=documents, changes=dotted)  # fmt: skip


def full() -> Iterator[Row]:
    """Every combination of the options."""
    for values in product(*OPTIONS.values()):
        yield Row(**dict(zip(OPTIONS, values, strict=True)))


def pairwise(options: Mapping[str, Sequence[Any]], legal: Legal = lambda choice: True) -> list[dict[str, Any]]:
    """Choices of one value per option in which every two values of different options meet at least once.

    Greedy: each choice starts from a pair that has not met, and gives every other option the value that makes most
    new pairs with what is chosen, or else the one that was chosen least.

    Args:
        legal: whether values can be chosen together; each option must keep a value that goes with any legal others.
    """
    names = list(options)
    unmet = {((a, x), (b, y)) for a, b in combinations(names, 2) for x in options[a] for y in options[b]
             if legal({a: x, b: y})}  # fmt: skip

    def gain(chosen: Mapping[str, Any], name: str, value: Any) -> int:
        at = names.index(name)
        return sum((((name, value), (o, v)) if at < names.index(o) else ((o, v), (name, value))) in unmet
                   for o, v in chosen.items())  # fmt: skip

    choices: list[dict[str, Any]] = []
    used: Counter[tuple[str, Any]] = Counter()
    while unmet:
        chosen = dict(min(unmet, key=repr))
        for name in names:
            if name not in chosen:
                able = [value for value in options[name] if legal({**chosen, name: value})]
                chosen[name] = max(able, key=lambda value, n=name: (gain(chosen, n, value), -used[n, value]))
        used.update(chosen.items())
        unmet -= set(combinations([(n, chosen[n]) for n in names], 2))
        choices.append({n: chosen[n] for n in names})
    return choices


def cover() -> list[Row]:
    """Rows in which every two option values of the full grid meet."""
    return [Row(**choice) for choice in pairwise(OPTIONS)]


NO_YARN: dict[str, Any] = {"model__rope__scaling": None}
FROZEN: dict[str, Any] = {"model__builder": "tests.parity.frozen:build"}
NO_BALANCE: dict[str, Any] = {"model__moe__balance_loss": 0.0, "model__moe__z_loss": 0.0, "model__moe__bias_rate": 0.0}

EXTRAS: tuple[Row, ...] = (
    # how a rank runs its own work
    row("single", "moe_q", 3, 4, "full"),
    row("single", "dense", 2, 2, "ops"),
    row("fsdp2", "moe", 3, 2, "ops"),
    row("tp2", "moe_q", 3, 2, "ops"),
    row("fsdp2-tp2", "moe", 2, 2, "every-2"),
    row("tp2", "dense", 3, 1, "every-3"),
    row("tp2", "dense", 3, 1, train__compile="aot_eager", model__n_layers=2),
    row("fsdp2", "moe", 3, 2, "full", train__compile="eager", model__n_layers=2),
    # where parameters are stored
    row("fsdp2-tp2", "moe_q", 3, 2, "full", train__small_buffer=300),
    row("ddp2-tp2", "moe", 2, 2, train__small_buffer=300),
    row("fsdp2-tp2", "moe", 3, 2, train__small_buffer=65536),
    row("ddp2-fsdp2", "dense", 1, 2, train__small_buffer=65536),
    row("fsdp4", "moe", 3, 2, **FROZEN),
    row("fsdp2-tp2", "moe", 2, 1, "full", train__small_buffer=300, **FROZEN),
    row("ddp2", "moe", 3, 2, **FROZEN),
    # models
    row("tp2", "dense", 3, 2, model__tied=True),
    row("fsdp2", "dense", 3, 2, "full", model__tied=True),
    row("ddp2-fsdp2", "moe", 2, 2, model__tied=True),
    row("fsdp2-tp2", "moe_q", 1, 2, "ops", model__tied=True, train__small_buffer=300),
    row("tp2", "moe", 2, 1, model__moe__score="softmax", model__moe__normalise=False, model__moe__group_score="max"),
    row("fsdp2-tp2", "moe_q", 3, 2, "full", model__moe__score="softmax", model__moe__score_before=True),
    row("tp4", "moe", 3, 1, "full", model__moe__score_before=True, model__moe__n_shared=0),
    row("tp2", "moe", 1, 2, model__moe__bias_off_layers=(1,), model__moe__n_groups=1, model__moe__top_groups=1),
    row("ddp2", "moe", 3, 2, **NO_BALANCE, **NO_YARN),
    row("fsdp2", "moe", 3, 1, model__n_layers=1, model__moe__n_dense_layers=0, model__moe__n_experts=4,
        model__moe__n_groups=2, model__moe__top_groups=1),  # most experts get few tokens, some none
    row("ddp2-fsdp2", "plain", 3, 2, "full"),
    row("fsdp2", "plain", 1, 2, train__small_buffer=300),
    row("fsdp2-tp2", "between", 2, 2, "full"),
    row("tp2", "between", 3),
    # batches
    row("tp4", "dense", 3, 2, data__sequence_length=12),  # three tokens a rank
    row("fsdp2-tp2", "moe", 3, 2, "full", data__sequence_length=10),
    row("tp2", "moe_q", 2, 1, data__sequence_length=2),
    row("tp2", "moe", 3, 3, data__batch_size=3),
    row("fsdp4", "moe", 2, 2, "full"),  # microbatches of one row, one of them without a target
    row("fsdp2", "dense", 3, 4, data__batch_size=24, data__sequence_length=7),
    row("ddp4", "moe", 1, 1, data__batch_size=4),
    # optimizers
    row("fsdp2", "moe", 3, 1, optim__name="adam", optim__implementation="loop", optim__decay_embeddings=False),
    row("tp2", "dense", 1, 1, optim__name="adam", optim__implementation="foreach"),
    row("ddp2-tp2", "moe", 3, 2, optim__implementation="loop", optim__max_norm=0.0),
    row("fsdp2-tp2", "dense", 2, 1, optim__implementation="foreach", optim__max_norm=0.05, optim__weight_decay=0.5),
)  # fmt: skip
"""What the grid leaves out, each in the smallest layouts where it can go wrong."""
