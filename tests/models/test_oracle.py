"""Our models against another library's values: logits at every position, gradients, chosen experts."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import error, forward
from tests.models.oracle import CASES, Oracle


@pytest.mark.parametrize("tokens", ["input_ids", "long_input_ids"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)], ids=["f64", "f32"])
def test_logits(case, tokens, dtype, tolerance):
    oracle = Oracle(case, dtype)
    logits = forward(oracle.parts.values(), oracle.batch(tokens))
    expected = oracle.values[tokens.replace("input_ids", "logits.f64")]
    assert logits.dtype == dtype
    assert (logits - expected).abs().max() < tolerance


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)], ids=["f64", "f32"])
def test_loss_and_gradients(case, dtype, tolerance):
    oracle = Oracle(case, dtype)
    loss = forward(oracle.parts.values(), oracle.training_batch())
    loss.backward()
    assert abs(loss.item() - oracle.values["loss.f64"].item()) < tolerance
    pairs = oracle.gradients()
    assert len(pairs) >= 8
    assert {name: e for name, (a, b) in pairs.items() if (e := error(a, b)) > tolerance} == {}


@pytest.mark.parametrize("case", [c for c in CASES if "llama" not in c])
def test_routes(case):
    oracle = Oracle(case, torch.float64)
    routes, weights, layers = {}, {}, oracle.layers()
    for number, moe in layers.items():
        dispatch, combine = moe.dispatcher.dispatch, moe.dispatcher.combine

        def spy_dispatch(x, route, w=None, number=number, dispatch=dispatch):
            routes[number] = route
            return dispatch(x, route, w)

        def spy_combine(rows, route, w=None, number=number, combine=combine):
            weights[number] = w
            return combine(rows, route, w)

        moe.dispatcher.dispatch, moe.dispatcher.combine = spy_dispatch, spy_combine
    forward(oracle.parts.values(), oracle.batch())
    assert len(layers) == 2
    for number in layers:
        experts, order = routes[number].experts.sort(-1)
        shape = oracle.values[f"route_idx.layer{number}"].shape
        assert torch.equal(experts.view(shape), oracle.values[f"route_idx.layer{number}"].long())
        expected = oracle.values[f"route_weight.layer{number}"]
        assert (weights[number].gather(-1, order).view(shape) - expected).abs().max() < 1e-12
