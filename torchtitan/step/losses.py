"""The losses of a step's microbatches, kept on the device until a step turns out to be bad."""

import contextlib
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.tools.host_copy import read_later

_SECONDS_TO_WAIT = 10  # for what other ranks say; all of them come here in the same step
_MOST_TOLD = 8
# Steps that were bad, of all engines of this process: the same number on every rank.
_bad_steps = itertools.count()


class StepLosses:
    """What is known of the microbatches since the last optimizer step."""

    def __init__(self) -> None:
        # Bounded, for callers that never come to `engine.optim_step`.
        self._calls: deque[tuple[Tensor, Sequence[Tensor | None]]] = deque(maxlen=1024)

    def add(self, losses: Tensor, sample_ids: Sequence[Tensor | None]) -> None:
        """losses: [n], on the device. sample_ids: of each microbatch, [rows, 2], if it has some;
        see `batch.documents.SAMPLE_IDS`."""
        self._calls.append((losses.detach().float(), sample_ids))

    def clear(self) -> None:
        self._calls.clear()

    def take(self) -> Callable[[], str]:
        """Begin a new step. Call what is returned to have the old one's bad losses described.

        The call is for all ranks, but does not hang if one is missing.
        """
        losses = (
            read_later(torch.cat([losses for losses, _ in self._calls])) if self._calls else list
        )
        sample_ids = [ids for _, of_call in self._calls for ids in of_call]
        self._calls.clear()
        return lambda: _describe(losses(), sample_ids)


def _describe(losses: Sequence[float], sample_ids: Sequence[Tensor | None]) -> str:
    """Which microbatches had a bad loss, on any rank."""
    own = None
    if bad := [i for i, loss in enumerate(losses) if not math.isfinite(loss)]:
        i = bad[0]
        # Fillers, which come last, have none.
        ids = sample_ids[i] if i < len(sample_ids) else None
        rows = [] if ids is None else ids[:_MOST_TOLD].tolist()
        own = {"microbatch": i + 1, "of": len(losses), "loss": str(losses[i]), "rows": rows}
    found, ranks, problem = _of_all_ranks(own)
    if not found:
        return f"the loss of each microbatch is finite, so a gradient overflowed{problem}"
    first = min(found, key=lambda entry: (entry["microbatch"], entry["rank"]))
    rows = "".join(
        f", row {i} (document{f' {a}' if a == b else f's {a} to {b}'})"
        for i, (a, b) in enumerate(first["rows"], start=1)
        if b >= 0
    )
    listed = ", ".join(map(str, ranks[:64])) + (", ..." if len(ranks) > 64 else "")
    return (
        f"the first bad loss, {first['loss']}, is that of microbatch {first['microbatch']} of "
        f"{first['of']} on rank {first['rank']}{rows}; ranks with a bad loss: {listed}{problem}"
    )


def _of_all_ranks(own: dict[str, Any] | None) -> tuple[list[dict[str, Any]], list[int], str]:
    """(entries of a few ranks, all ranks with one, what to say if some are not known).

    Through the store and not a collective: a rank may look at its step when others don't.
    """
    number = next(_bad_steps)
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return ([own | {"rank": 0}], [0], "") if own else ([], [], "")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    mine = [own | {"rank": rank}] if own else []
    store = dist.PrefixStore(f"bad_step/{number}", dist.distributed_c10d._get_default_store())
    try:
        if own:
            store.set(f"bad/{store.add('n_bad', 1)}", json.dumps(mine[0]))
        if store.add("n_told", 1) == n_ranks:
            store.set("all_told", "")
        store.wait(["all_told"], timedelta(seconds=_SECONDS_TO_WAIT))
        entries = [json.loads(store.get(f"bad/{i + 1}")) for i in range(store.add("n_bad", 0))]
    except RuntimeError as error:  # a rank is elsewhere, or gone, and the store with it
        return mine, [rank] if own else [], f" (other ranks did not say: {type(error).__name__})"
    with contextlib.suppress(RuntimeError):
        # The rank that holds the store may end the job now: not before the others have read it.
        if store.add("n_read", 1) == n_ranks:
            store.set("all_read", "")
        store.wait(["all_read"], timedelta(seconds=_SECONDS_TO_WAIT))
    return entries, sorted(entry["rank"] for entry in entries), ""
