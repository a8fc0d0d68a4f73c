"""The pool: results, failures that name rank and case, and what is left when something dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fivefold.config.dims import ParallelDims
from fivefold.mesh.pool import DIED, Pool, PoolError
from fivefold.mesh.pool_worker import dump, load

from . import cases

Pools = Callable[[int], Pool]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def own() -> Iterator[Pool]:
    """A pool to break."""
    with Pool(3, timeout_s=30) as pool:
        yield pool


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_results_come_by_rank_from_workers_that_stay(pool: Pools) -> None:
    first, second = (pool(3).run(cases.who, "a", 2) for _ in range(2))
    assert [r[0] for r in first] == [0, 1, 2]
    assert first == second
    assert len({r[1] for r in first}) == 3
    assert {r[2] for r in first} == {1}
    assert {r[3] for r in first} == {("a", 2)}


def test_works_after_the_parent_ran_torch(pool: Pools) -> None:
    """Threads of OpenMP and a backward in the parent, then a fresh pool with the same in its workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        a = torch.ones(600, 600, requires_grad=True)
        (a @ a).sum().backward()
        with Pool(2, timeout_s=30) as fresh:
            assert fresh.run(cases.square, 600) == [2 * 2 * 600.0] * 2
    finally:
        torch.set_num_threads(before)


def test_an_error_names_rank_case_and_line(own: Pool) -> None:
    with pytest.raises(PoolError) as caught:
        own.run(cases.fail_on, 1)
    error = caught.value
    assert (error.rank, error.kind, error.case) == (1, "ArithmeticError", "tests.mesh.cases.fail_on")
    assert str(error).startswith("rank 1 of 3 failed in tests.mesh.cases.fail_on: ArithmeticError: one rank is wrong\n")
    assert 'raise ArithmeticError("one rank is wrong")' in str(error)


def test_a_case_that_exits_is_an_error_too(own: Pool) -> None:
    with pytest.raises(PoolError, match=r"rank 0 of 3 failed in .*leave_on: SystemExit: 3"):
        own.run(cases.leave_on, 0)


def test_a_timeout_says_where_each_rank_was(own: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(PoolError) as caught:
        own.run(cases.stay_away, 2, timeout_s=0.5)
    assert time.monotonic() - start < 15
    message = str(caught.value)
    assert message.startswith("tests.mesh.cases.stay_away did not finish within 0.5 s on rank 0, 1, 2 of 3.")
    assert caught.value.kind == "timeout"
    where = message.split("Rank ")[1:]
    assert ["in barrier" in w for w in where] == [True, True, False]
    assert all("in stay_away" in w for w in where)
    assert "pool_worker" not in message


def test_a_worker_that_dies_is_named_whatever_the_others_say(own: Pool) -> None:
    with pytest.raises(PoolError, match=r"rank 1 of 3 failed in .*crash_on: death: .* ended with status -9") as caught:
        own.run(cases.crash_on, 1)
    assert (caught.value.rank, caught.value.kind) == (1, DIED)


def test_a_failure_ends_all_workers_and_the_next_run_starts_new_ones(own: Pool) -> None:
    before = [r[1] for r in own.run(cases.who)]
    with pytest.raises(PoolError):
        own.run(cases.fail_on, 0)
    assert not any(alive(pid) for pid in before)
    after = own.run(cases.square, 4)
    assert after == [24.0] * 3
    assert not {r[1] for r in own.run(cases.who)} & set(before)


def test_what_cannot_be_sent_is_an_error_of_the_caller(own: Pool) -> None:
    before = own.run(cases.who)
    with pytest.raises((AttributeError, TypeError)):
        own.run(lambda context: None)
    assert own.run(cases.who) == before


def test_close_leaves_nothing() -> None:
    pool = Pool(2, timeout_s=30)
    pids = [r[1] for r in pool.run(cases.who)]
    assert pool._workers is not None
    folder = Path(pool._workers.folder.name)
    assert folder.stat().st_mode & 0o077 == 0
    pool.close()
    pool.close()
    assert not any(alive(pid) for pid in pids)
    assert not folder.exists()


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_workers_end_when_the_parent_is_killed(method: str) -> None:
    """In the middle of a case, which would take forever. ``fork`` from a process that ran no operator works too."""
    script = f"""
import threading
from fivefold.mesh.pool import Pool
from tests.mesh import cases
if __name__ == "__main__":
    pool = Pool(2, method={method!r})
    print(*(r[1] for r in pool.run(cases.who)), *pool.run(cases.square, 600), pool._workers.folder.name, flush=True)
    pool.run(cases.forever)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        *pids, first, second, folder = parent.stdout.readline().split()
        assert first == second == "2400.0"
        assert all(alive(int(pid)) for pid in pids)
        time.sleep(0.2)  # let the case begin
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        assert wait_until(lambda: not any(alive(int(pid)) for pid in pids))
        assert wait_until(lambda: not Path(folder).exists())
    finally:
        parent.kill()
        parent.wait()


def test_many_meshes_share_their_groups(pool: Pools) -> None:
    """Forty layouts in one pool: no more threads than the first dozen, and every one works."""
    layouts = [f"{a}2-{b}2{e}" for a in ("pp", "ddp", "fsdp", "cp") for b in ("ddp", "fsdp", "cp", "tp")
               if "pp ddp fsdp cp tp".find(a) < "pp ddp fsdp cp tp".find(b) for e in ("", "-ep2", "-etp2")
               if not e or {a, b} & {"fsdp", "cp", "tp"}]  # fmt: skip
    layouts += [f"{a}4{e}" for a in ("fsdp", "cp", "tp") for e in ("", "-ep2", "-ep4", "-etp4", "-ep2-etp2")]
    assert len(set(layouts)) >= 40
    for seen in pool(4).run(cases.groups, layouts):
        assert {total for _, total in seen} == {6.0}
        assert seen[-1][0] <= 60
        assert seen[-1][0] - seen[len(seen) // 2][0] <= 4


def test_a_layout_and_its_string_are_one_mesh(pool: Pools) -> None:
    assert pool(4).run(cases.parsed, ParallelDims(tp=2, fsdp=2)) == [True] * 4


def test_a_layout_of_another_size_is_refused(own: Pool) -> None:
    with pytest.raises(PoolError, match="needs 4 ranks"):
        own.run(cases.groups, ["tp4"])


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(12).view(3, 4).t(),
        torch.tensor([True, False]),
        torch.randn(3, 2).bfloat16(),
        torch.nn.Parameter(torch.randn(2)),
    ],
    ids=["scalar", "empty", "transposed", "bool", "bfloat16", "parameter"],
)
def test_tensors_travel_as_values(x: torch.Tensor) -> None:
    y = load(dump({"x": [x]}))["x"][0]
    assert type(y) is torch.Tensor
    assert (y.dtype, y.shape, y.requires_grad) == (x.dtype, x.shape, False)
    assert torch.equal(y, x.detach())
    y.fill_(0)  # writable, and its own


def test_a_small_view_is_small_on_the_pipe(pool: Pools) -> None:
    assert len(dump(list(torch.arange(1_000_000.0)[:10].unbind()))) < 4000
    assert [t.item() for t in pool(2).run(cases.storage)[0]] == list(range(10))
