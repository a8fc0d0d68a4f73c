"""Decoders as named parts: names, stages, tied weights, released sizes, meta tensors, packed rows, compiled graphs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fivefold.config.dims import ParallelDims
from fivefold.config.model import DecoderConfig
from fivefold.layers.moe import MoE
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.parameter import spec_of
from fivefold.mesh.run import Run
from fivefold.models.builder import build_parts
from fivefold.models.decoder import build, part_names
from fivefold.observe.recorder import FlightRecorder
from fivefold.recipes.deepseek import deepseek_v2_lite, deepseek_v3
from fivefold.recipes.llama3 import llama3_8b, llama3_70b, llama3_405b
from fivefold.recipes.tiny import dense_tiny, moe_tiny
from fivefold.wrap.entries import collect
from tests.helpers import error, forward, materialise, microbatch, replace_parameters, single

ROOT = Path(__file__).parents[2]
RELEASED = {
    llama3_8b: 8_030_261_248,
    llama3_70b: 70_553_706_496,
    llama3_405b: 405_853_388_800,
    deepseek_v2_lite: 15_706_484_224,
    deepseek_v3: 671_026_404_352,
}
"""Parameters of the released weights, DeepSeek-V3's without the multi-token module and without its 14,848 biases."""


def decoder(recipe=moe_tiny, **changes) -> DecoderConfig:
    model = recipe().model
    assert isinstance(model, DecoderConfig)
    return model.model_copy(update=changes)


def with_moe(**changes) -> DecoderConfig:
    config = decoder()
    assert config.moe is not None
    return config.model_copy(update={"moe": config.moe.model_copy(update=changes)})


def rows(n: int = 4, length: int = 16, seed: int = 0):
    tokens = torch.randint(37, (n, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize("recipe", RELEASED, ids=lambda r: r.__name__)
def test_released_sizes(recipe):
    parts = build_parts(single(), recipe().model)
    everything = [p for part in parts.values() for p in part.parameters()]
    assert all(p.is_meta for p in everything)
    assert sum(p.numel() for p in everything) == RELEASED[recipe]


def test_deepseek_v3_shapes():
    parts = build_parts(single(), deepseek_v3().model, ["layers.0", "layers.60", "head"])
    shapes = {f"{n}.{path}": tuple(p.shape) for n, part in parts.items() for path, p in part.named_parameters()}
    assert shapes["layers.0.ffn.gate"] == (18432, 7168)
    assert shapes["layers.60.attention.q_down"] == (1536, 7168)
    assert shapes["layers.60.attention.q_up"] == (128 * 192, 1536)
    assert shapes["layers.60.attention.kv_down"] == (576, 7168)
    assert shapes["layers.60.attention.kv_up"] == (128 * 256, 512)
    assert shapes["layers.60.ffn.gate"] == (256, 2048, 7168)
    assert shapes["layers.60.ffn.shared.down"] == (7168, 2048)
    assert shapes["head.weight"] == (129280, 7168)
    assert parts["layers.60"].ffn.bias.shape == (256,)


@pytest.mark.parametrize("recipe", [dense_tiny, moe_tiny])
@pytest.mark.parametrize("rank", [0, 1])
def test_meta_forward_under_a_planned_layout(recipe, rank):
    """Without processes and memory, every shape is what the rank would hold."""
    run = Run(Mesh(ParallelDims(tp=2), rank, device="meta", connect=False))
    parts = build(run, decoder(recipe))
    assert tuple(parts["embed"].weight.shape) == (19, 16)  # 37 rows, padded to 38
    assert spec_of(parts["embed"].weight).global_shape == (37, 16)
    tokens, targets = (t.to("meta") for t in rows())
    mb = microbatch(tokens)
    mb.positions = mb.positions.to("meta")
    assert forward(list(parts.values())[:-1], mb).shape == (4, 8, 16)
    assert forward(parts.values(), mb).shape == (4, 16, 37)
    mb.targets = targets
    loss = forward(parts.values(), mb)
    assert loss.shape == ()
    loss.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for part in parts.values() for p in part.parameters())


def test_part_names_and_stages():
    config = decoder(n_layers=3)
    assert part_names(config) == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert list(build(single(), config)) == part_names(config)
    assert list(build(single(), config, ["layers.2", "head"])) == ["layers.2", "head"]
    with pytest.raises(KeyError, match=r"no part is called layers\.3"):
        build(single(), config, ["layers.3"])


def test_stages_compute_what_the_whole_does():
    run, config, mb = single(), decoder(), microbatch(*rows())
    whole = build(run, config)
    materialise(whole, run)
    names = part_names(config)
    x = None
    for stage in (names[:2], names[2:4], names[4:]):
        parts = build(run, config, stage)
        materialise(parts, run)
        for part in parts.values():
            x = part(x, mb)
    assert torch.equal(x, forward(whole.values(), mb))


@pytest.mark.parametrize("first", [True, False])
def test_tied_across_stages(first):
    config = decoder(tied=True)
    names = part_names(config)
    parts = build(single(), config, names[:2] if first else names[2:])
    spec = spec_of(parts["embed" if first else "head"].get_parameter("weight"))
    assert spec.tied
    assert spec.init_name == "embed.weight"


def test_tied_on_one_rank():
    config = decoder(tied=True)
    parts = build(single(), config)
    held = collect(parts, single())
    assert held.borrowed == {"head": ["embed"]}
    groups = [(part, e) for part, of in held.groups.items() for entries in of.values() for e in entries]
    assert [(part, len(e.uses), e.original) for part, e in groups if e.name == "embed.weight"] == [("embed", 2, True)]
    assert "head.weight" not in {e.name for _, e in groups}
    assert collect(build(single(), decoder()), single()).borrowed == {}


def test_a_tied_matrix_gets_the_gradients_of_both_uses():
    """Against the same model untied: one matrix, two gradients, one sum."""
    mb, grads = microbatch(*rows()), {}
    for tied in (True, False):
        parts = build(single(), decoder(tied=tied))
        materialise(parts, single())
        if not tied:  # start where the tied one does
            values = {n: p.detach() for n, p in grads["parts"]["head"].named_parameters()}
            replace_parameters(parts["head"], {n: x.clone() for n, x in values.items()})
            replace_parameters(parts["embed"], {"weight": values["weight"].clone()})
        forward(parts.values(), mb).backward()
        grads["parts"], grads[tied] = parts, [parts[n].get_parameter("weight").grad for n in ("embed", "head")]
    assert grads[True][0] is grads[True][1]
    assert error(grads[True][0], sum(grads[False])) < 1e-14


def test_parameters_of_two_parts_are_one_where_they_are_the_same_object():
    """A user's own way to tie, without a name: the first part owns it, the second borrows."""
    first, second = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    second[0].weight = first.weight
    held = collect({"a": first, "b": second}, single())
    assert held.borrowed == {"b": ["a"]}
    names = {part: [e.name for of in groups.values() for e in of] for part, groups in held.groups.items()}
    assert names == {"a": ["a.weight", "a.bias"], "b": ["b.0.bias", "b.1.weight", "b.1.bias"]}


def test_bias_is_off_where_the_configuration_says():
    parts = build(single(), with_moe(bias_off_layers=(2,), bias_rate=0.01))
    layers = {n: p.ffn for n, p in parts.items() if isinstance(getattr(p, "ffn", None), MoE)}
    assert list(layers) == ["layers.1", "layers.2", "layers.3"]
    for moe in layers.values():
        moe.update_bias(torch.arange(8))
    assert {n: bool(m.bias.any()) for n, m in layers.items()} == {"layers.1": True, "layers.2": False, "layers.3": True}


@pytest.mark.parametrize("recipe", [dense_tiny, moe_tiny])
def test_documents_do_not_see_each_other(recipe):
    """A row of two documents gives each the logits it has in a row of its own."""
    run = single()
    parts = build(run, decoder(recipe))
    materialise(parts, run)
    tokens, _ = rows(2)
    documents = torch.tensor([[0] * 6 + [1] * 10] * 2, dtype=torch.int32)
    packed = forward(parts.values(), microbatch(tokens, documents=documents))
    alone = [forward(parts.values(), microbatch(part)) for part in tokens.split([6, 10], 1)]
    assert error(packed, torch.cat(alone, 1)) < 1e-12
    assert error(packed, forward(parts.values(), microbatch(tokens))) > 1e-3


def test_collectives_report_their_layer():
    recorder = FlightRecorder()
    run = Run(Mesh(ParallelDims(tp=2), 0, device="meta", connect=False, recorder=recorder))
    seen = []
    parts = build(run, decoder())
    for name, module in (("attention", parts["layers.1"].attention), ("ffn", parts["layers.1"].ffn)):
        module.register_forward_pre_hook(lambda *_, name=name: seen.append((name, recorder.scope.module)))
    mb = microbatch(rows()[0].to("meta"))
    mb.positions = mb.positions.to("meta")
    with recorder.at(module="layers.1"):
        parts["layers.1"](torch.empty(4, 8, 16, device="meta"), mb)
    assert seen == [("attention", "layers.1.attention"), ("ffn", "layers.1.ffn")]


GRAPHS = """
import torch
from torch._dynamo.utils import counters
from fivefold.models.decoder import build
from tests.helpers import forward, materialise, single
from tests.models.test_decoder import decoder, rows, microbatch, dense_tiny, moe_tiny

torch.set_num_threads(1)
for recipe in (dense_tiny, moe_tiny):
    run = single()
    parts = build(run, decoder(recipe, n_layers=4))
    materialise(parts, run, dtype=torch.float32)
    expected = forward(parts.values(), microbatch(*rows()))
    torch._dynamo.reset()
    counters.clear()
    compiled = [torch.compile(p, backend="eager", fullgraph=True, dynamic=False) for p in parts.values()]
    mb = microbatch(*rows())
    parts["layers.0"].prepare(mb)
    loss = forward(compiled, mb)
    loss.backward()
    assert abs(loss - expected) < 1e-5 * expected
    print(counters["stats"]["unique_graphs"])
"""


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_blocks_of_one_shape_share_a_graph():
    """Without a break, and with as many graphs as there are kinds of parts, however deep the model.

    In a process of its own: the shape checks of the tests are not traceable.
    """
    done = subprocess.run(
        [sys.executable, "-c", GRAPHS], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.stdout.split() == ["3", "4"], done.stderr
