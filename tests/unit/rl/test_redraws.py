"""Redraws of prompts whose completions all have the same reward; the penalty of long completions."""

import pytest

from tests.unit.rl.samples import make_episode
from torchtitan.rl.advantages import OverlongPenalty
from torchtitan.rl.rollout import Request
from torchtitan.rl.tasks import Grade

TWO = "--rl.num_samples_per_prompt=2"


def first_episodes(controller):
    controller.rollouts.start_until(1)
    return controller.rollouts.take(1)


def test_penalty_grows_linearly_over_the_last_tokens():
    penalty = OverlongPenalty(max_tokens=20, num_tokens=5, largest=2.0)
    # By hand, eq. 13: (|y| - 15) / 5, twice.
    assert [penalty(n) for n in (1, 15, 16, 19, 20)] == pytest.approx([0, 0, 0.4, 1.6, 2.0])
    assert OverlongPenalty(max_tokens=20)(20) == 0


def test_penalty_of_a_dialogue_is_that_of_its_longest_turn():
    mask = (1, 0, 1, 1, 1, 1, 1, 0)
    episode = make_episode(token_ids=(2,) * 8, loss_mask=mask, reward=1.0)
    request = Request([], 1, OverlongPenalty(max_tokens=6, num_tokens=2))
    assert request.with_extras(episode, 0).reward == 0.5  # 5 tokens, half-way from 4 to 6


def test_long_completions_lose_reward_in_training_and_not_in_evaluation(start):
    controller = start(TWO, "--rl.overlong_tokens=2", "--rl.overlong_penalty=0.5")
    controller.task.grade = lambda prompt, text: Grade(1.0, {})
    episodes = first_episodes(controller)
    lengths = {len(e.token_ids) for e in episodes}
    assert 4 in lengths  # the longest
    for episode in episodes:
        lost = {4: 0.5, 3: 0.25}.get(len(episode.token_ids), 0.0)
        assert (episode.reward, episode.scores["overlong_penalty"]) == (1 - lost, lost)
    assert {e.reward for e in controller.rollouts.of_held_out(greedy=False)} == {1.0}


@pytest.mark.parametrize("mode", [[], ["--rl.async_steps=1"]], ids=["shared", "on a thread"])
def test_places_without_a_difference_get_other_prompts_up_to_the_limit(mode, start):
    controller = start(TWO, "--rl.redraws=2", *mode)
    task = controller.task
    prompts = [task.prompt(i) for i in range(12)]
    assert len({p.text for p in prompts}) == 12
    teaches = {prompts[i].text for i in (1, 4 + 2, 8 + 3, 8 + 1)}
    n_graded = []

    def grade(prompt, text):
        """Equal rewards, except for some prompts whose completions get different rewards."""
        n_graded.append(prompt.text)
        return Grade(n_graded.count(prompt.text) % 2 if prompt.text in teaches else 0.5, {})

    task.grade = grade
    episodes = first_episodes(controller)
    # Place 1 is kept at once, place 2 with its second prompt, 3 with its third; 0 never.
    expected = [prompts[i].text for i in (8, 1, 6, 11) for _ in range(2)]
    assert [e.prompt for e in episodes] == expected
    assert [e.group_id for e in episodes] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [e.scores["redraws"] for e in episodes] == [2, 2, 0, 0, 1, 1, 2, 2]
    assert len(n_graded) == 2 * (4 + 3 + 2)
    assert task.state_dict() == {"num_drawn": 12}


def test_first_draws_are_those_without_redraws(start):
    found = []
    for n_redraws in (0, 3):
        controller = start(TWO, f"--rl.redraws={n_redraws}")
        rewards = iter([0.0, 1.0] * 4)
        controller.task.grade = lambda prompt, text, rewards=rewards: Grade(next(rewards), {})
        found.append([(e.prompt, e.token_ids) for e in first_episodes(controller)])
    assert found[0] == found[1]
