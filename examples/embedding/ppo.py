"""Policy gradients with a clipped ratio (PPO, GRPO): sampled answers, advantages, two epochs."""

import torch

from torchtitan.config import job_config as config
from torchtitan.engine import TrainingEngine
from torchtitan.loss.aggregation import aggregation_weights
from torchtitan.loss.logprobs import TokenLogProbs

job = config.JobConfig(
    model=config.Model(name="llama3", flavor="debugmodel"),
    training=config.Training(mixed_precision_param="float32"),
)


def clipped_objective(outputs, labels, batch):
    """A plain weighted sum over tokens, whose weights hold the aggregation and the mask; a metric."""
    ratio = (outputs.logprobs - batch["old_logprobs"]).exp()
    gain = torch.minimum(ratio * batch["advantages"], ratio.clamp(0.8, 1.2) * batch["advantages"])
    return -(gain * batch["loss_weights"]).sum(), {"largest ratio": ratio.max()}


with TrainingEngine(job) as engine:
    head = TokenLogProbs()
    torch.manual_seed(engine.dp_rank)  # ranks that share a batch draw the same one
    rollouts, microbatches = torch.randint(0, 2048, (4, 33)), []  # prompt and answer
    mask = (torch.arange(32) >= 12).expand(4, 32)  # label t is of the answer
    weights = aggregation_weights(list(mask), "seq-mean-token-mean", group=engine.dp_group)
    for tokens, weight, advantage in zip(rollouts, weights, (1.0, -1.0, 0.5, -0.5), strict=True):
        batch = {"input": tokens[None, :-1], "labels": tokens[None, 1:]}
        batch["loss_weights"], batch["advantages"] = weight[None], torch.full((1, 32), advantage)
        microbatches.append(batch)
    sampled = engine.from_last_stage(engine.forward_step(microbatches, head=head))
    for batch, outputs in zip(microbatches, sampled, strict=True):
        batch["old_logprobs"] = outputs.logprobs
    step = dict(loss_fn=clipped_objective, head=head, metrics={"largest ratio": "max"})
    for epoch in range(2):
        output = engine.forward_backward_step(input_dict=microbatches, **step)
        norm, ratio = engine.optim_step(lr=1e-4).grad_norm, output.metrics["largest ratio"]
        print(f"epoch {epoch}: loss {output.loss:.5f}, norm {norm:.4f}, ratio {ratio:.4f}")
