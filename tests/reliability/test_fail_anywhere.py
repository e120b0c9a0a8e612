"""Failures of one of two ranks, one per kind; `fail_anywhere` tries many, in every layout."""

import pytest
import torch
import torch.distributed as dist

from tests.reliability import fail_anywhere
from torchtitan.distributed.processes.failure_watch import FailureWatch
from torchtitan.testing.gloo import run_ranks


@pytest.mark.parametrize(
    "layout, kinds, is_guest",
    [
        ("fsdp", ["loss_fn", "output_fn", "inside"], True),
        ("ddp", ["loss_fn", "loss_fn", "head"], False),
        ("pp", ["loss_fn", "inside"], False),
    ],
)
def test_failure_of_one_rank_is_raised_on_all_ranks(layout, kinds, is_guest):
    """For an engine with its own group, and for an engine in its host's group."""
    seconds = fail_anywhere.run(layout, kinds, seed=2, is_guest=is_guest)
    assert max(seconds) < fail_anywhere.LIMIT_SECONDS


def errors_on_both_ranks() -> list[str]:
    """Return the errors of calls that fail on both ranks, after equal and then unequal collectives."""
    group, said = dist.new_group(), []
    watch = FailureWatch([group], dist.group.WORLD)
    for in_step in (True, False):
        try:
            with watch.call():
                if in_step or dist.get_rank() == 1:
                    dist.all_reduce(torch.zeros(1), group=group, async_op=True)
                raise fail_anywhere.FailedOnPurpose
        except Exception as error:
            said.append(" ".join([str(error), *getattr(error, "__notes__", ())]))
    watch.close()
    return said


def test_failure_on_both_ranks_is_harmless_only_after_the_same_collectives():
    for in_step, out_of_step in run_ranks(errors_on_both_ranks, 2):
        assert in_step == "" and "build a new engine" in out_of_step
