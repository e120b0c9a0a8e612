"""What surrounds training on one GPU: generation, RL, checkpoints, and weights as a stream."""

import pytest
import torch

from tests.unit.rl.toy import toy_config, toy_samples
from tests.unit.test_engine import backward, make_engine, random_batch
from torchtitan.generation.kv_cache import kv_cache
from torchtitan.generation.sampling import generate
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.types import OptimParams

FAMILIES = ["llama3", "qwen3", "deepseek_v3", "gpt_oss"]


def train(engine, seed: int = 0) -> None:
    backward(engine, seed)
    engine.optim_step()


def digest_of(engine) -> str:
    stream = engine.iter_hf_weights()
    assert all(tensor is not None for _, tensor in stream)
    return stream.digest


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_log_probs_equal_those_of_the_full_forward(family, tmp_path):
    """fp32: sums in another order. A token out of place moves log-probs by 1e-2 and more."""
    flavor = "debugmodel_small" if family == "gpt_oss" else "debugmodel"
    engine = make_engine(tmp_path, f"--model.name={family}", f"--model.flavor={flavor}")
    tokens = random_batch(3, 24)[0]["input"]
    (expected,) = engine.forward_step({"input": tokens})
    (model,) = engine.model_parts
    tokens = tokens.cuda()
    with torch.no_grad(), kv_cache(model, max_length=24) as forward:
        pieces = [forward(piece) for piece in tokens.split([9, *[1] * 15], dim=1)]
    found = torch.cat(pieces, dim=1).log_softmax(dim=-1)
    assert (found - expected.log_softmax(dim=-1)).abs().max() <= 1e-4


def test_generation_draws_the_same_tokens_for_the_same_seed(tmp_path):
    (model,) = make_engine(tmp_path, "--training.seq_len=64").model_parts
    prompt = random_batch(2, 8)[0]["input"].cuda()
    first, again, other = (
        generate(model, prompt, max_new_tokens=16, seed=seed) for seed in (1, 1, 2)
    )
    assert first.is_cuda and first.shape == (2, 24) and torch.equal(first[:, :8], prompt)
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rl_step_raises_the_log_probs_of_what_was_rewarded(dtype, tmp_path):
    trainer = PolicyTrainer(toy_config(tmp_path, f"--training.mixed_precision_param={dtype}"))
    batch = Batcher(seq_len=24, rows=4, agg_mode="token-mean").batch(toy_samples(8))

    def wanted() -> float:
        """Log-probs of all tokens, each times its sample's advantage."""
        pairs = zip(trainer.forward(batch), toy_samples(8), strict=True)
        return sum((logprobs.sum() * sample.advantages[-1]).item() for logprobs, sample in pairs)

    batch, change = trainer.rescore(batch)
    assert change > 0  # made-up samples have made-up log-probs
    before, version = wanted(), trainer.policy_version
    for _ in range(5):
        output = trainer.forward_backward(batch)
        trainer.optim_step(OptimParams(lr=1e-3))
    assert output.metrics and wanted() > before
    assert trainer.policy_version == version + 5


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp"])
@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_checkpoint_holds_the_weights_of_its_step_while_training_goes_on(mode, sharded, tmp_path):
    """The copy is made while the next steps want to change the weights."""
    flags = ["--checkpoint.enable", "--checkpoint.interval=1", f"--checkpoint.async_mode={mode}"]
    flags += ["--checkpoint.keep_latest_k=0", f"--parallelism.always_fsdp={sharded}"]
    weights = {}

    def snapshot(engine) -> list[torch.Tensor]:
        state = engine.optimizers.state.values()
        tensors = [*engine.model_parts[0].parameters(), *(s["exp_avg"] for s in state)]
        return [
            (t.full_tensor() if hasattr(t, "full_tensor") else t).cpu().clone() for t in tensors
        ]

    with make_engine(tmp_path, *flags) as engine:
        for step in range(1, 5):
            train(engine, seed=step)
            weights[step] = snapshot(engine)
            engine.save()
            train(engine, seed=100 + step)  # at once, while the copy may be under way
    with make_engine(tmp_path, *flags) as engine:
        for folder in sorted((tmp_path / "checkpoint").iterdir()):
            engine.load(str(folder))
            step = (engine.weights_version + 1) // 2
            loaded = snapshot(engine)
            assert all(torch.equal(a, b) for a, b in zip(loaded, weights[step], strict=True))
        assert engine.weights_version == 7
        assert all(parameter.is_cuda for parameter in engine.model_parts[0].parameters())


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_weights_stream_from_the_device(family, tmp_path):
    name = f"--model.name={family}"
    with make_engine(tmp_path / "a", name) as engine:
        train(engine)
        stream = engine.iter_hf_weights()
        tensors = dict(stream)
        assert all(tensor.is_cuda for tensor in tensors.values())
        state = engine.checkpointer.require_adapter().to_hf(engine.model_parts[0].state_dict())
        for key, tensor in state.items():
            assert torch.equal(tensors[key], tensor.full_tensor())  # sharded by FSDP of one rank
        in_bf16 = dict(engine.iter_hf_weights(dtype=torch.bfloat16))
        assert {t.dtype for t in in_bf16.values()} == {torch.bfloat16}
        assert digest_of(engine) == stream.digest
        train(engine)
        assert digest_of(engine) != stream.digest
