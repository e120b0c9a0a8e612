"""Small RL jobs for tests: the toy model on the CPU in fp32."""

import random
from pathlib import Path

import torch

from torchtitan.config import ConfigManager
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.types import TrainingSample

VOCAB = 32


def toy_config(dump_folder: Path | str, *overrides: str) -> JobConfig:
    return ConfigManager(JobConfig).parse_args(
        [
            "--model.name=rl_toy",
            f"--job.dump_folder={dump_folder}",
            "--training.seq_len=24",
            "--training.local_batch_size=4",
            "--training.steps=20",
            "--training.mixed_precision_param=float32",
            "--activation_checkpoint.mode=none",
            "--lr_scheduler.warmup_steps=0",
            "--optimizer.lr=1e-3",
            "--debug.seed=7",
            "--metrics.log_freq=1",
            "--metrics.disable_color_printing",
            "--rl.task.name=copy",
            "--rl.sampling.max_tokens=4",
            "--rl.num_prompts_per_step=4",
            "--rl.num_samples_per_prompt=4",
            *overrides,
        ]
    )


def toy_samples(n: int, seed: int = 0) -> list[TrainingSample]:
    """Made-up samples of different lengths, in groups of two."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    samples = []
    for i in range(n):
        new = tokens(rng.randint(1, 9))
        samples.append(
            TrainingSample.from_sequence(
                tokens(rng.randint(1, 9)),
                new,
                [rng.uniform(-4, -3) for _ in new],
                advantage=rng.uniform(-1, 1),
                group_id=i // 2,
            )
        )
    return samples


def gradients(trainer) -> dict[str, torch.Tensor]:
    """The whole gradients of every parameter of this rank; all ranks have to call this."""
    return {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for part in trainer.engine.model_parts
        for name, p in part.named_parameters()
    }
