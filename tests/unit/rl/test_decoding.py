"""Continuing many prompts at once: the drawn tokens, their log-probs, and their ends."""

import pytest
import torch

from tests.unit.generation.test_generation import FAMILIES, initialized, tiny_model
from torchtitan.generation.kv_cache import CachedForward
from torchtitan.generation.sampling import draw
from torchtitan.loss.logprobs import token_logprobs
from torchtitan.rl.decoding import LocalDecoder, continue_prompts
from torchtitan.rl.types import SamplingConfig

V = 50
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13], [14, 15, 16, 17, 18, 19, 20, 21, 22]]


def uniform_numbers(n_rows: int, n_new: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n_rows, n_new, dtype=torch.float64, generator=generator)


def completions(model, prompts, n_samples=1, max_rows=0, uniform=None, **options):
    """(token ids, log-probs) of each row."""
    sampling = SamplingConfig(**{"max_tokens": 8} | options)
    rows = [i for i in range(len(prompts)) for _ in range(n_samples)]
    if uniform is None:
        uniform = uniform_numbers(len(rows), sampling.max_tokens)
    decoder = LocalDecoder.from_model(model)
    drawn = continue_prompts(decoder, prompts, rows, uniform, sampling, max_rows)
    return [(list(row.token_ids), torch.tensor(row.token_logprobs)) for row in drawn]


@torch.no_grad()
def reference_logprobs(model, prompt, new, temperature=1.0):
    """[new, V], from a forward of the whole text."""
    tokens = torch.tensor([prompt + new])
    is_masked = model.model_args.attn_type != "sdpa"
    masks = model.get_attention_masks(tokens, None) if is_masked else None
    logits = model(tokens, masks)[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(dim=-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_whole_forward_for_prompts_of_any_length(family):
    model = initialized(*FAMILIES[family])
    found = completions(model, PROMPTS, temperature=0.7, max_tokens=12)
    for (new, logprobs), prompt in zip(found, PROMPTS, strict=True):
        expected = reference_logprobs(model, prompt, new, 0.7)
        picked = expected.gather(1, torch.tensor(new)[:, None])[:, 0]
        # fp32, sums in another order; a token out of place moves log-probs by 1e-2 and more.
        assert (logprobs - picked).abs().max() <= 5e-6


@pytest.mark.parametrize("max_rows", [0, 5])
def test_rows_end_with_the_first_stop_token_and_the_others_go_on(max_rows):
    model = tiny_model()
    options = {"n_samples": 8, "max_tokens": 20}
    free = completions(model, PROMPTS, **options)
    stops = (free[0][0][1], free[3][0][4], 7)
    found = completions(model, PROMPTS, stop_token_ids=stops, max_rows=max_rows, **options)
    ends = set()
    for (new, logprobs), (without, without_logprobs) in zip(found, free, strict=True):
        end = min((i + 1 for i, token in enumerate(without) if token in stops), default=20)
        assert new == without[:end]
        torch.testing.assert_close(logprobs, without_logprobs[:end], atol=5e-6, rtol=0)
        ends.add(end)
    assert len(ends) > 4  # some end early enough for their rows to be dropped


@pytest.mark.parametrize("family", ["qwen3 with experts", "llama4", "gpt_oss", "qwen3_5"])
@pytest.mark.parametrize("max_rows", [1, 3, 9])
def test_rows_that_wait_draw_the_same_with_chunks_windows_and_experts(family, max_rows):
    model = initialized(*FAMILIES[family])
    options = {"n_samples": 3, "max_tokens": 15, "stop_token_ids": (3, 11, 17, 29, 40)}
    together = completions(model, PROMPTS, **options)
    waiting = completions(model, PROMPTS, max_rows=max_rows, **options)
    for (new, logprobs), (expected, expected_logprobs) in zip(waiting, together, strict=True):
        assert new == expected
        torch.testing.assert_close(logprobs, expected_logprobs, atol=5e-6, rtol=0)
    assert len({len(new) for new, _ in together}) > 4


def test_rows_that_wait_enter_as_places_are_freed_and_each_prompt_is_read_once(monkeypatch):
    shapes, call = [], CachedForward.__call__

    def recording(self, tokens, *args, **options):
        shapes.append(tuple(tokens.shape))
        return call(self, tokens, *args, **options)

    monkeypatch.setattr(CachedForward, "__call__", recording)
    lengths = [12, 1, 2, 9, 1, 2, 2, 2, 6, 6, 6, 6, 6, 6, 6, 6]  # of two prompts' completions
    uniform = torch.full((16, 12), 0.1, dtype=torch.float64)
    uniform[range(16), [length - 1 for length in lengths]] = 1 - 2**-53  # draws the last token
    sampling = SamplingConfig(max_tokens=12, stop_token_ids=(V - 1,))
    decoder = LocalDecoder.from_model(tiny_model())
    for max_rows, expected in {
        # All rows at once: they are dropped when half of them have ended.
        0: [(2, 7)] + [(16, 1)] * 5 + [(2, 1)] * 3 + [(1, 1)] * 3,
        # Rows 4 to 7 get places of rows that have ended; then the other prompt is read. While any
        # waits, none is dropped.
        4: [(1, 7)] + [(4, 1)] * 3 + [(1, 7)] + [(4, 1)] * 13 + [(2, 1)] * 2,
    }.items():
        shapes.clear()
        drawn = continue_prompts(
            decoder, [PROMPTS[0], PROMPTS[3][:7]], [0] * 8 + [1] * 8, uniform, sampling, max_rows
        )
        assert ([len(row.token_ids) for row in drawn], shapes) == (lengths, expected)


def test_cut_distributions_are_drawn_and_renormalised_as_by_draw():
    model, uniform = tiny_model(), uniform_numbers(len(PROMPTS), 8)
    options = {"temperature": 1.3, "top_k": 5, "top_p": 0.8}
    found = completions(model, PROMPTS, uniform=uniform, **options)
    for (new, logprobs), prompt, numbers in zip(found, PROMPTS, uniform, strict=True):
        drawn = draw(reference_logprobs(model, prompt, new), numbers[: len(new)], **options)
        assert drawn.tokens.tolist() == new
        torch.testing.assert_close(drawn.logprobs, logprobs, atol=1e-6, rtol=0)


# ---- drawing ----


def test_draws_follow_the_distribution_and_top_k_and_top_p_cut_it():
    logits = torch.tensor([[0.5, 0.0001, 0.2, 0.2999]]).log().expand(20_000, 4)
    numbers = uniform_numbers(20_000, 1).squeeze(1)
    for options, expected in [
        ({}, [0.5, 0.0001, 0.2, 0.2999]),
        ({"top_k": 2}, [0.6251, 0, 0, 0.3749]),
        ({"top_p": 0.75}, [0.6251, 0, 0, 0.3749]),
        ({"top_p": 0.81}, [0.5001, 0, 0.2, 0.2999]),
        ({"top_k": 3, "top_p": 0.4}, [1.0, 0, 0, 0]),
        ({"temperature": 0.5}, [0.658, 0, 0.1053, 0.2367]),
        ({"temperature": 0}, [1.0, 0, 0, 0]),
        ({"top_k": 100}, [0.5, 0.0001, 0.2, 0.2999]),
    ]:
        drawn = draw(logits, numbers, **options)
        shares = drawn.tokens.bincount(minlength=4) / 20_000
        # Four standard deviations of a share: 4 * sqrt(0.25 / 20,000).
        torch.testing.assert_close(shares, torch.tensor(expected), atol=0.0142, rtol=0)
        told = torch.tensor(expected)[drawn.tokens]
        torch.testing.assert_close(drawn.logprobs.exp(), told, atol=2e-4, rtol=0)
    # Numbers at the edges draw tokens that have a chance.
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).repeat(2, 1)
    drawn = draw(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert drawn.tokens.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_drawn_logprobs_are_bitwise_those_of_the_trainers_function(dtype, temperature):
    for n, vocab in [(1, 32), (7, 48), (64, 1024)]:
        logits = (9 * torch.randn(n, vocab)).to(dtype)
        drawn = draw(logits, uniform_numbers(n, 1)[:, 0], temperature=temperature)
        scored = token_logprobs(logits[None], drawn.tokens[None], temperature=temperature)
        assert torch.equal(drawn.logprobs, scored.logprobs[0])
