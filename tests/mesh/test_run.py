"""``once``: run in the forward, replayed in the recompute."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fivefold.mesh.mesh import Mesh
from fivefold.mesh.run import Run


@pytest.fixture
def run() -> Run:
    return Run(Mesh.single())


def test_outside_a_frozen_block_it_is_a_call(run: Run) -> None:
    numbers = itertools.count()
    assert [run.once(lambda: next(numbers)) for _ in range(3)] == [0, 1, 2]


def test_recompute_gets_the_forwards_values_in_order(run: Run) -> None:
    numbers, store = itertools.count(), []
    with run.freeze(store, replay=False):
        forward = [run.once(lambda: next(numbers)), run.once(lambda: next(numbers))]
    with run.freeze(store, replay=True):
        again = [run.once(lambda: next(numbers)), run.once(lambda: next(numbers))]
    assert forward == again == store == [0, 1]
    assert next(numbers) == 2


def test_each_recompute_starts_from_the_first_value(run: Run) -> None:
    store: list[Any] = []
    with run.freeze(store, replay=False):
        run.once(lambda: "route")
    for _ in range(2):
        with run.freeze(store, replay=True):
            assert run.once(lambda: "other") == "route"


def test_blocks_keep_their_own_values(run: Run) -> None:
    """Two blocks forward, then backward in the opposite order."""
    stores: list[list[Any]] = [[], []]
    for i, store in enumerate(stores):
        with run.freeze(store, replay=False):
            run.once(lambda i=i: i)
    for i in (1, 0):
        with run.freeze(stores[i], replay=True):
            assert run.once(lambda: None) == i


def test_an_inner_block_does_not_move_the_outer_one(run: Run) -> None:
    outer: list[Any] = []
    with run.freeze(outer, replay=False):
        run.once(lambda: "a")
        with run.freeze(inner := [], replay=False):
            run.once(lambda: "inner")
        run.once(lambda: "b")
    assert (outer, inner) == (["a", "b"], ["inner"])
    with run.freeze(outer, replay=True):
        assert run.once(lambda: None) == "a"
        with run.freeze(inner, replay=True):
            assert run.once(lambda: None) == "inner"
        assert run.once(lambda: None) == "b"


def test_an_error_ends_the_frozen_block(run: Run) -> None:
    with pytest.raises(ArithmeticError), run.freeze([], replay=True):
        raise ArithmeticError
    assert run.once(lambda: 5) == 5


def test_a_recompute_that_asks_for_more_than_the_forward_is_an_error(run: Run) -> None:
    with run.freeze([], replay=True), pytest.raises(IndexError):
        run.once(lambda: 1)
