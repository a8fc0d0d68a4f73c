"""What every rank knows of stages that are not its own: parameters, expert counts, routing biases, ties."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fivefold.config.model import DecoderConfig
from fivefold.config.parts import PipelineConfig
from fivefold.layers.microbatch import MicroBatch
from fivefold.mesh.parameter import Init, parameter, tie
from fivefold.mesh.pool import Pool, PoolError
from fivefold.mesh.run import Run
from fivefold.models import decoder
from fivefold.tools.verify import verify_rank
from tests.parity import plain
from tests.parity.grid import Row, row
from tests.parity.pipelines import OWN

from . import cases

Pools = Callable[[int], Pool]
ROWS = [
    row("pp2", "moe", 1, 2, "none", "1f1b"),
    row("pp2-fsdp2", "moe", 3, 2, "full", "zb_v", True),
    row("pp4", "moe_q", 1, 2, "none", "interleaved", True, model__moe__bias_off_layers=(2,)),
    row("pp4", "moe", 1, 2, "none", f"{OWN}:upside_down", model__moe__n_dense_layers=4),  # one stage has experts
    row("pp4", "dense", 1, 2, "none", "zb_h1"),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_rank_knows_the_whole_model(pool: Pools, row: Row) -> None:
    """In one order on all ranks, as one rank does."""
    config = row.config
    one: cases.Known = pool(1).run(cases.known, config.model_copy(
        update={"parallel": "single", "pipeline": PipelineConfig()}))[0]  # fmt: skip
    ranks: list[cases.Known] = pool(row.world).run(cases.known, config)
    first = ranks[0]
    for r in ranks:
        assert dict(r.shapes) == dict(one.shapes) and r.shapes == first.shapes
        assert dict(r.expert_layers) == dict(one.expert_layers) and r.expert_layers == first.expert_layers
        assert list(r.counts) == list(r.biases) == [name for name, _ in r.expert_layers]
        for name in one.counts:
            assert torch.equal(r.counts[name], one.counts[name]) and torch.equal(r.biases[name], one.biases[name])
        assert r.losses == pytest.approx(one.losses, rel=1e-5) and r.losses == first.losses
        assert r.imbalance == one.imbalance
    held = [name for r in ranks[:: row.world // config.dims.pp] for name in r.own]
    assert sorted(held) == sorted(one.counts)  # each layer on one stage


def build_wrongly_tied(run: Run, config: DecoderConfig, names: list[str] | None = None) -> dict[str, nn.Module]:
    """A decoder whose first and second layers share a matrix."""
    parts = decoder.build(run, config, names)
    for name in {"layers.0", "layers.1"} & parts.keys():
        tie(parts[name].get_parameter("ffn.up"), "layers.0.ffn.up")
    return parts


def test_a_tie_of_other_stages_is_refused_and_named(pool: Pools) -> None:
    config = row("pp4", "dense", 1, 4, "none", "1f1b", model__builder=f"{__name__}:build_wrongly_tied",
                 pipeline__stages=(1, 1, 1, 4)).config  # fmt: skip
    with pytest.raises(
        PoolError,
        match=r"the model ties layers\.0\.ffn\.up on pp ranks \[1, 2\], of which not all hold "
        r"the first or the last stage\. Tie parameters of these two alone, or use pp=1\.",
    ):
        pool(4).run(cases.known, config)  # fmt: skip


def test_a_tie_within_one_rank_concerns_no_other(pool: Pools) -> None:
    """Though the rank holds the first stage, and the last stage is on another."""
    config = row("pp2", "dense", 3, 4, "none", "1f1b", True, model__builder=f"{__name__}:build_wrongly_tied").config
    report = pool(2).run(verify_rank, config, 2, 1e-10)[0]
    assert report.passed, report


class Ends(nn.Module):
    """Two matrices of one shape, which the first part and the last share in opposite order."""

    a: nn.Parameter
    b: nn.Parameter

    def __init__(self, run: Run, names: str, vocab_size: int) -> None:
        super().__init__()
        for name in names:
            p = parameter(run.mesh, (vocab_size, plain.DIM), (None, None), Init(std=0.3))
            self.register_parameter(name, tie(p, f"first.{name}"))

    def forward(self, x: torch.Tensor | None, mb: MicroBatch) -> torch.Tensor:
        if x is None:
            return self.a[mb.tokens] + (self.b * 2)[mb.tokens]
        logits = x @ (self.a - 3 * self.b).t()
        assert mb.targets is not None
        return F.cross_entropy(logits.flatten(0, 1), mb.targets.flatten(), reduction="sum") / mb.n_targets


class EndsConfig(plain.PlainConfig):
    """Its parts."""

    def part_costs(self, sequence_length: int) -> dict[str, float]:
        return {"first": 1.0, "mix": 1.0, "last": 1.0}


def build_ends(run: Run, config: EndsConfig, names: list[str] | None = None) -> dict[str, nn.Module]:
    """Between them a block."""
    n = config.vocab_size
    kinds = {"first": lambda: Ends(run, "ab", n), "mix": plain.Mix, "last": lambda: Ends(run, "ba", n)}
    return {name: kinds[name]() for name in (kinds if names is None else names)}


@pytest.mark.parametrize("layout", ["pp2", "pp2-fsdp2", "pp3"])
def test_several_ties_are_summed_in_one_order(pool: Pools, layout: str) -> None:
    """Though the ends list them in another; of one shape, so that a mistake would not be told by the transport."""
    config = row(layout, "plain", 1, 4, "none", "1f1b", model__builder=f"{__name__}:build_ends").config
    config = config.model_copy(update={"model": EndsConfig(**config.model.model_dump())})
    report = pool(config.dims.world).run(verify_rank, config, 2, 1e-10)[0]
    assert report.passed, report
