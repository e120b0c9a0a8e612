"""CPU-seconds of verl's training steps: our engine, verl's own FSDP engine, and verl's way of
February 2026, whose engine called our model itself, microbatch by microbatch.

    scripts/run_verl_tests.sh --co -q        # once, makes an environment with verl
    .venv-verl/bin/python benchmarks/verl_engines.py [--ranks 2] [--tokens 256] [--attention flex]

A Qwen3 with random weights in fp32, without recomputation. Every engine gets the same batches, in
microbatches of at most `--tokens` tokens, and verl's `sft_loss`. They take turns in one run, first
backwards and forwards in another order each round; a ratio is the median of those of all rounds.
Over ranks, which share the data by FSDP, the seconds are summed.
"""

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# verl has registered its own engine for accelerators, and ours is there for them, too.
os.environ["VERL_ENGINE_DEVICE"] = "cuda"

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.losses import sft_loss

from tests.compat.test_embedding_client import ASSETS, Client
from tests.verl import cases
from torchtitan.config.job_config import ActivationCheckpoint, LRScheduler, Optimizer, Training
from torchtitan.integrations.verl import samples
from torchtitan.models.hf_config import from_hf_config
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.testing.gloo import run_ranks

OURS, FSDP, FEBRUARY = "torchtitan", "verl's fsdp2", "February 2026"
WARM_UP_ROUNDS = 2

Step = Callable[[TensorDict], float]


def make_batch(seed: int, args: argparse.Namespace) -> TensorDict:
    """`--samples` samples of a quarter to all of `--length` tokens, the second half to be learned."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(
        args.length // 4, args.length + 1, (args.samples,), generator=generator
    ).tolist()
    tokens = [torch.randint(1, args.vocab, (n,), generator=generator) for n in lengths]
    settings = dict(use_remove_padding=True, pad_mode="no_padding")
    return cases.batch_of_samples(tokens, max_token_len_per_gpu=args.tokens, **settings)


def step_of(engine: Any) -> Step:
    """A training step of an engine of verl's; returns the gradient norm."""
    loss_function = partial(sft_loss, config=None)

    def step(data: TensorDict) -> float:
        with engine.train_mode():
            output = engine.train_batch(data, loss_function)
        engine.lr_scheduler_step()
        return float(output["metrics"]["grad_norm"])

    return step


def ours(folder: str, args: argparse.Namespace) -> Step:
    engine = EngineRegistry.new(
        "language_model",
        "torchtitan",
        model_config=HFModelConfig(path=folder, load_tokenizer=False),
        engine_config=cases.engine_config(
            attn_type=args.attention, data_parallel_shard_size=args.ranks
        ),
        optimizer_config=cases.optimizer_config(),
        checkpoint_config=None,
    )
    engine.initialize()
    return step_of(engine)


def fsdp(folder: str, args: argparse.Namespace) -> Step:
    model_config = HFModelConfig(
        path=folder,
        load_tokenizer=False,
        enable_gradient_checkpointing=False,
        use_remove_padding=True,
        override_config={"attn_implementation": "sdpa"},
    )
    model_config.model_type = "language_model"  # as verl's worker says
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=model_config,
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=cases.LR,
            betas=(0.9, 0.99),
            weight_decay=0.1,
            clip_grad=cases.CLIP,
            total_training_steps=1000,
            override_optimizer_config={"eps": cases.EPS},
        ),
        checkpoint_config=cases.CheckpointConfig(),
    )
    engine.initialize()
    return step_of(engine)


def february(folder: str, args: argparse.Namespace) -> Step:
    client = Client(
        folder,
        args.attention,
        {"data_parallel_shard_degree": args.ranks},
        sizes=(args.dim, args.layers, args.vocab),
        training=Training(mixed_precision_param="float32", max_norm=cases.CLIP),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
        optimizer=Optimizer(lr=cases.LR, eps=cases.EPS, beta2=0.99),
        lr_scheduler=LRScheduler(warmup_steps=0, min_lr_factor=1.0),
    )

    def step(data: TensorDict) -> float:
        num_tokens = data["loss_mask"].values().sum()
        dist.all_reduce(num_tokens)
        tu.assign_non_tensor(
            data, sp_size=1, dp_size=client.dp_size, batch_num_tokens=num_tokens.item()
        )
        microbatches, _ = prepare_micro_batches(data, dist.group.WORLD, same_micro_num_in_dp=True)
        for microbatch in microbatches:
            row = samples.pack(microbatch, 0)
            log_probs, _ = client.forward(row, row["labels"])
            model_output = {"log_probs": samples.unpack(log_probs[None], microbatch)}
            loss, _ = sft_loss(None, model_output, microbatch, dist.group.WORLD)
            loss.backward()
        return client.optimizer_step().item()

    return step


ENGINES = {OURS: ours, FSDP: fsdp, FEBRUARY: february}


def measure(
    folder: str, args: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """(seconds of each round by engine, largest relative difference of its norms to ours)."""
    torch.set_num_threads(1)
    os.chdir(folder)
    qwen3_args["of_benchmark"] = from_hf_config(folder).model_args
    steps = {name: make(folder, args) for name, make in ENGINES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    worst = dict.fromkeys(steps, 0.0)
    for round in range(WARM_UP_ROUNDS + args.rounds):
        norms = {}
        for name in sorted(steps, key=list(steps).index, reverse=round % 2 == 1):
            batch = make_batch(round, args)
            batch = tu.chunk_tensordict(batch, args.ranks)[dist.get_rank()]
            started = time.process_time()
            norms[name] = steps[name](batch)
            if round >= WARM_UP_ROUNDS:
                seconds[name].append(time.process_time() - started)
        for name, norm in norms.items():
            worst[name] = max(worst[name], abs(norm / norms[OURS] - 1))
    return seconds, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--attention", choices=("flex", "varlen"), default="varlen")
    parser.add_argument("--tokens", type=int, default=512, help="of a microbatch, at most")
    parser.add_argument("--samples", type=int, default=16, help="of a batch")
    parser.add_argument("--length", type=int, default=256, help="of the longest sample")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    args = parser.parse_args()
    folder = cases.save_model(
        tempfile.mkdtemp(),
        "qwen3",
        hidden_size=args.dim,
        intermediate_size=3 * args.dim,
        num_hidden_layers=args.layers,
        num_attention_heads=args.dim // 32,
        num_key_value_heads=args.dim // 64,
        head_dim=32,
        vocab_size=args.vocab,
    )
    shutil.copytree(
        ASSETS, folder, dirs_exist_ok=True
    )  # a tokenizer, which the client's config wants
    ranks = run_ranks(measure, args.ranks, folder, args, timeout_seconds=1800)
    seconds = {
        name: [sum(parts) for parts in zip(*(own[name] for own, _ in ranks), strict=True)]
        for name in ENGINES
    }
    print(f"{args}; {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}")
    for name, own in seconds.items():
        ratios = [mine / theirs for mine, theirs in zip(seconds[OURS], own, strict=True)]
        print(
            f"{name:14} {statistics.median(own):.3f} CPU-seconds per step; ours takes "
            f"{statistics.median(ratios):.2f} of it ({min(ratios):.2f} to {max(ratios):.2f}); "
            f"gradient norms differ from ours by {max(worst[name] for _, worst in ranks):.1e}"
        )


if __name__ == "__main__":
    main()
