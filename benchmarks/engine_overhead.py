"""What the engine adds to a step: a bare torch loop and `TrainingEngine`, by turns, on one model.

    python benchmarks/engine_overhead.py                    # 0.15M, 1M and 46M parameters
    python benchmarks/engine_overhead.py --models 0.15M --profile

Both train the same model from the same weights on the same rows: forward, summed cross entropy,
backward, gradient norm and clipping, fused AdamW, a schedule, zeroed gradients. The loop is the 12
lines of `bare_step`. They take turns of a few steps in one process with one thread, and who goes
first alternates, so that other load on the machine meets both; a ratio is the median of the turns'
ratios, engine over loop. Losses have to agree, or the comparison would mean nothing.

--profile prints where the engine's steps spend their time (cProfile, which itself slows calls down).
"""

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchtitan.config import job_config as config
from torchtitan.engine import TrainingEngine
from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

# name -> (dim, layers, heads, vocabulary), (rows, tokens), steps of a turn
MODELS: dict[str, tuple[tuple[int, int, int, int], tuple[int, int], int]] = {
    "0.15M": ((64, 2, 4, 256), (4, 256), 10),
    "1M": ((128, 4, 4, 1024), (4, 256), 5),
    "46M": ((512, 10, 8, 8192), (2, 256), 1),
}
LR, WARMUP, MAX_NORM = 1e-3, 2, 1.0


def make_engine(name: str, attn_type: str) -> TrainingEngine:
    dim, n_layers, n_heads, vocab_size = MODELS[name][0]
    llama3_args[name] = TransformerModelArgs(
        dim=dim, n_layers=n_layers, n_heads=n_heads, vocab_size=vocab_size, rope_theta=500000
    )
    return TrainingEngine(
        config.JobConfig(
            job=config.Job(dump_folder=tempfile.mkdtemp()),
            model=config.Model(name="llama3", flavor=name, attn_type=attn_type),
            optimizer=config.Optimizer(lr=LR),
            lr_scheduler=config.LRScheduler(warmup_steps=WARMUP, min_lr_factor=1.0),
            training=config.Training(
                seq_len=MODELS[name][1][1], mixed_precision_param="float32", max_norm=MAX_NORM
            ),
            activation_checkpoint=config.ActivationCheckpoint(mode="none"),
            debug=config.Debug(seed=0),
        )
    )


def bare_step(engine: TrainingEngine) -> Callable[[Tensor, Tensor], Tensor]:
    """A loop of one's own around a copy of the engine's model."""
    model = engine.train_spec.model_cls(engine.model_args)
    model.init_weights()
    model.load_state_dict(engine.model_parts[0].state_dict())
    settings = engine.job_config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LR,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP)
    )

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(tokens)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), reduction="sum"
        )
        loss = loss / labels.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def engine_step(engine: TrainingEngine) -> Callable[[Tensor, Tensor], Tensor]:
    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = engine.forward_backward_step(
            input_dict={"input": tokens}, labels=labels, global_valid_tokens=labels.numel()
        )
        engine.optim_step()
        return loss

    return step


def seconds_of(step: Callable[[], object], n: int) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of one of n steps."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(n):
        step()
    return (time.process_time() - cpu) / n, (time.perf_counter() - wall) / n


def measure(name: str, attn_type: str, n_turns: int, profile: bool) -> None:
    _, (rows, seq_len), n_steps = MODELS[name]
    with make_engine(name, attn_type) as engine:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, MODELS[name][0][3], (rows, seq_len + 1), generator=generator)
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        steps = [bare_step(engine), engine_step(engine)]
        for _ in range(3):  # warm up, and compare
            theirs, ours = (float(step(*batch)) for step in steps)
            assert abs(ours - theirs) < 1e-5 * theirs, (ours, theirs)
        turns = []
        for turn in range(n_turns):
            order = (0, 1) if turn % 2 == 0 else (1, 0)
            found = {i: seconds_of(lambda i=i: steps[i](*batch), n_steps) for i in order}
            turns.append((*found[0], *found[1]))
        cpu, wall = (statistics.median(turn[i + 2] / turn[i] for turn in turns) for i in (0, 1))
        best = [min(turn[i] for turn in turns) for i in (0, 2)]
        added = statistics.median(turn[2] - turn[0] for turn in turns)
        print(
            f"| {name} | {rows} x {seq_len} | {best[0] * 1e3:.2f} | {added * 1e3:+.2f} | "
            f"{cpu:.3f} | {best[1] / best[0]:.3f} | {wall:.3f} |",
            flush=True,
        )
        if profile:
            profiler = cProfile.Profile()
            profiler.enable()
            for _ in range(100):
                steps[1](*batch)
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--attn-type", default="sdpa", choices=["sdpa", "flex", "varlen"])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread; CPU-milliseconds and ratios, engine over loop")
    print("| model | rows | loop, ms | added, ms | CPU | best turns | wall |\n|" + "---|" * 7)
    for name in args.models:
        measure(name, args.attn_type, args.turns, args.profile)


if __name__ == "__main__":
    main()
