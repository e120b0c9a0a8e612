"""Bitwise rollouts: the generator logs what the trainer's forward computes, in every batch."""

import pytest
import torch

from tests.unit.rl.toy import sampled, toy_config
from torchtitan.numerics import batch_invariant
from torchtitan.numerics.batch_invariant import (
    attend_in_tiles,
    batch_invariant_linear,
    batch_invariant_silu,
)
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.generator import CopyGenerator, build_generator
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.types import SamplingConfig

EXACT = ["--rl.generator.exact", "--training.seq_len=96", "--rl.sampling.temperature=0.8"]
SIZES = "n_layers=2, dim=64, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=64, head_dim=16"
QWEN = ["--model.name=qwen3", "--model.args", SIZES]
PACKED = ["--model.attn_type=varlen", "--model.attn_mask_type=position_block_causal"]
# Large logits, at which bf16 rounds to 1/16 and coarser.
SCALE = 12.0


def prompts_of(n: int, longest: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(n)
    lengths = torch.randint(1, longest + 1, (n,), generator=rng).tolist()
    return [torch.randint(0, 32, (length,), generator=rng).tolist() for length in lengths]


def make_trainer(folder, *overrides) -> PolicyTrainer:
    trainer = PolicyTrainer(toy_config(folder, *EXACT, *overrides))
    with torch.no_grad():
        for part in trainer.engine.model_parts:
            if part.output is not None:
                part.output.weight *= SCALE
            for name, parameter in part.named_parameters():
                if name.endswith("lora_b"):  # which is 0 at first
                    parameter.normal_(std=0.1)
    return trainer


def differences(trainer, samples, **batcher) -> tuple[int, int]:
    """(tokens whose log-probs differ from the trainer's, all tokens)"""
    dp_size = trainer.engine.dp_size
    batch = Batcher(dp_size=dp_size, seq_len=96, **batcher).batch(samples)
    scored = trainer.forward(batch)
    in_loss = torch.cat([sample.loss_mask for sample in samples]) > 0
    differs = torch.cat(scored) != torch.cat([sample.logprobs for sample in samples])
    return int(differs[in_loss].sum()), int(in_loss.sum())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["llama3", "qwen3 packed", "lora"])
def test_logprobs_are_bitwise_the_trainers_in_every_batch(tmp_path, dtype, model):
    lora = ["--model.converters=lora", "--lora.target_modules=all-linear,lm_head"]
    flags = {"llama3": [], "qwen3 packed": [*QWEN, *PACKED], "lora": lora}
    trainer = make_trainer(tmp_path, f"--training.mixed_precision_param={dtype}", *flags[model])
    generator = build_generator(trainer.job_config, trainer.engine)
    sampling = SamplingConfig(temperature=0.8, max_tokens=16, stop_token_ids=(3,), seed=1)
    prompts = prompts_of(6, 70)
    together = generator.generate(prompts, sampling, 3)
    generator.max_rows = 4  # other rows beside it, and other lengths of the cache
    apart = generator.generate(prompts, sampling, 3)
    assert together == apart
    samples = sampled(prompts, together, 3)
    packings = [{"rows": 7}, {"rows": 3, "packing": True} if "packed" in model else {"rows": 1}]
    for packing in packings:
        wrong, n = differences(trainer, samples, **packing)
        assert wrong == 0 and n > 100, (packing, wrong)
    trainer.close()


def test_ratio_on_policy_is_one_and_the_run_learns(start):
    """Also with a copy of the weights, and after updates."""
    flags = ["--rl.weight_sync.mode=broadcast", "--optimizer.lr=1e-2", "--rl.generator.exact"]
    controller = start(*flags, "--training.steps=3")
    assert isinstance(controller.generator, CopyGenerator)
    for _ in range(3):
        metrics = controller.train_step()
        assert metrics["loss/ratio_mean"] == 1.0
        assert metrics["loss/logprob_diff_max"] == metrics["loss/kl_generator"] == 0.0
        assert metrics["grad_norm"] > 0


# ---- the operations ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_torch(dtype):
    torch.manual_seed(0)
    shapes = (3, 15, 24), (40, 24), (40,)
    x, weight, bias = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2e-2, 5e-2)
    for ours, theirs, inputs in (
        (batch_invariant_linear, torch.nn.functional.linear, (x, weight, bias)),
        (batch_invariant_silu, torch.nn.functional.silu, (x,)),
    ):
        found, expected = ours(*inputs), theirs(*inputs)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
        grad = torch.randn_like(found)
        grads = [torch.autograd.grad(output, inputs, grad) for output in (found, expected)]
        torch.testing.assert_close(*grads, rtol=rtol, atol=atol)


def test_tiles_are_attention_whatever_follows_in_the_cache():
    torch.manual_seed(0)
    q, k, v = torch.randn(6, 13, 16), torch.randn(6, 128, 16), torch.randn(6, 128, 16)
    visible = torch.arange(128) <= torch.arange(60, 73)[:, None]
    out, lse = attend_in_tiles(q, k, v, visible[None])
    scores = (q @ k.transpose(1, 2)).masked_fill(~visible, -torch.inf)
    torch.testing.assert_close(out, scores.softmax(-1) @ v, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    pad, n_more = torch.nn.functional.pad, batch_invariant.KEYS
    longer = [pad(x, (0, 0, 0, n_more), value=7.0) for x in (k, v)]
    hidden = pad(visible, (0, n_more))
    for row in range(13):
        alone, _ = attend_in_tiles(q[:, row : row + 1], *longer, hidden[None, row : row + 1])
        assert torch.equal(alone[:, 0], out[:, row])
