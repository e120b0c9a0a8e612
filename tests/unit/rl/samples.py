"""Random samples, and a policy small enough to write its loss down as a formula."""

import dataclasses
import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchtitan.rl import rollout
from torchtitan.rl.losses import PolicyLoss, finalize_metrics
from torchtitan.rl.tasks import Prompt, Task, Turn
from torchtitan.rl.types import Completion, Episode, TrainingBatch, TrainingSample

VOCAB, LONGEST = 7, 12


class TinyPolicy(nn.Module):
    """Logits that depend only on a token and its position, not on its neighbours in the row."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        options = {"generator": torch.Generator().manual_seed(0), "dtype": dtype}
        self.of_token = nn.Parameter(torch.randn(VOCAB, VOCAB, **options))
        self.of_position = nn.Parameter(torch.randn(LONGEST, VOCAB, **options))

    def forward(self, tokens: Tensor, positions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log-probs of the labels, entropy), both in the shape of `tokens`."""
        logits = self.of_token[tokens] + self.of_position[positions.clamp(min=0)]
        all_logprobs = logits.log_softmax(-1)
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        return all_logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0], entropy

    def gradient(self, loss: Tensor) -> Tensor:
        """Return the whole gradient as one vector, and clear it."""
        for parameter in self.parameters():
            parameter.grad = None
        if loss.requires_grad:
            loss.backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters()]
        return torch.cat([grad.flatten() for grad in grads])


def random_samples(n: int, seed: int = 0) -> list[TrainingSample]:
    """Samples of 2 to LONGEST tokens in groups of three; the fourth is masked as a whole."""
    rng = random.Random(seed)
    samples = []
    for i in range(n):
        length = rng.randint(1, LONGEST)
        tokens = [rng.randrange(VOCAB) for _ in range(length + 1)]
        n_prompt = rng.randint(1, length)
        prompt, new = tokens[:n_prompt], tokens[n_prompt:]
        own, ref = ([-2 * rng.random() for _ in new] for _ in range(2))
        options = {"advantage": rng.uniform(-1, 1), "ref_logprobs": ref, "group_id": i // 3}
        sample = TrainingSample.from_sequence(prompt, new, own, **options)
        old = sample.logprobs + (torch.arange(length) % 5 - 2) * 0.5 * sample.loss_mask
        sample = dataclasses.replace(sample, old_logprobs=old)
        if i == 3:
            sample.loss_mask.zero_()
        samples.append(sample)
    return samples


def loss_of_batch(
    policy: TinyPolicy, loss: PolicyLoss, batch: TrainingBatch
) -> tuple[Tensor, dict[str, float]]:
    """The loss of all microbatches of all ranks, and the metrics as a trainer reduces them."""
    total, reduced = 0.0, dict.fromkeys(loss.metric_names, 0.0)
    for microbatch in (m for of_ranks in batch.microbatches for m in of_ranks):
        entries = microbatch.inputs
        logprobs, entropy = policy(entries["input"], entries["positions"], entries["labels"])
        output = loss(logprobs, entropy, entries)
        total = total + output.loss
        for name, value in output.metrics.items():
            both = reduced[name], value.item()
            reduced[name] = max(both) if name.endswith("_max") else sum(both)
    denominator = batch.denominator or 1
    return total / denominator, finalize_metrics(reduced, batch.num_measured_tokens)


def tokens_of(samples: Sequence[TrainingSample]) -> int:
    return sum(int(sample.loss_mask.sum()) for sample in samples)


def make_episodes(
    task: Task,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    stop_strings: Sequence[str] = (),
) -> list[Episode]:
    """Return graded episodes of completions, which are in the order of the prompts."""
    per_prompt, dialogues = len(completions) // len(prompts), []
    for i, completion in enumerate(completions):
        dialogue = rollout._Dialogue(prompts[i // per_prompt], i // per_prompt, i)
        dialogue.complete(completion)
        dialogue.turns.append(Turn(*rollout._text_and_stop(task, completion, stop_strings)))
        dialogues.append(dialogue)
    return rollout._graded(task, dialogues)


def make_episode(**changes) -> Episode:
    values = {"group_id": 3, "prompt": "12+34=", "expected_answer": "46", "text": "46"}
    values |= {"prompt_token_ids": (5, 6, 7), "token_ids": (8, 9), "policy_version": 4}
    return Episode(**({"token_log_probs": (-0.5, -0.25)} | values | changes))
