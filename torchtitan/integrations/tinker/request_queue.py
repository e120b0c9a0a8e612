"""Commands that wait for the policy, and whose turn it is.

Commands of a lane, such as those of a model, or the draws of a sampler with the same settings, run in their
order. Lanes take turns; among lanes, the first command of the one that waits longest comes first.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

_SECONDS_RECENT = 1.0  # for so long after its last command a lane is expected to have more


@dataclass(frozen=True)
class Command:
    """The name of a method of `Policy`, its arguments, and a callback.

    answer: called with the method's result, or the exception that it raised.
    joins: waiting commands with the same key run as one; None runs the command by itself.
    items: the argument `items` has those of all commands that run as one. The result has a value, or
        an exception, per item, and `answer` gets its command's.
    lane: "" for a command that depends on no other.
    size: of this command, for the limit of commands that run as one; 0 is not limited.
    comes_in_bursts: more commands of this lane may follow soon.
    """

    method: str
    arguments: dict[str, Any]
    answer: Callable[[Any], None] = lambda _: None
    joins: Hashable = None
    items: Sequence[Any] = ()
    lane: Hashable = ""
    size: int = 0
    comes_in_bursts: bool = False


class RequestQueue:
    """Waiting commands. max_size: of commands that run as one, except if the first one is larger."""

    def __init__(self, max_size: int):
        self._max_size = max_size
        # The lane that has waited longest for a turn is the first one.
        self._lanes: dict[Hashable, deque[Command]] = {}
        self._last_seen: dict[Hashable, float] = {}

    @property
    def has_commands(self) -> bool:
        return bool(self._lanes)

    def add(self, command: Command) -> None:
        self._lanes.setdefault(command.lane or id(command), deque()).append(command)
        if command.lane and not command.comes_in_bursts:
            self._last_seen[command.lane] = time.monotonic()

    def may_gather(self) -> bool:
        """True if every lane's first command can be joined by commands that may come soon."""
        firsts = [lane[0] for lane in self._lanes.values()]
        if not all(command.joins for command in firsts):
            return False
        after = time.monotonic() - _SECONDS_RECENT
        self._last_seen = {lane: t for lane, t in self._last_seen.items() if t > after}
        is_expected = any(lane not in self._lanes for lane in self._last_seen)
        return is_expected or any(command.comes_in_bursts for command in firsts)

    def next_batch(self) -> list[Command]:
        """Remove and return commands to run as one: the first lane's, and those that may join it.

        Each lane gives one command before a lane gives its second one. The lanes that gave some go
        behind the others.
        """
        first, *others = self._lanes.values()
        batch = [first.popleft()]
        key, size, n_before = batch[0].joins, batch[0].size, 0
        while key is not None and n_before < len(batch):
            n_before = len(batch)
            for lane in (*others, first):
                if lane and lane[0].joins == key and lane[0].size + size <= self._max_size:
                    batch.append(lane.popleft())
                    size += batch[-1].size
        served = {command.lane for command in batch}
        left = [(name, lane) for name, lane in self._lanes.items() if lane]
        self._lanes = dict(sorted(left, key=lambda entry: entry[0] in served))
        return batch
