"""Joining, time limits after the first step, restarts on one store, and a teardown that hangs."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold.config.parts import CommConfig
from fivefold.mesh.pool import PRELOAD
from fivefold.mesh.process import Process, deadline, join, leave, set_step_timeouts, use_loopback

from . import process_cases as cases

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ranks:
    """Two processes under a launcher's environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        limit = timedelta(seconds=30)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)

    def run(self, case: Callable[..., Any], *args: Any, **more: str) -> list[tuple[Any, int | None]]:
        """What each rank returned (None if it ended before), and its exit status.

        Args:
            more: variables of the environment.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        started = []
        for rank in range(2):
            environment = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
            mine, theirs = context.Pipe(duplex=False)
            given = (case, environment | more, str(self.log(rank)), theirs, *args)
            process = context.Process(target=cases.start, args=given, daemon=True)
            process.start()
            theirs.close()
            started.append((process, mine))
        end = time.monotonic() + 60
        results = []
        for process, mine in started:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
            try:
                results.append((mine.recv() if mine.poll() else None, process.exitcode))
            except EOFError:
                results.append((None, process.exitcode))
        return results

    def log(self, rank: int) -> Path:
        return self.folder / f"stderr-{rank}.txt"


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def test_without_an_environment_it_is_a_run_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    process = join(CommConfig(), "cpu")
    assert process == Process(rank=0, world=1, local_rank=0, device=torch.device("cpu"))
    assert not dist.is_initialized()
    set_step_timeouts([], 1.0)
    leave(process, 1.0)


def test_joins_as_the_environment_says(ranks: Ranks) -> None:
    results = ranks.run(cases.place, 20.0)
    loopback = use_loopback_name()
    assert results == [((r, 2, r, "cpu", 1.0, "gloo", False, loopback), 0) for r in range(2)]


def use_loopback_name() -> str:
    before = os.environ.pop("GLOO_SOCKET_IFNAME", None)
    try:
        use_loopback()
        return os.environ["GLOO_SOCKET_IFNAME"]
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        if before is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = before


def test_the_users_network_interface_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    use_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_rank_that_never_joins_is_noticed_in_time(ranks: Ranks) -> None:
    begin = time.monotonic()
    (seen, _), _ = ranks.run(cases.place, 1.0, WORLD_SIZE="3")
    assert "imeout" in seen or "imed out" in seen
    assert time.monotonic() - begin < 20


def test_restarted_ranks_meet_on_the_old_store(ranks: Ranks) -> None:
    """The agent's store keeps the addresses of the ranks that died; a rank that comes first must not dial them.

    Which rank dials depends on the ports, so each restart would fail every second time only.
    """
    assert [status for _, status in ranks.run(cases.die_after_joining)] == [9, 9]
    for attempt in range(1, 6):
        again = ranks.run(cases.place, 10.0, 0.4, TORCHELASTIC_RESTART_COUNT=str(attempt))
        assert [seen[4] for seen, _ in again] == [1.0, 1.0]


def test_a_collective_that_one_rank_never_joins_raises_within_the_step_timeout(ranks: Ranks) -> None:
    """On the default group and every mesh group, whatever the collective; the limit at the start was 60 s."""
    (seen, status), _ = ranks.run(cases.absent, 0.4)
    assert status == 0
    assert set(seen) == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "shift", "send",
                         "receive", "default"}  # fmt: skip
    for name, (seconds, error) in seen.items():
        assert "imed out" in error or "imeout" in error, (name, error)
        assert 0.3 < seconds < 3.0, (name, seconds)


@pytest.mark.parametrize("holding_the_lock", [False, True])
def test_a_teardown_that_hangs_ends_the_process(ranks: Ranks, holding_the_lock: bool) -> None:
    begin = time.monotonic()
    assert ranks.run(cases.hang_in_teardown, holding_the_lock) == [(None, 1)] * 2
    assert time.monotonic() - begin < 20
    for rank in range(2):
        trace = ranks.log(rank).read_text()
        assert "Timeout" in trace
        assert "in hang" in trace
        assert "in leave" in trace


def test_a_teardown_in_time_leaves_the_process_alone(ranks: Ranks) -> None:
    assert ranks.run(cases.leave_and_live, 0.3) == [("alive", 0)] * 2


def test_deadline_ends_with_its_block() -> None:
    with deadline(0.05):
        pass
    time.sleep(0.1)
