"""Log-probs of sampled tokens by the trainer's own forward."""

import pytest
import torch

from tests.unit.rl.toy import sampled
from tests.unit.test_engine import make_config, rounding
from torchtitan.engine import TrainingEngine
from torchtitan.loss.logprobs import TokenLogProbs
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.generator import LocalGenerator
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.types import SamplingConfig

pytestmark = pytest.mark.long

PROMPTS = [[5, 6, 7], [8, 9], [1000, 3, 2, 1], [4]]
TEMPERATURE = 0.7
PACKED = ["--model.attn_type=flex", "--model.attn_mask_type=position_block_causal"]


def trainer_of(engine) -> PolicyTrainer:
    config = JobConfig()
    config.rl.sampling.temperature = TEMPERATURE
    return PolicyTrainer(config, engine=engine)


def batch_of(engine, packing: bool):
    generator = LocalGenerator(engine)
    sampling = SamplingConfig(temperature=TEMPERATURE, max_tokens=9, stop_token_ids=(1, 2, 3))
    completions = generator.generate(PROMPTS, sampling, num_samples=3)
    samples = sampled(PROMPTS, completions, 3)
    return Batcher(seq_len=24, rows=5, packing=packing).batch(samples)


def trained_logprobs(engine, batch) -> list[torch.Tensor]:
    """Of every microbatch, from a forward with gradients."""
    found = []

    def loss_of(outputs, labels, engine_batch):
        found.append(outputs.logprobs.detach().cpu())
        return -(outputs.logprobs * engine_batch["loss_weights"]).sum()

    own = batch.of_rank(0)
    engine.forward_backward_step(
        input_dict=[microbatch.inputs for microbatch in own],
        labels=[microbatch.inputs["labels"] for microbatch in own],
        global_valid_tokens=1.0,
        loss_fn=loss_of,
        head=TokenLogProbs(TEMPERATURE),
    )
    return found


@pytest.mark.parametrize("packing", [False, True])
def test_rescored_logprobs_are_bitwise_those_of_training_on_every_step(tmp_path, packing):
    engine = TrainingEngine(make_config(tmp_path, *(PACKED if packing else [])))
    trainer = trainer_of(engine)
    for _ in range(3):
        batch = batch_of(engine, packing)
        rescored, difference = trainer.rescore(batch)
        assert 0 < difference <= rounding(5e-6)  # what cached decoding was off, in fp32
        trained = trained_logprobs(engine, rescored)
        for microbatch, own in zip(rescored.of_rank(0), trained, strict=True):
            assert torch.equal(microbatch.inputs["generator_logprobs"], own)
        again, difference = trainer.rescore(rescored)
        assert difference == 0
        engine.optim_step()


def test_rescoring_changes_nothing_but_logprobs(tmp_path):
    engine = TrainingEngine(make_config(tmp_path))
    batch, name = batch_of(engine, packing=False), "generator_logprobs"
    right = [microbatch.inputs[name].clone() for microbatch in batch.of_rank(0)]
    for microbatch in batch.of_rank(0):
        microbatch.inputs[name][:] = microbatch.inputs["loss_mask"] * -9
    rescored, difference = trainer_of(engine).rescore(batch)
    assert difference > 1
    for ours, theirs, expected in zip(rescored.of_rank(0), batch.of_rank(0), right, strict=True):
        assert ours.slots == theirs.slots
        assert (ours.inputs[name] - expected).abs().max() <= 5e-6
        for other in theirs.inputs.keys() - {name}:
            assert torch.equal(ours.inputs[other], theirs.inputs[other]), other
