"""GPUs are found through NVML, and only those that are visible and that torch can use."""

from __future__ import annotations

import subprocess
import sys

import pynvml
import pytest
import torch

from fivefold.config import hardware


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("0", 1),
        ("0,2", 2),
        ("0,9,1", 1),
        ("-1", 0),
        ("0,-1,1", 1),
        ("GPU-12ab,GPU-34cd", 2),
        ("3, 1", 2),
    ],
)
def test_visible(monkeypatch, visible, count):
    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 4)
    assert hardware.gpu_count(visible) == count


def test_no_driver(monkeypatch):
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert hardware.gpu_count() == 0


def test_torch_without_cuda(monkeypatch):
    assert hardware.torch_has_cuda() == (torch.version.cuda is not None)
    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: False)
    assert hardware.gpu_count() == 0


def test_torch_is_not_imported():
    code = "import sys; from fivefold.config import hardware; hardware.gpu_count(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
