"""``make test-gpu``: on one GPU, the same step as on the CPU, a bf16 step, and the speed of the demo model scaled up.

Skips with a reason where there is no GPU. Also runs the tests that are marked ``gpu``.
"""

from __future__ import annotations

import subprocess
import sys
import time

import torch
from rich.console import Console
from rich.table import Table

from fivefold.config.model import DecoderConfig
from fivefold.config.run import RunConfig
from fivefold.data.synthetic import Synthetic
from fivefold.mesh.mesh import Mesh
from fivefold.observe.hardware import mfu, peak_flops
from fivefold.recipes import load
from fivefold.train.batch import Batches
from fivefold.train.state import build_state
from fivefold.train.step import train_step

WARM_UP, TIMED = 5, 10


def with_train(config: RunConfig, **changes: object) -> RunConfig:
    """The run with other ``train`` fields, on one rank."""
    return config.model_copy(update={"parallel": "single", "train": config.train.model_copy(update=changes)})


def losses(config: RunConfig, device: str, steps: int) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of the first steps on hard made-up rows."""
    mesh = Mesh.single(device)
    state = build_state(config, mesh)
    source = Synthetic(config.model.vocab_size, config.data.sequence_length, config.data.batch_size, 0)
    batches = Batches(source, config, mesh)
    stats = [train_step(state, batches.batch(batches.rows(i))) for i in range(1, steps + 1)]
    batches.close()
    return [s.loss.item() for s in stats], [s.grad_norm for s in stats]


def same_step(console: Console) -> bool:
    """fp32 on the GPU against fp32 on the CPU, and bf16 against fp32."""
    fine = True
    for name in ("moe_tiny", "dense_tiny"):
        config = load(name).config
        exact = with_train(config, dtype="float32")
        (cpu, cpu_norm), (gpu, gpu_norm) = (losses(exact, device, 3) for device in ("cpu", "cuda"))
        error = max(abs(a / b - 1) for a, b in zip([*gpu, *gpu_norm], [*cpu, *cpu_norm], strict=True))
        half, _ = losses(with_train(config, dtype="bfloat16"), "cuda", 3)
        rough = max(abs(a / b - 1) for a, b in zip(half, cpu, strict=True))
        ok = error < 1e-4 and rough < 2e-2
        fine &= ok
        console.print(
            f"{'ok  ' if ok else 'FAIL'} {name}: fp32 GPU against CPU {error:.1e}, bf16 against fp32 {rough:.1e}"
        )
    return fine


def scaled_up() -> RunConfig:
    """The demo model at a width that keeps a GPU busy: about 1.3 B parameters."""
    config = load("moe_demo").config
    model = config.model
    assert isinstance(model, DecoderConfig) and model.moe is not None
    attention = model.attention.model_copy(
        update={"n_heads": 16, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "v_dim": 128}
    )
    moe = model.moe.model_copy(update={"n_experts": 16, "top_k": 4, "expert_dim": 1408})
    model = model.model_copy(update={"dim": 2048, "n_layers": 10, "ffn_dim": 8192, "attention": attention, "moe": moe})
    data = config.data.model_copy(update={"batch_size": 8, "sequence_length": 2048})
    return config.model_copy(update={"model": model, "data": data})


def speed(config: RunConfig) -> tuple[float, float]:
    """Tokens per second, and peak memory in GiB."""
    mesh = Mesh.single("cuda")
    state = build_state(config, mesh)
    source = Synthetic(config.model.vocab_size, config.data.sequence_length, config.data.batch_size, 0)
    batches = Batches(source, config, mesh)
    batch = batches.batch(source.rows(1, 0, config.data.batch_size))
    for microbatch in batch.microbatches:
        microbatch.documents = None  # one document a row, as in long-document pretraining: plain causal attention
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP):
        train_step(state, batch)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(TIMED):
        train_step(state, batch)
    torch.cuda.synchronize()
    elapsed_s = time.perf_counter() - begin
    batches.close()
    tokens = TIMED * config.data.batch_size * config.data.sequence_length
    return tokens / elapsed_s, torch.cuda.max_memory_allocated() / 2**30


def speeds(console: Console) -> None:
    """Tokens per second and MFU, eager and compiled."""
    base = scaled_up()
    peak = peak_flops(torch.cuda.get_device_name(), "bfloat16")
    flops = base.model.flops_per_token(base.data.sequence_length) or 0.0
    table = Table(title=f"moe_demo scaled up, bf16, {torch.cuda.get_device_name()}", title_justify="left")
    for column in ("compile", "recompute", "tokens/s", "MFU", "peak GiB"):
        table.add_column(column, justify="right")
    for compiled in ("none", "inductor"):
        for recompute in ("none", "full"):
            config = with_train(base, dtype="bfloat16", compile=compiled, recompute=recompute, steps=100)
            rate, memory = speed(config)
            share = mfu(flops, rate, 1, peak)
            table.add_row(
                compiled,
                recompute,
                f"{rate:,.0f}",
                "unknown peak" if share is None else f"{share:.1%}",
                f"{memory:.1f}",
            )
            torch.cuda.empty_cache()
    console.print(table)


def main() -> int:
    """Run everything; 0 when all is well or there is nothing to run on."""
    console = Console()
    if not torch.cuda.is_available():
        console.print("skipped: no CUDA device here (torch.cuda.is_available() is False)")
        return 0
    fine = same_step(console)
    speeds(console)
    marked = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu"], check=False)
    return 0 if fine and marked.returncode in (0, 5) else 1


if __name__ == "__main__":
    raise SystemExit(main())
