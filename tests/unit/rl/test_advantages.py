import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.rl.advantages import AdvantageEstimator, advantage_metrics

REWARDS = st.lists(st.floats(-10, 10), min_size=1, max_size=8)


def test_group_mean_compares_within_a_prompt_only():
    advantages = AdvantageEstimator()([1.0, 5.0, 0.0, 7.0], ["a", "b", "a", "b"])
    assert advantages == [0.5, -1.0, -0.5, 1.0]
    assert AdvantageEstimator("none")([1.0, -2.0], [0, 0]) == [1.0, -2.0]


@given(REWARDS)
def test_rloo_is_the_reward_minus_the_mean_of_the_others(rewards):
    advantages = AdvantageEstimator("rloo")(rewards, [0] * len(rewards))
    for i, advantage in enumerate(advantages):
        others = rewards[:i] + rewards[i + 1 :]
        expected = rewards[i] - statistics.fmean(others) if others else 0.0
        assert advantage == pytest.approx(expected, abs=1e-9)


@given(REWARDS)
def test_std_gives_advantages_of_unit_deviation_or_zero(rewards):
    advantages = AdvantageEstimator("group_mean", std=True)(rewards, [0] * len(rewards))
    spread = statistics.pstdev(advantages)
    equal = statistics.pstdev(rewards) <= 1e-8
    assert spread == pytest.approx(0.0 if equal else 1.0, abs=1e-6)


@pytest.mark.parametrize("name", ["group_mean", "rloo"])
@pytest.mark.parametrize("std", [False, True])
def test_one_episode_and_equal_rewards_have_advantage_zero(name, std):
    estimator = AdvantageEstimator(name, std)
    assert estimator([0.1], [0]) == [0.0]
    # The rounded mean of three times 0.1 is not 0.1.
    assert estimator([0.1, 0.1, 0.1], [0, 0, 0]) == [0.0] * 3
    assert estimator([], []) == []
    if std:  # a difference that is rounding would be blown up
        assert estimator([1.0, 1.0 + 1e-12], [0, 0]) == [0.0, 0.0]


def test_metrics_are_finite_for_any_number_of_episodes():
    names = "advantage_mean", "advantage_std", "zero_advantage_groups"
    assert advantage_metrics([], []) == dict.fromkeys(names, 0.0)
    assert advantage_metrics([0.5], [0])["advantage_std"] == 0.0
    metrics = advantage_metrics([1.0, -1.0, 0.0, 0.0], [0, 0, 1, 1])
    assert metrics["advantage_std"] == pytest.approx(math.sqrt(0.5))
    assert metrics["zero_advantage_groups"] == 0.5
    assert advantage_metrics([-1.0, 0.0], [0, 1])["zero_advantage_groups"] == 0.5


def test_unknown_names_factors_and_rewards_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="must be group_mean, rloo or none, got 'mean'"):
        AdvantageEstimator("mean")
    for reward in (math.nan, -math.inf, 1e19):
        with pytest.raises(ValueError, match="must be finite numbers .* in group 3; correct"):
            AdvantageEstimator()([reward], [3])
