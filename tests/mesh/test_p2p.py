"""Messages between two ranks: their order, their channels, what a handle keeps, and what the recorder sees."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fivefold.mesh.pool import Pool

from . import cases

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("world", [2, 3])
def test_messages_arrive_in_the_order_they_were_sent(pool: Pools, world: int) -> None:
    """All are under way at once, each of its own size."""
    for rank, (came, _, free) in enumerate(pool(world).run(cases.passed_on, 5)):
        source = (rank - 1) % world
        assert came == [[10.0 * source + i] * (i + 1) for i in range(5)]
        assert all(free)


def test_the_recorder_sees_every_message_with_its_bytes(pool: Pools) -> None:
    for _, events, _ in pool(2).run(cases.passed_on, 3):
        assert [(e["op"], e["sent"], e["received"]) for e in events] == [
            (op, n * (op == "send"), n * (op == "receive")) for n in (4, 8, 12) for op in ("send", "receive")
        ]
        for e in events:
            assert (e["axis"], e["size"], e["scope"]["stage"], e["scope"]["microbatch"]) == ("pp", 2, 2, 5)
            assert 0 < e["post"] <= e["begin"] <= e["end"]


def test_gradients_do_not_queue_behind_activations(pool: Pools) -> None:
    _, (gradients, activations) = pool(2).run(cases.two_channels)
    assert (gradients, activations) == ([10.0, 20.0], [1.0, 2.0, 3.0])


@pytest.mark.parametrize("texts", [["", "one"], ["a" * 100_000, "b"], ["", ""], ["gewöhnlich", "\u6570\u636e"]])
def test_texts_of_any_length(pool: Pools, texts: list[str]) -> None:
    assert pool(2).run(cases.texts, texts) == [texts, texts]
