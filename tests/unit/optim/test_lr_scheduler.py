import math
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.config import LRScheduler
from torchtitan.optim.lr_scheduler import build_lr_schedulers, set_lrs
from torchtitan.optim.optimizer import OptimizersContainer

BASE_LR = 0.1


def container(*optimizers):
    """A container that can be iterated only once, like a mock."""
    mock = MagicMock(spec=OptimizersContainer)
    mock.__iter__.return_value = iter(optimizers)
    mock.__len__.return_value = len(optimizers)
    return mock


def sgd():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE_LR)


def factors_of(schedule, steps: int) -> list[float]:
    """Factor on the peak learning rate in each of `steps` steps.

    schedule: a function of an optimizer, which returns an object with `step`.
    """
    optimizer = sgd()
    scheduler, seen = schedule(optimizer), []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"] / BASE_LR)
        optimizer.step()
        scheduler.step()
    return seen


def factors(steps: int, training_steps: int | None = None, **options) -> list[float]:
    training_steps = training_steps or steps

    def schedule(optimizer):
        return build_lr_schedulers(container(optimizer), LRScheduler(**options), training_steps)

    return factors_of(schedule, steps)


FIFTHS = [0.8, 0.6, 0.4, 0.2]


@pytest.mark.parametrize(
    "steps, options, expected, warning",
    [
        (10, {"warmup_steps": 2}, [0.5, 1, 1, *(n / 8 for n in range(7, 0, -1))], None),
        (10, {"warmup_steps": 2, "decay_ratio": 0.5}, [0.5] + [1] * 5 + FIFTHS, None),
        (5, {"warmup_steps": 10}, [0.2, 0.4, 0.6, 0.8, 1.0], "warmup_steps is 10"),
        (10, {"warmup_steps": 2, "decay_ratio": 0.0}, [0.5] + [1.0] * 9, None),
        (
            10,
            {"warmup_steps": 5, "decay_ratio": 0.8},
            [0.2, 0.4, 0.6, 0.8, 1, 1, *FIFTHS],
            "leave only 5 of 10",
        ),
        (
            20,  # decay_ratio is of the total steps
            {"training_steps": 10, "total_steps": 20, "warmup_steps": 0, "decay_ratio": 0.5},
            [1.0] * 11 + [n / 10 for n in range(9, 0, -1)],
            None,
        ),
    ],
)
def test_factors_are_those_worked_out_by_hand(steps, options, expected, warning, caplog):
    """warning: of a schedule that does not fit, and is cut."""
    assert factors(steps, **options) == pytest.approx(expected)
    assert warning in caplog.text if warning else not caplog.messages


@pytest.mark.parametrize(
    "decay_type, curve",
    [
        ("linear", lambda p: 1 - p),
        ("sqrt", lambda p: 1 - math.sqrt(p)),
        ("cosine", lambda p: 0.5 * (1 + math.cos(math.pi * p))),
    ],
)
def test_decay_follows_its_curve_down_to_the_floor(decay_type, curve):
    # T = 12, W = 2, D = 6: decay from k = 7 on, p = (k - 6) / 6. Then training goes on past the end.
    options = dict(warmup_steps=2, decay_ratio=0.5, decay_type=decay_type, min_lr_factor=0.1)
    expected = [0.5] + [1.0] * 6 + [0.1 + 0.9 * curve(i / 6) for i in range(1, 6)] + [0.1] * 4
    assert factors(16, training_steps=12, **options) == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(1, 25),
    warmup=st.integers(0, 30),
    ratio=st.none() | st.floats(0, 1),
    decay_type=st.sampled_from(["linear", "sqrt", "cosine"]),
)
def test_no_step_has_learning_rate_zero_nor_above_the_peak(steps, warmup, ratio, decay_type):
    seen = factors(steps, warmup_steps=warmup, decay_ratio=ratio, decay_type=decay_type)
    assert all(0 < factor <= 1 for factor in seen)


@pytest.mark.parametrize("warmup", [0, 1, 2, 5, 11])
def test_schedules_that_count_from_zero_are_those_of_transformers_at_every_step(warmup):
    from transformers import optimization as hf

    steps = 12
    own = dict(training_steps=steps, warmup_steps=warmup, step_offset=-1)
    for kind, theirs, options in (
        ("linear", {"num_training_steps": steps}, {}),
        ("cosine", {"num_training_steps": steps}, {"decay_type": "cosine"}),
        ("constant", {}, {"decay_ratio": 0.0}),
    ):
        schedule = getattr(hf, f"get_{kind}_schedule_with_warmup")
        expected = factors_of(partial(schedule, num_warmup_steps=warmup, **theirs), steps + 1)
        assert factors(steps + 1, **own, **options) == pytest.approx(expected, abs=1e-12), kind


# verl 0.9.1's get_cosine_schedule_with_warmup(optimizer, 2, 6, min_lr_ratio=0.2, init_lr_ratio=0.4):
# 0.4 + 0.6 e / 2, then 0.2 + 0.4 (1 + cos(pi (e - 2) / 4)) for e = 0, 1, ...; tests/verl calls verl.
VERL_COSINE = [0.4, 0.7, 1.0, 0.6 + 0.4 * math.sqrt(0.5), 0.6, 0.6 - 0.4 * math.sqrt(0.5), 0.2]


def test_schedule_has_the_numbers_of_verls_with_its_first_and_last_ratio():
    options = dict(warmup_steps=2, decay_type="cosine", min_lr_factor=0.2, init_lr_factor=0.4)
    seen = factors(7, training_steps=6, step_offset=-1, **options)
    assert seen == pytest.approx(VERL_COSINE)


def test_one_state_restores_every_scheduler():
    config = LRScheduler(warmup_steps=2)
    first = build_lr_schedulers([sgd()], config, training_steps=10)
    for _ in range(4):
        first.step()
    second = build_lr_schedulers([sgd(), sgd()], config, training_steps=10)
    second.load_state_dict(first.state_dict())
    assert len(second) == 2
    for scheduler in second:
        assert scheduler.last_epoch == 4
        assert scheduler.get_last_lr() == first.schedulers[0].get_last_lr()
    second.schedulers[0].step()
    assert second.schedulers[1].last_epoch == 4
    second.step()
    assert [scheduler.last_epoch for scheduler in second] == [6, 5]
    second.schedulers[0].base_lrs[0] = 7.0  # as a client may; the first container's rates stay
    others = first.schedulers[0], second.schedulers[1]
    assert [scheduler.base_lrs for scheduler in others] == [[BASE_LR], [BASE_LR]]


def test_learning_rate_that_is_a_tensor_changes_in_place():
    lr = torch.tensor(BASE_LR)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)
    lr = optimizer.param_groups[0]["lr"]  # the tensor that a compiled optimizer reads
    set_lrs(optimizer, [0.25])
    assert optimizer.param_groups[0]["lr"] is lr and lr.item() == 0.25


def test_schedule_goes_to_the_step_it_is_told():
    optimizer = sgd()
    schedulers = build_lr_schedulers(container(optimizer), LRScheduler(warmup_steps=4), 10)
    expected = factors(10, warmup_steps=4)
    for n in (7, 2, 0):
        schedulers.set_step(n)
        assert schedulers.last_epoch == n
        assert optimizer.param_groups[0]["lr"] == pytest.approx(BASE_LR * expected[n])
        assert schedulers.schedulers[0].get_last_lr() == [optimizer.param_groups[0]["lr"]]
    optimizer.step()
    schedulers.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(BASE_LR * expected[1])
