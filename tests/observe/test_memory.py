"""Peak memory on CPU and, through stand-ins where there is no GPU, on CUDA."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fivefold.observe import memory
from fivefold.observe.memory import MemoryWatch, oom_snapshot, record_history, write_snapshot


def test_cpu_peak_covers_what_was_touched():
    watch = MemoryWatch("cpu")
    before = watch.read()
    block = bytearray(b"x" * (before.active_bytes + 2**24))  # more than the process ever had
    del block
    after = watch.read()
    assert after.active_bytes >= before.active_bytes + 2**24
    assert after.reserved_bytes is None
    watch.reset()  # cannot lower it on a CPU, and says so
    assert watch.read().active_bytes >= after.active_bytes
    assert watch.values().keys() == {"memory_bytes"}
    assert watch.warning() is None


def test_peak_without_proc(monkeypatch):
    usual = MemoryWatch("cpu").read().active_bytes
    monkeypatch.setattr(Path, "read_text", lambda self: (_ for _ in ()).throw(FileNotFoundError()))
    assert MemoryWatch("cpu").read().active_bytes == pytest.approx(usual, rel=0.5)


def test_cuda_stats_and_retry_warning(monkeypatch):
    stats = {"active_bytes.all.peak": 3 * 2**30, "reserved_bytes.all.peak": 4 * 2**30, "num_alloc_retries": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=5 * 2**30))
    watch = MemoryWatch("cuda:0")
    assert watch.values() == {"memory_bytes": 3 * 2**30, "memory_reserved_bytes": 4 * 2**30}
    assert watch.warning() is None  # retries of before are not news
    stats["num_alloc_retries"] = 5
    text = watch.warning()
    assert text is not None
    assert "3 times" in text
    assert "3.0 GiB, reserved 4.0 GiB of 5.0 GiB" in text
    assert watch.warning() is None


def test_snapshots_are_inert_without_cuda(tmp_path):
    record_history(True)
    record_history(False)
    assert not write_snapshot(tmp_path / "a" / "snapshot.pickle")
    with pytest.raises(torch.OutOfMemoryError), oom_snapshot(tmp_path / "a" / "oom.pickle"):
        raise torch.OutOfMemoryError("no room")
    assert not (tmp_path / "a").exists()
    assert not torch.cuda.is_initialized()


def test_out_of_memory_writes_and_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda name: Path(name).write_bytes(b"snapshot"))
    path = tmp_path / "memory" / "oom-rank0.pickle"
    with oom_snapshot(path):
        pass
    with pytest.raises(RuntimeError, match="other"), oom_snapshot(path):
        raise RuntimeError("other")
    assert not path.exists()
    with pytest.raises(torch.OutOfMemoryError, match="no room") as caught, oom_snapshot(path):
        raise torch.OutOfMemoryError("no room")
    assert path.read_bytes() == b"snapshot"
    assert str(path) in caught.value.__notes__[0]


def test_a_full_disk_does_not_hide_out_of_memory(monkeypatch, tmp_path):
    def fail(path):
        raise OSError("disk full")

    monkeypatch.setattr(memory, "write_snapshot", fail)
    with pytest.raises(torch.OutOfMemoryError) as caught, oom_snapshot(tmp_path / "oom.pickle"):
        raise torch.OutOfMemoryError("no room")
    assert "disk full" in caught.value.__notes__[0]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    watch = MemoryWatch("cuda")
    x = torch.empty(2**26, device="cuda", dtype=torch.uint8)
    assert watch.read().active_bytes >= 2**26
    del x
    watch.reset()
    assert watch.read().active_bytes < 2**26
    path = tmp_path / "oom.pickle"
    with pytest.raises(torch.OutOfMemoryError), oom_snapshot(path):
        torch.empty(2**50, device="cuda", dtype=torch.uint8)
    assert path.stat().st_size > 0
    record_history(True)
    assert write_snapshot(tmp_path / "history.pickle")
    record_history(False)
