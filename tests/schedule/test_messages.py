"""Messages in one global order: every program survives channels without buffers, and without that order not all do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest

from fivefold.schedule.messages import Message, Receive, Send, lower, messages
from fivefold.schedule.named import NAMES, SCHEDULES, build
from fivefold.schedule.table import Action, Table, owners
from tests.schedule.machine import CHANNELS, DEADLOCK, OK, SWAP, Program, Wait, naive, play

STRICTEST = "a queue for each rank"


def tables(pp: int, microbatches: int, most_chunks: int = 4) -> Iterator[tuple[str, Table]]:
    """Every named schedule, with every chunk count up to the most."""
    for name in NAMES:
        for chunks in range(1, most_chunks + 1) if SCHEDULES[name].any_chunks else (None,):
            if name != "auto" or (microbatches % 5 == 1 and chunks != 4):  # it makes many tables to choose one
                yield f"{name} {chunks} pp={pp} m={microbatches}", build(name, pp, microbatches, chunks)


@pytest.mark.parametrize("pp", range(2, 9))
def test_every_program_survives_channels_without_buffers(pp: int) -> None:
    failed = []
    for m in range(1, 17):
        for name, table in tables(pp, m, 4 if pp <= 4 else 3):
            for ahead in (0, 1, 2) if pp <= 4 or m % 3 == 1 else (1,):
                program = lower(table, ahead)
                # a queue of one's own for some messages can only let more of them pass, so the rest is sampled
                channels = CHANNELS if ahead == 1 or pp <= 3 else (STRICTEST,)
                found = {(key, False): play(program, CHANNELS[key]) for key in channels}
                if ahead == 1:
                    found[STRICTEST, True] = play(program, CHANNELS[STRICTEST], runs_ahead=True)
                failed += [(name, ahead, key, verdict) for key, verdict in found.items() if verdict != OK]
    assert failed == []


@pytest.mark.parametrize("pp", range(2, 7))
def test_waiting_for_whatever_was_posted_is_safe(pp: int) -> None:
    """The executor waits for old sends, and at first for the header of an activation, at both ends."""
    failed = []
    for m in (1, 2, 5, 8):
        for name, table in tables(pp, m, 3):
            for ahead in (0, 1, 3):
                program: Program = [
                    [x for item in order for x in ((item,) if isinstance(item, Action) else (item, Wait(item.message)))]
                    for order in lower(table, ahead)
                ]
                if play(program, CHANNELS[STRICTEST]) != OK:
                    failed.append((name, ahead))
    assert failed == []


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("wait", [False, True])
def test_posting_without_an_order_does_not_survive(wait: bool, runs_ahead: bool) -> None:
    found: Counter[tuple[str, str]] = Counter()
    for pp in (2, 4):
        for m in (4, 8):
            for _, table in tables(pp, m, 3):
                for key, channel in CHANNELS.items():
                    found[key, play(naive(table, wait=wait), channel, runs_ahead=runs_ahead)] += 1
    assert found["a queue for each pair of ranks", DEADLOCK] > 20
    assert found[STRICTEST, DEADLOCK] > 20
    if wait:
        assert all(found[key, DEADLOCK] > 20 for key in CHANNELS)
    else:
        # worse than a deadlock: in a V, a receive takes the gradient of one chunk for the activation of another
        assert found["a queue for each source and target", SWAP] > 0
        assert found["a queue for each source, target and pass", OK] > 20


def test_the_machine_notices_a_changed_order() -> None:
    program = lower(build("zb_v", 4, 6))
    places = [i for i, item in enumerate(program[1]) if not isinstance(item, Action)]
    verdicts = Counter()
    for i, j in pairwise(places):
        changed = [list(order) for order in program]
        changed[1][i], changed[1][j] = changed[1][j], changed[1][i]
        if not isinstance(program[1][i], Send) or not isinstance(program[1][j], Send):
            verdicts[play(changed, CHANNELS[STRICTEST])] += 1
    # two receives, or a receive and a send, may change places where their other ends are not in that order either
    assert verdicts[DEADLOCK] + verdicts[SWAP] > 5


def test_the_machine_notices_what_is_never_sent() -> None:
    program = lower(build("1f1b", 2, 2))
    for rank, order in enumerate(program):
        for i, item in enumerate(order):
            if isinstance(item, Send | Receive):
                cut = [list(entry) for entry in program]
                del cut[rank][i]
                assert play(cut, CHANNELS[STRICTEST]) != OK or isinstance(item, Receive), item


def test_messages_go_between_ranks_only_and_in_the_order_of_their_producers() -> None:
    first, second = build("1f1b", 2, 2)
    f, b = ([Action(kind, stage, m) for stage in (0, 1) for m in (0, 1)] for kind in "FB")
    assert (first, second) == ([f[0], f[1], b[0], b[1]], [f[2], b[2], f[3], b[3]])
    # F0.0 ends at 1, F0.1 at 2, B1.0 at 4, B1.1 at 7
    expected = [Message(f[0], f[2], 0, 1), Message(f[1], f[3], 0, 1), Message(b[2], b[0], 1, 0)]
    assert messages([first, second]) == [*expected, Message(b[3], b[1], 1, 0)]
    assert messages(build("1f1b", 1, 3)) == []
    assert str(expected[0]) == "F0.0 -> F1.0 (rank 0 to 1)"


def test_stages_beside_each_other_on_one_rank_send_nothing() -> None:
    table = build("zb_v", 3, 4)
    owner = owners(table)
    assert owner == [0, 1, 2, 2, 1, 0]
    edges = {(m.producer.stage, m.consumer.stage) for m in messages(table)}
    assert edges == {(0, 1), (1, 2), (3, 4), (4, 5), (5, 4), (4, 3), (2, 1), (1, 0)}
    assert len(messages(table)) == len(edges) * 4
    assert all((m.source, m.target) == (owner[m.producer.stage], owner[m.consumer.stage]) for m in messages(table))


@pytest.mark.parametrize("ahead", [0, 1, 2, 50])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v", "dualpipe_v"])
def test_a_program_holds_its_ranks_actions_and_its_share_of_the_messages_in_order(name: str, ahead: int) -> None:
    table = build(name, 4, 7)
    found = messages(table)
    for rank, items in enumerate(lower(table, ahead)):
        assert [item for item in items if isinstance(item, Action)] == table[rank]
        ours = [item.message for item in items if isinstance(item, Send | Receive)]
        assert ours == [message for message in found if rank in (message.source, message.target)]
        place = {item: i for i, item in enumerate(items)}
        for message in ours:
            if message.source == rank:
                between = items[place[message.producer] + 1 : place[Send(message)]]
                assert not any(isinstance(item, Action) for item in between)
            else:
                assert place[Receive(message)] < place[message.consumer]


def test_a_receive_is_posted_as_far_ahead_as_asked() -> None:
    table = build("gpipe", 2, 4)
    leads = []
    for ahead in (0, 1, 2):
        items = lower(table, ahead)[0]
        place = {item: i for i, item in enumerate(items)}
        (last,) = (m for m in messages(table) if m.producer == Action("B", 1, 3))
        between = items[place[Receive(last)] : place[last.consumer]]
        leads.append(sum(isinstance(item, Action) for item in between))
    assert leads == [0, 1, 2]
