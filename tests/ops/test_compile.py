"""Every op compiles without a graph break and equals its eager form.

In a process of its own: the shape checker of the tests wraps functions in code that cannot be compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from fivefold.ops.attention import attention, document_mask
from fivefold.ops.cross_entropy import chunked_cross_entropy
from fivefold.ops.grouped import grouped_linear
from fivefold.ops.linear import linear
from fivefold.ops.norm import rms_norm
from fivefold.ops.rope import apply_rope, inverse_frequencies, rope_tables
from fivefold.ops.routing import balance_loss, choice_counts, choose, permutation, router_z_loss, scores, weights
from fivefold.ops.swiglu import swiglu


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32, requires_grad=True)


def route(logits: Tensor) -> Tensor:
    affinity = scores(logits, "sigmoid")
    chosen = choose(affinity, torch.zeros(8), 2, 4, 2)
    order, counts = permutation(chosen, 8)
    weight = weights(affinity, chosen, True, 2.5).flatten()[order]
    balance = balance_loss(affinity[None], choice_counts(chosen[None], 8), 2, affinity.shape[0])
    return (weight * torch.arange(len(order))).sum() + balance + router_z_loss(logits) + counts.sum()


def cases() -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    ends, odd_ends = torch.tensor([3, 3, 10], dtype=torch.int32), torch.tensor([1, 5], dtype=torch.int32)
    tables = rope_tables(torch.arange(5)[None], inverse_frequencies(8, 100.0), 1.0, torch.float32)
    documents, positions = torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([[0, 1, 0, 1, 2]])
    mask = document_mask(positions, documents, positions, documents)
    targets = torch.tensor([1, 2, -100, 4, 5])

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        options = {"first_row": 0, "vocab_size": 7, "chunk_rows": 2, "reduce_max": torch.clone}
        return chunked_cross_entropy(hidden, weight, targets, reduce_sum=torch.clone, **options)

    return {
        "linear": (linear, (leaf(2, 3, 8), leaf(8, 8))),
        "rms_norm": (lambda x, w: rms_norm(x, w, 1e-6), (leaf(2, 3, 8), leaf(8))),
        "swiglu": (swiglu, (leaf(4, 8), leaf(4, 8))),
        "grouped_linear": (lambda x, w: grouped_linear(x, w, ends), (leaf(10, 8), leaf(3, 12, 8))),
        "grouped_linear, odd": (lambda x, w: grouped_linear(x, w, odd_ends), (leaf(5, 3), leaf(2, 5, 3))),
        "rope, interleaved": (lambda x: apply_rope(x, *tables, "interleaved"), (leaf(1, 5, 2, 8),)),
        "rope, half": (lambda x: apply_rope(x, *tables, "half"), (leaf(1, 5, 2, 8),)),
        "attention": (
            lambda q, k, v: attention(q, k, v, scale=0.3, mask=mask),
            (leaf(1, 5, 4, 8), leaf(1, 5, 2, 8), leaf(1, 5, 2, 6)),
        ),
        "routing": (route, (leaf(5, 8),)),
        "chunked_cross_entropy": (loss, (leaf(5, 4), leaf(8, 4))),
    }


def main() -> None:
    torch.manual_seed(0)
    for name, (function, inputs) in cases().items():
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            eager = function(*inputs)
            out = compiled(*inputs)
            torch.testing.assert_close(out, eager, rtol=1e-5, atol=1e-5)
            want = torch.autograd.grad(eager.sum(), inputs)
            for a, b in zip(torch.autograd.grad(out.sum(), inputs), want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        print(f"{name}: ok")


def test_every_op_compiles() -> None:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, __file__]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": ok") == 10


if __name__ == "__main__":
    main()
