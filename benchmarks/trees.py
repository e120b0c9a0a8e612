"""The cost of an RL step with shared prefixes: CPU-seconds against packed rows of the same samples.

    python benchmarks/trees.py                 # 22M Llama, fp32, one process
    python benchmarks/trees.py --steps 10 --attn_type varlen

Three kinds of samples: groups of 8 completions of 64 tokens to a prompt of 192; three levels of turns, where
each turn is a sample and has three next turns; and samples without anything in common. A step is batching,
forward, backward and the update. Packed rows and trees take a step in turn, from the same weights. Prints
CPU-seconds (median), the median of the rounds' ratios, and the largest differences of loss and gradients.
"""

import argparse
import dataclasses
import random
import statistics
import tempfile
import time

import torch

from torchtitan.config import ConfigManager
from torchtitan.engine import TrainingEngine
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.types import OptimParams, TrainingSample
from torchtitan.tools.host import keep_freed_memory

SIZES = {"dim": 384, "n_layers": 8, "n_heads": 6, "n_kv_heads": 3, "vocab_size": 8192}
SEQ_LEN = 2048


def sample(rng: random.Random, prompt: list[int], new: list[int], group: int) -> TrainingSample:
    options = {"advantage": rng.uniform(-1, 1), "group_id": group}
    return TrainingSample.from_sequence(prompt, new, [-9.0] * len(new), **options)


def samples_of(kind: str, rng: random.Random) -> list[TrainingSample]:
    def tokens(n: int) -> list[int]:
        return [rng.randrange(SIZES["vocab_size"]) for _ in range(n)]

    if kind == "nothing shared":
        return [sample(rng, [i, *tokens(191)], tokens(64), i) for i in range(32)]
    if kind == "groups of 8":
        prompts = [tokens(192) for _ in range(4)]
        return [sample(rng, p, tokens(64), i) for i, p in enumerate(prompts) for _ in range(8)]
    samples, histories = [], [tokens(128)]
    for _ in range(3):
        turns = [(history, tokens(32)) for history in histories for _ in range(3)]
        samples += [sample(rng, *turn, 0) for turn in turns]
        histories = [history + turn + tokens(16) for history, turn in turns]
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=7, help="rounds of each kind (7)")
    parser.add_argument("--attn_type", default="flex", choices=("flex", "varlen"))
    args = parser.parse_args()
    keep_freed_memory()  # as torchtitan.rl.train does
    torch.set_num_threads(1)
    spec = get_train_spec("llama3")
    sizes = dataclasses.replace(spec.model_args["debugmodel"], **SIZES)
    spec = dataclasses.replace(spec, model_args={"debugmodel": sizes}, build_tokenizer_fn=None)
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            f"--job.dump_folder={folder}",
            "--model.name=llama3",
            "--model.flavor=debugmodel",
            f"--model.attn_type={args.attn_type}",
            "--model.attn_mask_type=position_block_causal",
            f"--training.seq_len={SEQ_LEN}",
            "--training.mixed_precision_param=float32",
            "--activation_checkpoint.mode=none",
            "--debug.seed=1",
        ]
        config = ConfigManager(JobConfig).parse_args(flags)
        trainer = PolicyTrainer(config, engine=TrainingEngine(config, train_spec=spec))
        for kind in ("groups of 8", "three levels of turns", "nothing shared"):
            compare(trainer, kind, args.steps)
        trainer.close()


def compare(trainer: PolicyTrainer, kind: str, n_steps: int) -> None:
    samples = samples_of(kind, random.Random(0))
    batchers = [
        Batcher(seq_len=SEQ_LEN, rows=1, packing=True, share_prefixes=x) for x in (False, True)
    ]
    seconds: list[list[float]] = [[], []]
    losses, gradients = [0.0, 0.0], [{}, {}]
    for round_ in range(n_steps + 1):  # the first warms up
        for which in ((0, 1), (1, 0))[round_ % 2]:
            start = time.process_time()
            losses[which] = trainer.forward_backward(batchers[which].batch(samples)).loss
            taken = time.process_time() - start
            if round_ == 0:
                named = trainer.engine.model_parts[0].named_parameters()
                gradients[which] = {name: p.grad.clone() for name, p in named}
            start = time.process_time()
            trainer.optim_step(OptimParams(lr=0.0))
            if round_:
                seconds[which].append(taken + time.process_time() - start)
    ratios = [trees / packed for packed, trees in zip(*seconds, strict=True)]
    pairs = [(gradients[1][name], x) for name, x in gradients[0].items()]
    difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    print(
        f"{kind:22}: packed rows {statistics.median(seconds[0]):.2f} s, trees "
        f"{statistics.median(seconds[1]):.2f} s, ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}); loss differs by "
        f"{abs(losses[1] - losses[0]):.1e}, gradients by {difference:.1e} of the largest"
    )


if __name__ == "__main__":
    main()
