"""The cost of an RL step with shared prefixes, against packed rows of the same samples.

    python benchmarks/trees.py                 # 22M Llama, fp32, one process; CPU-seconds
    python benchmarks/trees.py --steps 10 --attn_type varlen
    python benchmarks/trees.py --flavor 1B --seq_len 16384 --dtype bfloat16     # on a GPU

Three kinds of samples: groups of 8 completions of 64 tokens to a prompt of 192; three levels of turns, where
each turn is a sample and has three next turns; and samples without anything in common. On longer rows there are
more of them. A step is batching, forward, backward and the update. Packed rows and trees take a step in turn,
from the same weights. Prints seconds (median), the median of the rounds' ratios, and the largest differences of
loss and gradients. --json FILE also writes the figures there.
"""

import argparse
import dataclasses
import json
import random
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
from common import median_ratio, print_header, print_row, take_turns

from tests.reliability.jobs import flags_in
from torchtitan.config import ConfigManager
from torchtitan.engine import TrainingEngine
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.types import OptimParams, TrainingSample
from torchtitan.tools.host import keep_freed_memory

SIZES = {"dim": 384, "n_layers": 8, "n_heads": 6, "n_kv_heads": 3, "vocab_size": 8192}
VOCAB = 2048  # every flavor has at least as many tokens
KINDS = ("groups of 8", "three levels of turns", "nothing shared")


def sample(rng: random.Random, prompt: list[int], new: list[int], group: int) -> TrainingSample:
    options = {"advantage": rng.uniform(-1, 1), "group_id": group}
    return TrainingSample.from_sequence(prompt, new, [-9.0] * len(new), **options)


def samples_of(kind: str, rng: random.Random, group: int) -> list[TrainingSample]:
    """About 8,000 tokens; of turns 7,000. group: number of the first group."""

    def tokens(n: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(n)]

    if kind == "nothing shared":
        return [sample(rng, [group + i, *tokens(191)], tokens(64), group + i) for i in range(32)]
    if kind == "groups of 8":
        prompts = [tokens(192) for _ in range(4)]
        numbered = enumerate(prompts, group)
        return [sample(rng, p, tokens(64), i) for i, p in numbered for _ in range(8)]
    samples, histories = [], [tokens(128)]
    for _ in range(3):
        turns = [(history, tokens(32)) for history in histories for _ in range(3)]
        samples += [sample(rng, *turn, group) for turn in turns]
        histories = [history + turn + tokens(16) for history, turn in turns]
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=7, help="rounds of each kind (7)")
    parser.add_argument("--attn_type", default="flex", choices=("flex", "varlen"))
    parser.add_argument("--seq_len", type=int, default=2048)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--flavor", help="of llama3, in place of 22M parameters")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    keep_freed_memory()  # as torchtitan.rl.train does
    torch.set_num_threads(1)
    spec = get_train_spec("llama3")
    sizes = dataclasses.replace(spec.model_args[args.flavor or "debugmodel"])
    sizes = sizes if args.flavor else dataclasses.replace(sizes, **SIZES)
    spec = dataclasses.replace(spec, model_args={"measured": sizes}, build_tokenizer_fn=None)
    with tempfile.TemporaryDirectory() as folder:
        flags = flags_in(f"""
            job.dump_folder={folder} model.name=llama3 model.flavor=measured debug.seed=1
            model.attn_type={args.attn_type} model.attn_mask_type=position_block_causal
            training.seq_len={args.seq_len} training.mixed_precision_param={args.dtype}
            activation_checkpoint.mode=none {"compile.enable" if args.compile else ""}
        """)
        config = ConfigManager(JobConfig).parse_args(flags)
        trainer = PolicyTrainer(config, engine=TrainingEngine(config, train_spec=spec))
        titles = "packed rows, s", "trees, s", "ratio", "loss differs by", "gradients by"
        print_header("samples", *titles)
        figures = []
        for kind in KINDS:
            cells = compare(trainer, kind, args)
            figures.append(dict(zip(("samples", *titles), (kind, *cells), strict=True)))
            print_row(kind, *cells)
            if args.json:
                args.json.write_text(json.dumps(figures, indent=2))
        trainer.close()


def compare(trainer: PolicyTrainer, kind: str, args: argparse.Namespace) -> list[str]:
    rng = random.Random(0)
    samples = [x for i in range(args.seq_len // 2048) for x in samples_of(kind, rng, 32 * i)]
    losses, gradients = [0.0, 0.0], [{}, {}]

    def step(which: int) -> None:
        batcher = Batcher(seq_len=args.seq_len, rows=1, packing=True, share_prefixes=bool(which))
        losses[which] = trainer.forward_backward(batcher.batch(samples)).loss
        if not gradients[which]:
            named = trainer.engine.model_parts[0].named_parameters()
            gradients[which] = {name: p.grad.clone() for name, p in named}
        trainer.optim_step(OptimParams(lr=0.0))

    packed, trees = take_turns(partial(step, 0), partial(step, 1), turns=args.steps)
    pairs = [(gradients[1][name], x) for name, x in gradients[0].items()]
    difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    seconds = (f"{statistics.median(times):.3f}" for times in (packed, trees))
    loss = f"{abs(losses[1] - losses[0]):.1e}"
    return [
        *seconds,
        f"{median_ratio(trees, packed):.3f}",
        loss,
        f"{difference:.1e} of the largest",
    ]


if __name__ == "__main__":
    main()
