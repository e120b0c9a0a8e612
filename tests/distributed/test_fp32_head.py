"""`model.fp32_head` in every layout: what the projection returns is exact for what it was given."""

import pytest
import torch

from tests.unit.rl.toy import toy_config, toy_samples
from torchtitan.distributed.dtensor import whole_tensor
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.generator import LocalGenerator
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.types import SamplingConfig
from torchtitan.testing.gloo import run_ranks

BF16_WEIGHTS = "--training.dtype=bfloat16"  # without FSDP nothing else is cast to bf16
TP = "--parallelism.tensor_parallel_degree=2"
LAYOUTS = {
    "FSDP": [
        "--parallelism.data_parallel_shard_degree=2",
        "--training.mixed_precision_param=bfloat16",
    ],
    "TP": [TP, BF16_WEIGHTS],
    "TP, gathered logits": [TP, "--parallelism.disable_loss_parallel", BF16_WEIGHTS],
    "PP": ["--parallelism.pipeline_parallel_degree=2", BF16_WEIGHTS],
}
LARGEST_LOGIT = 26


def errors_on_this_rank(dump_folder, overrides):
    """(largest error of log-probs in training, of logits in generation), in nats; with the option
    and without. Empty on ranks that don't have the output projection."""
    found = []
    for option in (["--model.fp32_head"], []):
        trainer = PolicyTrainer(toy_config(dump_folder, *option, *overrides))
        engine = trainer.engine
        batch = Batcher(dp_size=engine.dp_size, seq_len=24, rows=4).batch(
            toy_samples(8)[: 4 * engine.dp_size]
        )
        (microbatch,) = batch.of_rank(engine.dp_rank)
        labels = microbatch.inputs["labels"]
        output = engine.model_parts[-1].output
        seen = []
        if output is not None:
            with torch.no_grad():
                weight = whole_tensor(output.weight)
                # Hidden states behind the norm are about 1 each.
                output.weight.mul_(LARGEST_LOGIT / (3 * weight.float().norm(dim=1).mean()))
                weight = whole_tensor(output.weight).bfloat16().double()

            def see(module, args, result, weight=weight, seen=seen, labels=labels):
                exact = args[0].detach().double() @ weight.t()
                if not isinstance(result, tuple):
                    seen.append((whole_tensor(result).detach().double() - exact).abs().max().item())
                    return
                n = args[0].shape[1]
                mask = labels[:, :n] >= 0
                of_labels = exact.log_softmax(-1).gather(-1, labels[:, :n, None].clamp(min=0))
                error = result.logprobs.detach().double() - of_labels[..., 0]
                seen.append(error[mask].abs().max().item())

            output.register_forward_hook(see)
        trainer.forward(batch)
        generator = LocalGenerator(engine)
        generator.generate([[1, 2, 3], [4, 5, 6]], SamplingConfig(max_tokens=1))
        found.append(seen)
        trainer.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_projection_rounds_nothing_to_bf16(layout, tmp_path):
    n_ranks_with_output = 0
    for exact, rounded in run_ranks(errors_on_this_rank, 2, tmp_path, LAYOUTS[layout]):
        if exact:
            n_ranks_with_output += 1
            assert len(exact) == len(rounded) == 2
            assert max(exact) < 1e-4
            assert min(rounded) > 1e-3  # the test would see it
    assert n_ranks_with_output == (1 if layout == "PP" else 2)
