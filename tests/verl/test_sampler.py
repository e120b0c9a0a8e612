"""The sampler of rollouts, which needs neither verl nor Ray: batches, weights, interruptions."""

import asyncio

import pytest
import torch
from verl_on_cpu.sampler import Sampler

from tests.tiny_hf import tiny_hf_model

EOS = 5
PROMPTS = [[7, 8, 9], [7, 8, 9], [11], list(range(20, 33))]


def make_folder(folder, **changes):
    model = tiny_hf_model(**changes)
    model.save_pretrained(folder)
    return model


@pytest.fixture
def sampler(tmp_path):
    make_folder(tmp_path / "model")
    sampler = Sampler(tmp_path / "model", max_len=64, eos_ids=[EOS])
    yield sampler
    sampler.close()


def draw(sampler, *requests):
    async def ask():
        return await asyncio.gather(*(sampler.draw(*request) for request in requests))

    return asyncio.run(ask())


def draw_all(sampler, prompts=PROMPTS, max_tokens=6, **asked):
    return draw(sampler, *((prompt, max_tokens, asked) for prompt in prompts))


def logprobs_of(model, prompt, completion, temperature):
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0]
    logprobs = (logits / temperature).log_softmax(-1)
    places = range(len(prompt) - 1, len(prompt) - 1 + len(completion.token_ids))
    return [float(logprobs[i, t]) for i, t in zip(places, completion.token_ids, strict=True)]


def test_requests_that_come_together_are_one_batch_with_the_models_log_probs(sampler, tmp_path):
    model = make_folder(tmp_path / "same")
    calls = []
    generate = sampler.generator.generate
    sampler.generator.generate = lambda *args: calls.append(args) or generate(*args)
    completions = draw_all(sampler, temperature=0.7, max_tokens=6)
    assert len(calls) == 1
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = logprobs_of(model, prompt, completion, 0.7)
        assert list(completion.token_logprobs) == pytest.approx(expected, abs=2e-5)


def test_requests_of_other_settings_and_lengths_get_their_own(sampler):
    greedy, own = {"temperature": 0}, {"ignore_eos": True, "top_k": 4}
    short, long, other = draw(sampler, ([7], 2, greedy), ([7], 9, greedy), ([7], 3, own))
    assert long.token_ids[:2] == short.token_ids and len(short.token_ids) <= 2
    assert short.finish_reason == "length" or short.token_ids[-1] == EOS
    assert len(other.token_ids) == 3


@pytest.mark.parametrize("tied", [False, True])
def test_new_weights_take_effect_whole_or_not_at_all(tied, tmp_path):
    make_folder(tmp_path / "model", tie_word_embeddings=tied)
    other = make_folder(tmp_path / "other", seed=1, tie_word_embeddings=tied)
    sampler = Sampler(tmp_path / "model", max_len=64)
    before = draw_all(sampler, temperature=0)
    weights = [(n, t) for n, t in other.state_dict().items() if not tied or n != "lm_head.weight"]

    async def load(pairs):
        await sampler.load_weights(pairs[:3], is_last=False)
        await sampler.load_weights(pairs[3:])

    with pytest.raises(ValueError, match="do not fit the model in .*/model: .*missing, unknown"):
        asyncio.run(load(weights[:-1]))
    assert draw_all(sampler, temperature=0) == before
    asyncio.run(load(weights))
    after = draw_all(sampler, temperature=0, ignore_eos=True)
    with torch.no_grad():
        first = other(torch.tensor([PROMPTS[0]])).logits[0, -1].argmax()
    assert after[0].token_ids[0] == int(first)
    assert {completion.policy_version for completion in after} == {2}
    sampler.close()


def test_aborted_requests_are_answered_and_later_ones_wait(sampler):
    async def scene():
        waiting = asyncio.create_task(sampler.draw([7], 3, {}))
        await asyncio.sleep(0)
        await sampler.abort()
        assert await waiting is None
        held = asyncio.create_task(sampler.draw([7], 3, {}))
        await asyncio.sleep(0.2)
        assert not held.done()
        await sampler.resume()
        assert len((await held).token_ids) >= 1
        await sampler.abort(refuses=True)
        assert await sampler.draw([7], 3, {}) is None

    asyncio.run(scene())


def test_unsupported_request_is_refused_and_the_next_one_served(sampler):
    with pytest.raises(ValueError, match="repetition_penalty, got 1.2; set"):
        draw_all(sampler, repetition_penalty=1.2)
    with pytest.raises(ValueError, match="takes the settings temperature, .*, got min_p; leave"):
        draw_all(sampler, min_p=0.1)
    with pytest.raises(ValueError, match="at least one token id"):
        draw_all(sampler, prompts=[[]])
    assert len(draw_all(sampler)) == len(PROMPTS)


def test_long_prompts_wait_for_those_with_longer_answers(sampler):
    """In dialogues, for example, the room left within `max_len` differs."""
    requests = [([7] * n, 64 - n, {"ignore_eos": True}) for n in (60, 1, 30)]
    assert [len(found.token_ids) for found in draw(sampler, *requests)] == [4, 63, 34]


def test_recorded_experts_are_those_that_hugging_faces_routers_choose(tmp_path):
    model = make_folder(tmp_path / "model", family="qwen3_moe")
    sampler = Sampler(tmp_path / "model", max_len=64, eos_ids=[EOS], records_experts=True)
    completions = draw_all(sampler, max_tokens=6)
    sampler.close()
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        text = torch.tensor([[*prompt, *completion.token_ids[:-1]]])
        with torch.no_grad():
            logits = model(text, output_router_logits=True).router_logits
        chosen = torch.stack([x.topk(2, dim=-1).indices for x in logits], dim=1)  # [T, layers, 2]
        ours = completion.routed_experts.long()
        assert torch.equal(ours.sort(dim=-1).values, chosen.sort(dim=-1).values)
