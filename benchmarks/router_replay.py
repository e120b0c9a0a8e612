"""A mixture of experts in RL: the generator's experts replayed by the trainer, or chosen again.

    python benchmarks/router_replay.py                      # log-probs, then learning curves
    python benchmarks/router_replay.py --steps 0            # log-probs only
    python benchmarks/router_replay.py --seeds 0 1 2 --steps 100 --json out.json

The trainer computes in fp32, the generator in fp32 or bf16, both with the same weights. First a table
of how far their log-probs of sampled tokens differ, and what replay costs. Then learning curves of the task `copy` (three
letters, from random weights) with a bf16 generator, with and without replay, run by run in turn.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from torchtitan.config import ConfigManager
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import Qwen3ModelArgs, get_train_spec
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.rl.controller import Controller
from torchtitan.rl.generator import build_generator
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.types import SamplingConfig, TrainingSample
from torchtitan.rl.weight_sync import WeightSync

NAME = "small_mixture"
EXPERTS = MoEArgs(
    num_experts=16,
    num_shared_experts=0,
    top_k=4,
    score_func="softmax",
    route_norm=True,
    score_before_experts=False,
    load_balance_coeff=None,
)
ARGS = Qwen3ModelArgs(
    dim=128,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    vocab_size=32,
    moe_enabled=True,
    moe_inter_dim=64,
    moe_args=EXPERTS,
)


def register() -> None:
    spec = dataclasses.replace(
        get_train_spec(),
        model_args={"4 layers": ARGS, "12 layers": dataclasses.replace(ARGS, n_layers=12)},
        build_tokenizer_fn=None,
        build_dataloader_fn=None,
        build_validator_fn=None,
    )
    register_train_spec(NAME, spec)


def config_of(flavor: str, dtype: str, replays: bool, seed: int, *flags: str) -> JobConfig:
    return ConfigManager(JobConfig).parse_args(
        [
            f"--model.name={NAME}",
            f"--model.flavor={flavor}",
            f"--job.dump_folder={tempfile.mkdtemp()}",
            "--training.mixed_precision_param=float32",
            "--parallelism.always_fsdp=False",
            "--activation_checkpoint.mode=none",
            "--lr_scheduler.warmup_steps=0",
            f"--debug.seed={seed}",
            f"--rl.seed={seed}",
            f"--rl.generator.dtype={dtype}",
            "--rl.weight_sync.mode=broadcast",
            *(["--rl.generator.replay_experts"] if replays else []),
            *flags,
        ]
    )


# ---- log-probs ----


def differences(flavor: str, dtype: str, spread: float) -> list[dict[str, Any]]:
    """How far log-probs of sampled tokens are from the trainer's, without and with replay.

    spread: factor of the initial weights of routers, experts and output. With 1 experts add hardly
        anything to the hidden states; with 5, about as much as a trained model's.
    """
    trainer = PolicyTrainer(config_of(flavor, dtype, True, 0, "--training.seq_len=112"))
    engine = trainer.engine
    with torch.no_grad():
        for name, parameter in engine.model_parts[0].named_parameters():
            if ".moe." in name or name.startswith("output"):
                parameter.mul_(spread)
    generator = build_generator(trainer.job_config, engine)
    WeightSync(engine, generator).update()
    prompts = torch.randint(0, 32, (16, 16), generator=torch.Generator().manual_seed(0)).tolist()
    completions = generator.generate(prompts, SamplingConfig(max_tokens=96, seed=1))
    rows = []
    for replays in (False, True):
        samples = [
            TrainingSample.of_sequence(
                prompt,
                c.token_ids,
                c.token_logprobs,
                1.0,
                routed_experts=c.routed_experts if replays else None,
            )
            for prompt, c in zip(prompts, completions, strict=True)
        ]
        batch = _batcher(engine).batch(samples)
        scores = trainer.forward(batch)
        off = torch.cat(
            [(ours - s.logprobs)[s.loss_mask > 0] for ours, s in zip(scores, samples, strict=True)]
        )
        rows.append(
            {
                "model": flavor,
                "generator": dtype,
                "spread": spread,
                "replay": replays,
                "mean": off.abs().mean().item(),
                "p99": off.abs().quantile(0.99).item(),
                "max": off.abs().max().item(),
                "kl": (off.double().expm1() - off).mean().item(),
                "same_experts": _share_of_same_experts(engine, prompts, completions),
            }
        )
    trainer.close()
    return rows


def _batcher(engine: Any) -> Any:
    from torchtitan.rl.batcher import Batcher

    return Batcher(dp_size=engine.dp_size, seq_len=112, rows=16)


@torch.no_grad()
def _share_of_same_experts(engine: Any, prompts: list[list[int]], completions: list[Any]) -> float:
    """Return for how many tokens the trainer's routers choose the generator's experts in all layers."""
    (model,) = engine.model_parts
    chosen: list[torch.Tensor] = []
    routers = [layer.moe.router for layer in model.layers.values()]
    hooks = [r.register_forward_hook(lambda _m, _i, out: chosen.append(out[1])) for r in routers]
    try:
        same, n_tokens = 0, 0
        for prompt, completion in zip(prompts, completions, strict=True):
            chosen.clear()
            model(torch.tensor([[*prompt, *completion.token_ids[:-1]]]))
            ours = torch.stack(chosen, dim=1).sort(dim=-1).values
            theirs = completion.routed_experts.sort(dim=-1).values
            same += int((ours == theirs).flatten(1).all(dim=1).sum())
            n_tokens += len(ours)
    finally:
        for hook in hooks:
            hook.remove()
    return same / n_tokens


# ---- price ----


def price() -> None:
    """Print the CPU time of generation with a record, and of training with replay, as ratios."""
    trainer = PolicyTrainer(config_of("4 layers", "float32", True, 0, "--training.seq_len=112"))
    generator = build_generator(trainer.job_config, trainer.engine)
    WeightSync(trainer.engine, generator).update()
    prompts = torch.randint(0, 32, (16, 16), generator=torch.Generator().manual_seed(0)).tolist()
    seconds: dict[tuple[str, bool], float] = {}

    def timed(name: str, replays: bool, call: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = call()
        spent = time.process_time() - started
        seconds[name, replays] = min(spent, seconds.get((name, replays), spent))
        return result

    for _ in range(4):  # in turn; the fastest counts
        for replays in (False, True):
            generator.records_experts = replays
            completions = timed(
                "generation",
                replays,
                lambda: generator.generate(prompts, SamplingConfig(max_tokens=96, seed=1)),
            )
            samples = [
                TrainingSample.of_sequence(
                    prompt, c.token_ids, c.token_logprobs, 1.0, routed_experts=c.routed_experts
                )
                for prompt, c in zip(prompts, completions, strict=True)
            ]
            batch = _batcher(trainer.engine).batch(samples)
            timed("training", replays, lambda batch=batch: trainer.forward_backward(batch))
            trainer.zero_grad()
    trainer.close()
    for name in ("generation", "training"):
        ratio = seconds[name, True] / seconds[name, False]
        print(f"{name} with replay takes {ratio:.3f} times the CPU time", flush=True)


# ---- learning ----


def curve(replays: bool, seed: int, steps: int, dtype: str) -> dict[str, Any]:
    """Train `copy` with a generator of this dtype; returns what each step logged."""
    flags = [
        f"--training.steps={steps}",
        "--training.seq_len=16",
        "--training.local_batch_size=128",
        "--optimizer.lr=3e-3",
        "--optimizer.beta2=0.95",
        "--optimizer.weight_decay=0",
        "--rl.task.name=copy",
        "--rl.sampling.max_tokens=4",
        "--rl.num_prompts_per_step=8",
        "--rl.num_samples_per_prompt=16",
        "--rl.loss.entropy_coef=0.02",
        # One update per batch: the ratios differ from 1 by the generator's rounding and choices only.
        "--metrics.log_freq=1000000",
    ]
    controller = Controller(config_of("4 layers", dtype, replays, seed, *flags))
    controller.setup()
    rows = []
    while controller.step < steps:
        rows.append(controller.train_step())
    controller.close()
    return {
        "generator": dtype,
        "replay": replays,
        "seed": seed,
        "logprob_diff_mean": [row["loss/logprob_diff_mean"] for row in rows],
        "reward": [row["rl/reward"] for row in rows],
        "exact": [row["rl/exact"] for row in rows],
        "kl_generator": [row["loss/kl_generator"] for row in rows],
        "logprob_diff_max": [row["loss/logprob_diff_max"] for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of each curve")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--spreads", type=float, nargs="*", default=[1.0, 5.0], help="none: curves only"
    )
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    register()
    figures: dict[str, Any] = {"differences": [], "curves": []}

    def save() -> None:
        if args.json:
            args.json.write_text(json.dumps(figures, indent=1))

    print(
        "model      generator  spread  same experts  replay      mean       p99       max        k3"
    )
    for flavor in ("4 layers", "12 layers"):
        for dtype in ("float32", "bfloat16"):
            for spread in args.spreads:
                for row in differences(flavor, dtype, spread):
                    figures["differences"].append(row)
                    print(
                        f"{flavor:9}  {dtype:9}  {spread:6g}  {100 * row['same_experts']:10.1f} %  "
                        f"{'yes' if row['replay'] else 'no':6}  {row['mean']:8.1e}  {row['p99']:8.1e}  "
                        f"{row['max']:8.1e}  {row['kl']:8.1e}",
                        flush=True,
                    )
                save()
    if args.spreads:
        price()
    if args.steps:
        print(
            "\ngenerator  seed  replay  reward: first 10, last 10   exact, last 10   k3, mean   max"
        )
    for seed in args.seeds if args.steps else ():
        for replays in (False, True):
            run = curve(replays, seed, args.steps, "bfloat16")
            figures["curves"].append(run)
            first, last = (
                statistics.fmean(run["reward"][part]) for part in (slice(10), slice(-10, None))
            )
            print(
                f"{run['generator']:9}  {seed:4}  {'yes' if replays else 'no':6}  {first:15.3f}"
                f"{last:9.3f}  {statistics.fmean(run['exact'][-10:]):15.3f}"
                f"  {statistics.fmean(run['logprob_diff_mean']):9.1e}"
                f"  {statistics.fmean(run['kl_generator']):7.1e}  {max(run['logprob_diff_max']):7.3f}",
                flush=True,
            )
            save()


if __name__ == "__main__":
    main()
