"""How many log-probs of generator and trainer are equal with `rl.generator.exact`, and its price.

    python benchmarks/exact_rollouts.py [--tokens 100000] [--dtype bfloat16] [--size small]

A policy with random weights and large logits draws completions of prompts of 1 to 128 tokens. The
trainer scores them in its own microbatches. Both kinds take turns, one draw and one
forward-backward pass each; CPU-seconds are summed over all turns. One thread, one process. `small`
has 0.5M parameters, `large` 89M.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from torchtitan.config import ConfigManager
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.generator import build_generator
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.types import SamplingConfig, TrainingSample

SIZES = {
    "small": "dim=128, n_layers=2, n_heads=4, n_kv_heads=4, vocab_size=512, multiple_of=32",
    "large": "dim=768, n_layers=8, n_heads=12, n_kv_heads=12, vocab_size=16384, multiple_of=64",
}
N_PROMPTS, N_SAMPLES, N_NEW = 8, 4, 128


def make_policy(folder: str, args: argparse.Namespace, exact: bool):
    flags = ["--model.name=llama3", "--model.args", SIZES[args.size], "--training.seq_len=256"]
    flags += [f"--training.mixed_precision_param={args.dtype}", f"--job.dump_folder={folder}"]
    flags += ["--training.local_batch_size=8", "--debug.seed=0", "--rl.sampling.temperature=0.8"]
    flags += ["--activation_checkpoint.mode=none"] + ["--rl.generator.exact"] * exact
    trainer = PolicyTrainer(ConfigManager(JobConfig).parse_args(flags))
    with torch.no_grad():
        trainer.engine.model_parts[0].output.weight *= 8
    return trainer, build_generator(trainer.job_config, trainer.engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--size", default="small", choices=SIZES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(0)
    seconds: dict = defaultdict(float)
    equal: dict = defaultdict(int)
    largest: dict = defaultdict(float)
    n_tokens, ratios = 0, set()
    with tempfile.TemporaryDirectory() as folder:
        policies = {exact: make_policy(folder, args, exact) for exact in (False, True)}
        batcher = Batcher.from_config(policies[True][0].job_config, 1)
        while n_tokens < args.tokens:
            prompts = [
                [rng.randrange(512) for _ in range(rng.randint(1, 128))] for _ in range(N_PROMPTS)
            ]
            sampling = SamplingConfig(temperature=0.8, max_tokens=N_NEW, seed=rng.getrandbits(31))
            for exact, (trainer, generator) in policies.items():
                started = time.process_time()
                drawn = generator.generate(prompts, sampling, N_SAMPLES)
                seconds[exact, "generation"] += time.process_time() - started
                samples = [
                    TrainingSample.of_sequence(
                        prompts[i // N_SAMPLES], c.token_ids, c.token_logprobs, rng.uniform(-1, 1)
                    )
                    for i, c in enumerate(drawn)
                ]
                started = time.process_time()
                output = trainer.forward_backward(batcher.batch(samples), return_logprobs=True)
                seconds[exact, "training"] += time.process_time() - started
                trainer.zero_grad()
                for sample, scored in zip(samples, output.logprobs, strict=True):
                    difference = (scored - sample.logprobs)[sample.loss_mask > 0].abs()
                    equal[exact] += int((difference == 0).sum())
                    largest[exact] = max(largest[exact], float(difference.max()))
                if exact:
                    ratios.add(output.metrics["ratio_mean"])
                    n_tokens += N_PROMPTS * N_SAMPLES * N_NEW
    print(f"{args.size}, {args.dtype}: {n_tokens:,} tokens; mean ratios with exact: {ratios}")
    for exact in policies:
        print(
            f"exact = {exact!s:5}  equal {100 * equal[exact] / n_tokens:7.3f} %, largest difference "
            f"{largest[exact]:.2e} nats, "
            + ", ".join(
                f"{what} {seconds[exact, what]:.1f} CPU-s" for what in ("generation", "training")
            )
        )
    for what in ("generation", "training"):
        print(f"{what}: {seconds[True, what] / seconds[False, what]:.2f} times the time with exact")


if __name__ == "__main__":
    main()
