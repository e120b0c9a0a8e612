"""Commands that wait for the policy, and the order in which they run.

Commands of one lane run in order. A model's commands are a lane, and so are sample requests to one sampler
with the same settings. Lanes take turns: the lane that has waited longest for a turn comes first.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

# For this time after each command, a lane is expected to get more commands.
_SECONDS_RECENT = 1.0


@dataclass(frozen=True)
class Command:
    """A call of a `Policy` method: the method's name and arguments, and a callback for the result.

    answer: called with the method's result, or the exception that it raised.
    joins: waiting commands with the same key run as one call; None: the command runs by itself.
    items: a merged call gets the items of all its commands as argument `items`, and returns a value or
        an exception per item. Each command's `answer` gets the results of the command's items.
    lane: "" for a command that is independent of all others.
    size: the sizes of merged commands add up to at most `RequestQueue`'s max_size. Commands of size 0 are
        merged without limit.
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
    """Waiting commands. max_size: limit of a merged call's size; a larger single command is allowed."""

    def __init__(self, max_size: int):
        self._max_size = max_size
        # Lanes in the order of their turns; the first has waited longest.
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
        """True if all lanes' first commands can be merged, and more commands are expected soon."""
        firsts = [lane[0] for lane in self._lanes.values()]
        if not all(command.joins for command in firsts):
            return False
        after = time.monotonic() - _SECONDS_RECENT
        self._last_seen = {lane: t for lane, t in self._last_seen.items() if t > after}
        is_expected = any(lane not in self._lanes for lane in self._last_seen)
        return is_expected or any(command.comes_in_bursts for command in firsts)

    def next_batch(self) -> list[Command]:
        """Remove and return the first lane's first command and all commands to merge with it.

        Every lane contributes one command before any lane contributes a second. Afterwards, lanes that
        contributed move to the end.
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
