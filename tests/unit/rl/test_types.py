import pytest
import torch

from tests.unit.rl.samples import make_episode
from torchtitan.rl.types import OptimParams, SamplingConfig, TrainingSample


def test_sample_of_an_episode_predicts_the_sampled_tokens_and_nothing_else():
    sample = TrainingSample.from_episode(make_episode(advantage=2.0, ref_logprobs=(-1.0, -2.0)))
    assert sample.token_ids.tolist() == [5, 6, 7, 8]
    assert sample.labels.tolist() == [6, 7, 8, 9]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1]
    assert sample.logprobs.tolist() == [0, 0, -0.5, -0.25]
    assert sample.advantages.tolist() == [0, 0, 2, 2]
    assert sample.ref_logprobs.tolist() == [0, 0, -1, -2]
    assert (sample.group_id, len(sample)) == (3, 4)


def test_stop_string_may_be_longer_than_the_last_tokens():
    sampling = SamplingConfig(stop_strings=("a stop", "b"), decode=lambda x: "".join(map(chr, x)))
    for text, stops in (("x" * 20 + "a stop", True), ("a stop", True), ("a stoq", False)):
        assert sampling.stops_at([*map(ord, text)]) is stops


def test_episode_counts_the_tokens_and_the_weights_of_its_turns_alone():
    dialogue = make_episode(token_ids=(8, 9, 1, 7), loss_mask=(1, 1, 0, 1))
    assert dialogue.turn_lengths == [2, 1] and make_episode().turn_lengths == [2]
    for versions, n in (((4, 4, -1, 4), 1), ((4, 5, -1, 5), 2), (None, 1)):
        assert make_episode(token_versions=versions).num_versions == n


def test_sample_that_would_count_something_else_is_refused():
    tokens, ones = torch.arange(2), torch.ones(2)
    with pytest.raises(ValueError, match=r"loss_mask .* must be 0 or 1, got \[0.5\]; put factors"):
        TrainingSample(tokens, tokens, ones / 2, ones, ones)
    labels = torch.tensor([1, -100])
    with pytest.raises(ValueError, match="labels .* token ids where loss_mask is 1, got -100"):
        TrainingSample(tokens, labels, ones, ones, ones)
    TrainingSample(tokens, labels, torch.tensor([True, False]), ones, ones)


@pytest.mark.parametrize("betas", [(), (0.9,), (0.9, 0.95, 0.99), (0.9, 1.0)])
def test_bad_betas_are_refused_by_name(betas):
    with pytest.raises(ValueError, match="^betas"):
        OptimParams(betas=betas)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-1.0, 1e-21, float("inf"), float("nan")]),
        ("top_p", [0, 1.5]),
        ("top_k", [-1]),
        ("max_tokens", [0]),
    ],
)
def test_bad_sampling_setting_is_refused_by_name(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{name} must be .*, got"):
            SamplingConfig(**{name: value})
