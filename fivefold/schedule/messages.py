"""The messages between ranks that a table implies, in one global order, and when each rank posts its share of them.

Why this cannot deadlock, on channels that keep order and buffer nothing: number the messages in the global order, and
look at the first one that has not been transferred. Both its ends post their messages in that order, so on both sides
it is the next one, whatever queues they share. Its sender has posted it if it could run up to the producer, and its
receiver if it could run up to where it posts. Neither can be held up by a message: all that such an action consumes was
produced before it starts, so has a smaller number than what it produces, and has arrived; and a receiver posts before
any action that consumes something later in the order. Waiting happens in consumers alone: no rank waits for a send, or
for a receive that it does not use yet. So the message is transferred, and then the next.

Posting per edge (a receive just before its use, a send right after its producer) has no such order: two ranks that
both wait for a send deadlock, and on a channel that matches by order alone (NCCL) a receive may take another message.
"""

from __future__ import annotations

from typing import NamedTuple

from .simulate import simulate
from .table import Action, Table, needs, owners, split_backwards


class Message(NamedTuple):
    """The result of ``producer`` on rank ``source``, on its way to ``consumer`` on rank ``target``."""

    producer: Action
    consumer: Action
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.producer} -> {self.consumer} (rank {self.source} to {self.target})"


class Send(NamedTuple):
    """Post a message's send; nothing waits for it before the table's end."""

    message: Message


class Receive(NamedTuple):
    """Post a message's receive; its consumer waits for it."""

    message: Message


def messages(table: Table) -> list[Message]:
    """Every message between ranks, in the one order in which all ranks post.

    By the simulated end of the producer, at unit costs, so that ranks with other measured costs cannot disagree; ties
    by rank.
    """
    owner, split = owners(table), split_backwards(table)
    end = simulate(table).end
    found = [
        Message(producer, consumer, owner[producer.stage], rank)
        for rank, order in enumerate(table)
        for consumer in order
        for producer in needs(consumer, len(owner), split)
        if owner[producer.stage] != rank
    ]
    return sorted(found, key=lambda message: (end[message.producer], message.source))


def lower(table: Table, ahead: int = 1) -> list[list[Action | Send | Receive]]:
    """Each rank's actions with its share of the messages posted in the global order.

    A send is posted right after its producer. A receive is posted ``ahead`` actions before its consumer, so that it
    travels during these; later where a message before it in the order is sent later, and earlier where one after it is
    posted earlier. The module's docstring says why no rank can get stuck.
    """
    place = {action: i for order in table for i, action in enumerate(order)}
    shares: list[list[Message]] = [[] for _ in table]
    for message in messages(table):
        shares[message.source].append(message)
        shares[message.target].append(message)
    return [_post(rank, order, shares[rank], place, ahead) for rank, order in enumerate(table)]


def _post(
    rank: int, order: list[Action], share: list[Message], place: dict[Action, int], ahead: int
) -> list[Action | Send | Receive]:
    """One rank's actions with its messages, each posted before the action at its position."""
    positions = []
    sent = 0
    for message in share:
        if message.source == rank:
            sent = place[message.producer] + 1
            positions.append(sent)
        else:
            positions.append(max(place[message.consumer] - ahead, sent))
    for i in reversed(range(len(positions) - 1)):
        positions[i] = min(positions[i], positions[i + 1])
    program: list[Action | Send | Receive] = []
    done = 0
    for message, position in zip(share, positions):
        program += order[done:position]
        done = position
        program.append(Send(message) if message.source == rank else Receive(message))
    return program + order[done:]
