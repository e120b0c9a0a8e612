"""Small RL jobs for tests: the toy model on the CPU in fp32."""

import json
import random
from pathlib import Path

import torch

from tests.reliability.jobs import flags_in
from torchtitan.config import ConfigManager
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.types import TrainingSample

VOCAB = 32


def toy_config(dump_folder: Path | str, *overrides: str) -> JobConfig:
    flags = flags_in("""
        model.name=rl_toy debug.seed=7
        training.seq_len=24 training.local_batch_size=4 training.steps=20
        training.mixed_precision_param=float32 activation_checkpoint.mode=none
        lr_scheduler.warmup_steps=0 optimizer.lr=1e-3
        metrics.log_freq=1 metrics.disable_color_printing
        rl.task.name=copy rl.sampling.max_tokens=4
        rl.num_prompts_per_step=4 rl.num_samples_per_prompt=4
    """)
    return ConfigManager(JobConfig).parse_args(
        [*flags, f"--job.dump_folder={dump_folder}", *overrides]
    )


def toy_samples(n: int, seed: int = 0) -> list[TrainingSample]:
    """Made-up samples of different lengths, in groups of two."""
    rng = random.Random(seed)
    samples = []
    for i in range(n):
        new, prompt = ([rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))] for _ in range(2))
        logprobs, advantage = [rng.uniform(-4, -3) for _ in new], rng.uniform(-1, 1)
        samples.append(
            TrainingSample.from_sequence(prompt, new, logprobs, advantage, group_id=i // 2)
        )
    return samples


def sampled(prompts, completions, num_samples: int = 1) -> list[TrainingSample]:
    """The samples of a generator's completions, with advantage 1."""
    return [
        TrainingSample.from_sequence(prompts[i // num_samples], c.token_ids, c.token_logprobs, 1.0)
        for i, c in enumerate(completions)
    ]


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights_of(learner) -> list[torch.Tensor]:
    return [p.detach().clone() for part in learner.engine.model_parts for p in part.parameters()]


def gradients(trainer) -> dict[str, torch.Tensor]:
    """The whole gradients of every parameter of this rank; all ranks have to call this."""
    return {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for part in trainer.engine.model_parts
        for name, p in part.named_parameters()
    }
