"""Peaks by the names that torch gives devices, and the share of them that was used."""

from __future__ import annotations

import pytest

from fivefold.observe.hardware import mfu, peak_flops


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_known_devices(name, tera):
    assert peak_flops(name, "bfloat16") == peak_flops(name, "float16") == tera * 1e12
    # No format is faster than a narrower one.
    rates = [peak_flops(name, dtype) or 0 for dtype in ("bfloat16", "tfloat32", "float32", "float64")]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    "name",
    [
        *("cpu", "", "Intel(R) Xeon(R) CPU", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti"),
        *("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Quadro RTX 6000", "NVIDIA GeForce RTX 4090 D", "NVIDIA A1000"),
    ],
)
def test_unknown_devices(name):
    assert peak_flops(name, "bfloat16") is None


def test_float32_is_not_tf32():
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float32") == 19.5e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "tfloat32") == 156e12


def test_mfu():
    # 250 GFLOP a token at 100,000 tokens/s on 64 devices of 989.4 TFLOP/s: 25 of 63.3 PFLOP/s.
    assert mfu(250e9, 100_000, 64, 989.4e12) == pytest.approx(0.3948, abs=1e-4)
    assert mfu(250e9, 100_000, 64, None) is None
