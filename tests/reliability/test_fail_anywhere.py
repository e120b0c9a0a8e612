"""Failures of one of two ranks: one of each kind here; `fail_anywhere` tries many, in every layout."""

import pytest

from tests.reliability import fail_anywhere


@pytest.mark.parametrize(
    "layout, kinds, is_guest",
    [
        ("fsdp", ["loss_fn", "output_fn", "inside"], True),
        ("ddp", ["loss_fn", "loss_fn", "head"], False),
        ("pp", ["loss_fn", "inside"], False),
    ],
)
def test_failure_of_one_rank_is_raised_on_all_ranks(layout, kinds, is_guest):
    """By an engine with a group of its own, and by a guest in its host's group."""
    seconds = fail_anywhere.run(layout, kinds, seed=2, is_guest=is_guest)
    assert max(seconds) < fail_anywhere.LIMIT_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("is_guest", [False, True])
@pytest.mark.parametrize("layout", fail_anywhere.LAYOUTS)
def test_failures_of_one_rank_at_random_instants(layout, is_guest):
    seconds = fail_anywhere.run(layout, [*fail_anywhere.KINDS] * 2, seed=1, is_guest=is_guest)
    assert max(seconds) < fail_anywhere.LIMIT_SECONDS
