"""What every test runs under: one thread, shape checking, a time limit."""

from __future__ import annotations

import os

# Before anything imports torch. Workers are forked from this process, and a child of a process whose OpenMP has started
# more than one thread hangs; one thread is also what makes two ranks on two cores comparable.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import faulthandler
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

pytest_plugins = ["tests.pools"]

SHAPE_CHECKED = ["fivefold.ops", "fivefold.layers"]
TIME_LIMIT_S = 120


def pytest_configure(config: pytest.Config) -> None:
    """Check jaxtyping's shapes in the packages that declare them; must come before they are imported."""
    early = [name for name in sys.modules if name.startswith(tuple(SHAPE_CHECKED))]
    assert not early, f"imported before shape checking was on: {early}"
    install_import_hook(SHAPE_CHECKED, "beartype.beartype")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where the driver shows none. Asking CUDA itself would make this process unfit to fork."""
    if not Path("/dev/nvidiactl").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """End a test that exceeds its limit, with the stack of every thread."""
    marker = item.get_closest_marker("time_limit")
    limit_s = marker.args[0] if marker else TIME_LIMIT_S
    if threading.current_thread() is not threading.main_thread():
        return (yield)

    def expire(number: int, frame: object) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__)
        raise TimeoutError(f"the test ran longer than {limit_s} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
