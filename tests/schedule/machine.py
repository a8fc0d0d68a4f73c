"""Ranks joined by channels that keep order and buffer nothing, on which programs of actions and messages are played.

A channel matches by order alone, as NCCL does: the next send goes to the next receive, whatever message that meant.
Each end has its operations in one or more queues; one is done only when it is the first of its queue on both ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from fivefold.schedule.messages import Message, Receive, Send, messages
from fivefold.schedule.table import Action, Table

OK, DEADLOCK, SWAP = "ok", "deadlock", "swap"


class Wait(NamedTuple):
    """Go no further before the send of ``message`` is done."""

    message: Message


Item = Action | Send | Receive | Wait
Program = list[list[Item]]
Channel = Callable[[Message], Hashable]
"""The queue, on both of its ends, that a message goes through."""

CHANNELS: dict[str, Channel] = {
    "a queue for each pair of ranks": lambda m: (min(m.source, m.target), max(m.source, m.target)),
    "a queue for each source and target": lambda m: (m.source, m.target),
    "a queue for each source, target and pass": lambda m: (m.source, m.target, m.producer.kind == "F"),
    "a queue for each rank": lambda m: None,
}


class Machine:
    """The state of a program that is being played."""

    def __init__(self, program: Program, channel: Channel, runs_ahead: bool) -> None:
        self.program, self.channel, self.runs_ahead = program, channel, runs_ahead
        self.actions = [[item for item in order if isinstance(item, Action)] for order in program]
        received = [item.message for order in program for item in order if isinstance(item, Receive)]
        self.input = {message.consumer: message for message in received}  # no action has two
        sends = [item.message for order in program for item in order if isinstance(item, Send)]
        self.output = {message.producer: message for message in sends}
        self.posted, self.launched, self.ran = ([0] * len(program) for _ in range(3))
        self.queues: dict[tuple[int, Hashable], deque[Send | Receive]] = {}
        self.computed: set[Action] = set()
        self.sent: set[Message] = set()
        self.arrived: set[Message] = set()
        self.awake = deque(range(len(program)))

    def play(self) -> str:
        """``OK``, ``DEADLOCK`` or ``SWAP``, a message taken for another one."""
        while self.awake:
            rank = self.awake.popleft()
            if not self.advance(rank):
                return SWAP
        done = all(self.ran[r] == len(a) for r, a in enumerate(self.actions))
        done = done and all(self.posted[r] == len(p) for r, p in enumerate(self.program))
        return OK if done and not any(self.queues.values()) else DEADLOCK

    def advance(self, rank: int) -> bool:
        """Post and compute on a rank as far as it goes; False if a message went astray."""
        order = self.program[rank]
        while self.posted[rank] < len(order):
            item = order[self.posted[rank]]
            if isinstance(item, Action):
                if not self.runs_ahead and not self.compute(rank, item):
                    return True
                self.launched[rank] += 1
            elif isinstance(item, Wait):
                if item.message not in self.sent:
                    break
            else:
                key = self.channel(item.message)
                self.queues.setdefault((rank, key), deque()).append(item)
                if not self.transfer([rank], key):
                    return False
            self.posted[rank] += 1
        while self.runs_ahead and self.ran[rank] < self.launched[rank]:
            action = self.actions[rank][self.ran[rank]]
            if not self.compute(rank, action):
                return True
            message = self.output.get(action)
            if message and not self.transfer([rank], self.channel(message)):
                return False
        return True

    def compute(self, rank: int, action: Action) -> bool:
        """Run an action, if its message has arrived."""
        message = self.input.get(action)
        if message is not None and message not in self.arrived:
            return False
        self.computed.add(action)
        self.ran[rank] += 1
        return True

    def transfer(self, ranks: list[int], key: Hashable) -> bool:
        """Do what is first on both ends of these ranks' queues, and then what comes first; False if it went astray."""
        while ranks:
            queue = self.queues.get((ranks[-1], key))
            rank, ours = ranks.pop(), queue[0] if queue else None
            if ours is None:
                continue
            peer = ours.message.target if isinstance(ours, Send) else ours.message.source
            others = self.queues.get((peer, key))
            theirs = others[0] if others else None
            if theirs is None or type(ours) is type(theirs):
                continue
            send, receive = (ours.message, theirs.message) if isinstance(ours, Send) else (theirs.message, ours.message)
            if send[2:] != receive[2:] or send.producer not in self.computed:
                continue
            if send != receive:
                return False
            self.queues[rank, key].popleft()
            self.queues[peer, key].popleft()
            self.sent.add(send)
            self.arrived.add(receive)
            self.awake.extend((peer, rank))
            ranks += [peer, rank]
        return True


def play(program: Program, channel: Channel, *, runs_ahead: bool = False) -> str:
    """What comes of a program.

    Args:
        runs_ahead: whether a rank posts without waiting for its actions, as the host of a GPU does; they then run one
            after the other beside it, and a send waits for its producer.
    """
    return Machine(program, channel, runs_ahead).play()


def naive(table: Table, *, wait: bool) -> Program:
    """Each receive just before its use, each send right after its producer: what one writes without thinking."""
    found = messages(table)
    into = {m.consumer: m for m in found}
    out = {m.producer: m for m in found}
    program: Program = []
    for order in table:
        items: list[Item] = []
        for action in order:
            if action in into:
                items.append(Receive(into[action]))
            items.append(action)
            if action in out:
                items.append(Send(out[action]))
                if wait:
                    items.append(Wait(out[action]))
        program.append(items)
    return program
