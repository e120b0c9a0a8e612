"""The order in which a rank of a pipeline computes and communicates, as lists of actions.

Each of torch's schedules has a table of every rank's computations, in order. This module reads the table
(1F1B and GPipe have no table, and are written here), and adds the sends and receives.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torchtitan.tools.files import open_file

Order = dict[int, list["Action"]]
"""rank of the pipeline -> its actions"""


class Action(NamedTuple):
    """A computation, a message or an FSDP operation of one stage.

    kind: F, forward. B, backward. I and W, the halves of backward in zero-bubble schedules: the
        gradients of the stage's input, and of its weights. SEND_F, RECV_F: hidden states.
        SEND_B, RECV_B: gradients. REDUCE: reduce the stage's gradients. RESHARD: free the stage's
        gathered parameters until its next forward or backward.
    """

    kind: str
    stage: int
    microbatch: int = -1


_COMPUTE = re.compile(r"(\d+)([FBIW])(\d+)")
# Number of stages that stay gathered: the next stages to compute.
_ACTIVE_STAGES = 3


def compute_order(schedule: type, stages: Sequence[Any], n: int, csv_path: str = "") -> Order:
    """Return the actions of every rank, from torch's schedule or from a CSV file with a row per rank.

    An overlapped forward and backward, `(0F3;1B2)OVERLAP_F_B`, becomes two actions.
    """
    if csv_path:
        with open_file(csv_path, newline="") as file:
            order = {rank: _read(row) for rank, row in enumerate(csv.reader(file))}
        _check_complete(order, stages[0].num_stages, csv_path)
        return order
    if schedule.__name__ in ("Schedule1F1B", "ScheduleGPipe"):
        num_ranks, is_gpipe = stages[0].num_stages, schedule.__name__ == "ScheduleGPipe"
        return {
            rank: _single_stage_order(rank, n if is_gpipe else min(n, num_ranks - rank), n)
            for rank in range(num_ranks)
        }
    table = schedule(list(stages), n).pipeline_order
    return {rank: _read(map(str, filter(None, row))) for rank, row in table.items()}


def _read(cells: Iterable[str]) -> list[Action]:
    parts = (part for cell in cells for part in _COMPUTE.findall(cell))
    return [Action(kind, int(stage), int(microbatch)) for stage, kind, microbatch in parts]


def _check_complete(order: Order, num_stages: int, csv_path: str) -> None:
    kinds: dict[tuple[int, int], str] = defaultdict(str)
    for action in (action for actions in order.values() for action in actions):
        kinds[action.stage, action.microbatch] += action.kind
    for stage in range(num_stages):
        for microbatch in range(1 + max((key[1] for key in kinds), default=0)):
            if (got := kinds[stage, microbatch]) not in ("FB", "FIW"):
                raise ValueError(
                    f"parallelism.pipeline_parallel_schedule_csv = {csv_path!r} must have every stage "
                    f"compute every microbatch once, in the order F, B or F, I, W; stage "
                    f"{stage}, microbatch {microbatch} has {', '.join(got) or 'nothing'}"
                )


def _single_stage_order(stage: int, num_ahead: int, n: int) -> list[Action]:
    """Return `num_ahead` forwards, then backwards that alternate with the remaining forwards."""
    forwards = (Action("F", stage, microbatch) for microbatch in range(n))
    actions = list(islice(forwards, num_ahead))
    for microbatch in range(n):
        actions += [Action("B", stage, microbatch), *islice(forwards, 1)]
    return actions


def select(order: Order, n: int, forward_only: bool) -> Order:
    """Return the order of the first n microbatches; only the forwards if `forward_only`."""
    return {
        rank: [a for a in actions if a.microbatch < n and (a.kind == "F" or not forward_only)]
        for rank, actions in order.items()
    }


def rank_of_stages(order: Order) -> dict[int, int]:
    """Return a dict: stage -> the rank that computes it."""
    return {action.stage: rank for rank, actions in order.items() for action in actions}


def with_messages(order: Order, rank_of: dict[int, int]) -> Order:
    """Add sends and receives between ranks, in an order in which no rank waits for ever.

    Simulates all ranks together, and adds a send and its receive at the same moment, so any two ranks
    have their messages in the same order. Raises ValueError if an action can never start.
    """
    result: Order = {rank: [] for rank in order}
    position = dict.fromkeys(order, 0)
    # (F or B, stage, microbatch) of the actions so far.
    computed: set[tuple[str, int, int]] = set()
    last = max(rank_of)
    while any(position[rank] < len(actions) for rank, actions in order.items()):
        before = dict(position)
        for rank, actions in order.items():
            # Take actions up to and including the next forward or backward, if its input exists.
            while position[rank] < len(actions):
                action = actions[position[rank]]
                kind, stage, microbatch = action
                direction = {"F": "F", "B": "B", "I": "B"}.get(kind)
                source = stage + (-1 if direction == "F" else 1)
                if direction and 0 <= source <= last:
                    if (direction, source, microbatch) not in computed:
                        break
                result[rank].append(action)
                position[rank] += 1
                if direction:
                    computed.add((direction, stage, microbatch))
                    target = stage + (1 if direction == "F" else -1)
                    if 0 <= target <= last and rank_of[target] != rank:
                        result[rank].append(Action(f"SEND_{direction}", stage, microbatch))
                        receive = Action(f"RECV_{direction}", target, microbatch)
                        result[rank_of[target]].append(receive)
                    break
        if position == before:
            waiting = [
                actions[position[r]] for r, actions in order.items() if actions[position[r] :]
            ]
            raise ValueError(f"the pipeline's actions never compute the inputs of {waiting}")
    return result


def with_reductions(actions: list[Action]) -> list[Action]:
    """Add REDUCE after the last backward of each stage."""
    last = {action.stage: i for i, action in enumerate(actions) if action.kind in "BW"}
    result = []
    for i, action in enumerate(actions):
        result.append(action)
        if last.get(action.stage) == i:
            result.append(Action("REDUCE", action.stage))
    return result


def with_resharding(actions: list[Action]) -> list[Action]:
    """Add RESHARD for gathered stages that are not among the next three to compute, to save memory."""
    if len({action.stage for action in actions}) <= _ACTIVE_STAGES:
        return actions
    result: list[Action] = []
    gathered: set[int] = set()
    for i, action in enumerate(actions):
        # Messages need no parameters.
        needed = (a.stage for a in actions[i:] if "_" not in a.kind)
        upcoming = list(dict.fromkeys(needed))[:_ACTIVE_STAGES]
        result += [Action("RESHARD", stage) for stage in sorted(gathered.difference(upcoming))]
        gathered = gathered.intersection(upcoming) | {action.stage}
        result.append(action)
    return result
