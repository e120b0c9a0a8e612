"""Who writes what of a checkpoint, remembered from one save to the next.

For each save every rank lists its tensors, rank 0 merges the lists of all ranks, and each gets back
what it has to write: work that grows with the model times the ranks, and comes out the same every
time. DCP can remember it: a rank whose list is as before says only that.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

# What DCP remembers, in the class, by a key.
_CACHES = (
    "_cached_save_plan",
    "_cached_final_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
)
_numbers = itertools.count()


class SavePlans:
    """The plans of one checkpoint manager, whose saves every rank takes part in."""

    def __init__(self) -> None:
        self.forget()

    def arguments(self) -> dict[str, Any]:
        """What `dcp.save` gets for the next save. One rank has nobody to agree with."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return {}
        return {"planner": _RememberingPlanner(self._key)}

    def forget(self) -> None:
        for name in _CACHES:
            getattr(SavePlanner, name, {}).pop(getattr(self, "_key", None), None)
        self._key = f"torchtitan {next(_numbers)}"

    @contextmanager
    def forgotten_on_error(self) -> Iterator[None]:
        """An error, which all ranks get, may leave plans that some ranks remember and others don't."""
        try:
            yield
        except BaseException:
            self.forget()
            raise


class _RememberingPlanner(DefaultSavePlanner):
    """key: DCP's own is one for all managers of this process."""

    def __init__(self, key: str) -> None:
        super().__init__(enable_plan_caching=True)
        self._cached_plans_key = key

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        # DCP compares names and shapes, but not dtypes, which .metadata has too.
        if not plan.usable and self.plan != SavePlanner._cached_save_plan[self._cached_plans_key]:
            plan = self._pending_local_plan = self.plan
        return plan
