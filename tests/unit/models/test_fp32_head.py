"""`model.fp32_head`: the output projection in fp32 from bf16 weights and hidden states."""

import dataclasses

import pytest
import torch

from tests.unit.models.tiny import filled, sized
from torchtitan.config import ConfigManager
from torchtitan.config.checks import ConfigError
from torchtitan.generation.kv_cache import kv_cache
from torchtitan.job import resolve_job
from torchtitan.loss.cross_entropy import SummedCrossEntropy
from torchtitan.loss.logprobs import TokenLogProbs
from torchtitan.models.decoder import OutputProjection
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.protocols import train_spec as train_spec_module
from torchtitan.protocols.train_spec import get_train_spec

DIM, VOCAB, LARGEST_LOGIT = 64, 512, 26.0
TOKENS = torch.arange(24).view(2, 12)


def projection_and_states(in_fp32):
    """Return an output projection, hidden states [2, 12, M] with logits up to 26, and labels."""
    generator = torch.Generator().manual_seed(0)
    output = OutputProjection(DIM, VOCAB, bias=False)
    output.in_fp32 = in_fp32
    h = torch.randn(2, 12, DIM, generator=generator)
    with torch.no_grad():
        output.weight.copy_(torch.randn(VOCAB, DIM, generator=generator))
        output.weight.copy_(output.weight.bfloat16())
        h *= LARGEST_LOGIT / (h @ output.weight.t()).abs().amax(-1, keepdim=True)
    # The likeliest tokens, which have the largest logits.
    return output, h.bfloat16(), (h @ output.weight.t()).argmax(-1)


def off_by(in_fp32, compute):
    """The error under autocast of log-probs in nats, against the same bf16 numbers in fp64."""
    output, h, labels = projection_and_states(in_fp32)
    exact = (h.double() @ output.weight.double().t()).log_softmax(-1)
    exact = exact.gather(-1, labels[..., None])[..., 0]
    with torch.autocast("cpu", torch.bfloat16):
        found = compute(output, h, labels)
    return (found.double() - exact).abs().max().item()


def by_head(output, h, labels):
    return output(h, lambda *x: TokenLogProbs(chunk_tokens=5)(*x, labels=labels)).logprobs.detach()


def by_logits(output, h, labels):  # what a generator draws from
    return output(h).detach().float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]


@pytest.mark.parametrize("compute", [by_head, by_logits])
def test_rounding_of_large_logits_is_gone(compute):
    assert 0.02 < off_by(False, compute) < 0.13  # half a step of bf16 at 26 is 1/16
    assert off_by(True, compute) < 1e-4


def test_gradients_keep_the_types_of_weight_and_states():
    output, h, labels = projection_and_states(in_fp32=True)
    h.requires_grad_()
    output.bfloat16()
    by = output(h, lambda *x: TokenLogProbs()(*x, labels=labels))
    by.logprobs.sum().backward()
    wide = [t.detach().double().requires_grad_() for t in (h, output.weight)]
    logprobs = (wide[0] @ wide[1].t()).log_softmax(-1).gather(-1, labels[..., None])
    for found, expected in zip(
        (h.grad, output.weight.grad), torch.autograd.grad(logprobs.sum(), wide), strict=True
    ):
        assert found.dtype == torch.bfloat16
        # The result is rounded to bf16 once.
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5)
    loss = output(h, lambda *x: SummedCrossEntropy()(*x, labels=labels))
    assert loss.item() == pytest.approx(-by.logprobs.sum().item(), rel=1e-6)


def test_trainer_and_cached_generation_agree_to_the_last_digits_of_fp32():
    model = filled(Transformer(sized(TransformerModelArgs, n_kv_heads=2, fp32_head=True)))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(TOKENS)
        with kv_cache(model, 12) as forward:
            cached = forward(TOKENS)
        head = model(TOKENS, head=lambda *x: TokenLogProbs()(*x, labels=TOKENS)).logprobs
    assert logits.dtype == cached.dtype == torch.float32
    expected = logits.log_softmax(-1).gather(-1, TOKENS[..., None])[..., 0]
    torch.testing.assert_close(head, expected, rtol=0, atol=5e-6)


def test_model_without_such_args_and_a_quantized_output_are_refused(monkeypatch):
    @dataclasses.dataclass
    class Args:
        dim: int = 8

    spec = dataclasses.replace(get_train_spec("llama3"), model_args={"debugmodel": Args()})
    monkeypatch.setitem(train_spec_module._extra_train_specs, "foreign", spec)
    flags = ["--model.fp32_head", "--model.flavor=debugmodel"]
    float8 = ["--model.name=llama3", "--model.converters=quantize.linear.float8"]
    for more, words in (
        (["--model.name=foreign"], "got 'foreign', whose args have no fp32_head"),
        (float8, "model.fp32_head = True .* add 'output' to quantize"),
    ):
        with pytest.raises(ConfigError, match=words):
            resolve_job(ConfigManager().parse_args([*flags, *more]), builds_data=False)
