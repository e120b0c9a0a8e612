"""New weights between two tokens of a completion: tokens, log-probs and versions."""

import contextlib
import gc
import weakref

import pytest
import torch

from tests.unit.rl.test_weight_sync import tiny, weights_of
from tests.unit.rl.toy import rows_of
from torchtitan.generation.kv_cache import kv_cache
from torchtitan.rl.generator import BufferedGenerator, CopyGenerator
from torchtitan.rl.types import Completion, SamplingConfig
from torchtitan.rl.weight_sync import WeightMismatchError
from torchtitan.tools.errors import RunError

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11]]
STOPS = tuple(range(0, 2048, 6))
SAMPLING = SamplingConfig(temperature=0.8, max_tokens=10, seed=3, stop_token_ids=STOPS)


def drawn_with_updates(family: str, at_forwards: dict[int, int], *, in_flight=True, max_rows=0):
    """Completions of a generator of version 0 that gets other versions: forward -> version."""
    generator = CopyGenerator(tiny(family, 100), max_rows=max_rows)
    buffered = BufferedGenerator(generator, in_flight=in_flight)
    buffered.update_weights(weights_of(tiny(family, 0), version=0))
    n_forwards, take_over = 0, generator.before_forward

    def before_forward() -> None:  # what the other thread does meanwhile
        nonlocal n_forwards
        version = at_forwards.get(n_forwards)
        if version is not None:
            buffered.update_weights(weights_of(tiny(family, version), version=version))
        n_forwards += 1
        take_over()

    generator.before_forward = before_forward
    return buffered.pinned().generate(PROMPTS, SAMPLING, 3)


@torch.no_grad()
def logprobs_with_versions(family: str, prompt: list[int], completion: Completion) -> torch.Tensor:
    """Read a completion in one piece per version, with a cache that keeps earlier keys and values."""
    tokens = torch.tensor([[*prompt, *completion.token_ids]])
    versions = completion.token_versions or [completion.policy_version] * len(completion.token_ids)
    model, pieces, start = tiny(family, 100), [], 0
    # The logits that draw a token come from the token before it.
    of_inputs = [versions[0]] * (len(prompt) - 1) + list(versions)
    with kv_cache(model, tokens.shape[1]) as forward:
        while start < len(of_inputs):
            end = start
            while end < len(of_inputs) and of_inputs[end] == of_inputs[start]:
                end += 1
            CopyGenerator(model).update_weights(weights_of(tiny(family, of_inputs[start])))
            pieces.append(forward(tokens[:, start:end])[0])
            start = end
    logprobs = (torch.cat(pieces)[len(prompt) - 1 :] / SAMPLING.temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize(("family", "max_rows"), [("llama3", 0), ("deepseek_v3", 4)])
def test_each_token_has_the_version_and_the_logprob_of_the_weights_that_drew_it(family, max_rows):
    found = drawn_with_updates(family, {3: 1, 6: 2, 8: 4}, max_rows=max_rows)
    changes = set()
    for i, completion in enumerate(found):
        expected = logprobs_with_versions(family, PROMPTS[i // 3], completion)
        logprobs = torch.tensor(completion.token_logprobs)
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)  # sums in another order
        versions = completion.token_versions or (completion.policy_version,)
        assert list(versions) == sorted(versions) and versions[0] == completion.policy_version
        changes.add(len(set(versions)))
    assert len(changes) > 2
    if not max_rows:  # the first forward reads the prompts, and draws the first token
        longest = max(found, key=lambda completion: len(completion.token_ids))
        n = len(longest.token_ids)
        assert longest.token_versions == (0, 0, 0, 1, 1, 1, 2, 2, 4, 4)[:n]


def test_rows_draw_with_one_version_unless_asked_otherwise():
    found = drawn_with_updates("llama3", {3: 1, 6: 2}, in_flight=False)
    assert found == drawn_with_updates("llama3", {}) == drawn_with_updates("llama3", {1000: 1})
    assert {(c.policy_version, c.token_versions) for c in found} == {(0, None)}


@pytest.mark.parametrize("in_flight", [False, True])
def test_draws_after_an_update_that_failed_tell_its_failure_until_the_next_one(in_flight):
    buffered = BufferedGenerator(CopyGenerator(tiny("llama3", 100)), in_flight=in_flight)
    buffered.update_weights(weights_of(tiny("llama3", 0), version=0))
    buffered._staged._pairs[0][1].add_(1)  # the first tensor
    with pytest.raises(WeightMismatchError, match="something overwrote them"):
        buffered.pinned().generate(PROMPTS, SAMPLING)
    with pytest.raises(RunError, match="version 0 of the weights was read by an update that f"):
        buffered.pinned().generate(PROMPTS, SAMPLING)
    buffered.update_weights(weights_of(tiny("llama3", 1), version=1))
    assert buffered.pinned().generate(PROMPTS, SAMPLING)[0].policy_version == 1


@pytest.mark.parametrize("fails", [False, True])
def test_model_is_freed_with_its_generator(fails):
    generator = CopyGenerator(tiny("llama3", 100))
    buffered = BufferedGenerator(generator, in_flight=True)
    buffered.update_weights(weights_of(tiny("llama3", 0), version=0))
    if fails:
        buffered._staged._pairs[0][1].add_(1)  # the first tensor
    for _ in range(2):
        with pytest.raises((WeightMismatchError, RunError)) if fails else contextlib.nullcontext():
            buffered.generate(PROMPTS, SAMPLING)
    model = weakref.ref(generator.model)
    gc.disable()
    try:
        del generator, buffered
        assert model() is None
    finally:
        gc.enable()


def test_thread_beside_the_trainer_takes_over_weights_while_it_draws(tmp_path, start):
    flags = ["--rl.generator.in_flight", "--rl.async_steps=2", "--training.steps=6"]
    start(*flags).train()
    lines = rows_of(tmp_path / "episodes.jsonl")
    assert {line["step"] for line in lines} == set(range(1, 7))
    for line in lines:
        versions = line["token_versions"] or [line["policy_version"]]
        # Never older than allowed, and never newer than the trained weights.
        assert line["step"] - 3 <= line["policy_version"] == min(versions)
        assert max(versions) <= line["step"] - 1
