"""What the engine adds to a step: a bare torch loop and `TrainingEngine`, by turns, on one model.

    python benchmarks/engine_overhead.py                    # 0.15M, 1M and 46M parameters

Both train the same model from the same weights on the same rows: forward, summed cross entropy,
backward, gradient norm and clipping, fused AdamW, a schedule, zeroed gradients. The loop is the 12
lines of `bare_step`. They take turns of a few steps in one process with one thread; a ratio is the median
of the turns' ratios, engine over loop. Losses have to agree, or the comparison would mean nothing.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable

import torch
from common import Call, median_ratio, print_header, print_row, take_turns
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
    (dim, n_layers, n_heads, vocab_size), (_, seq_len), _ = MODELS[name]
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
                seq_len=seq_len, mixed_precision_param="float32", max_norm=MAX_NORM
            ),
            activation_checkpoint=config.ActivationCheckpoint(mode="none"),
            debug=config.Debug(seed=0),
        )
    )


def bare_step(engine: TrainingEngine, tokens: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    """A loop of one's own around a copy of the engine's model."""
    model = engine.train_spec.model_cls(engine.model_args)
    model.init_weights()
    model.load_state_dict(engine.model_parts[0].state_dict())
    settings = engine.job_config.optimizer
    betas, decay = (settings.beta1, settings.beta2), settings.weight_decay
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=betas, eps=settings.eps, weight_decay=decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP)
    )

    def step() -> Tensor:
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


def engine_step(engine: TrainingEngine, tokens: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss = engine.forward_backward_step(
            input_dict={"input": tokens}, labels=labels, global_valid_tokens=labels.numel()
        )
        engine.optim_step()
        return loss

    return step


def repeated(step: Call, n: int) -> Call:
    def run() -> None:
        for _ in range(n):
            step()

    return run


def measure(name: str, attn_type: str, n_turns: int) -> None:
    (*_, vocab_size), (rows, seq_len), n_steps = MODELS[name]
    with make_engine(name, attn_type) as engine:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, vocab_size, (rows, seq_len + 1), generator=generator)
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        steps = [bare_step(engine, *batch), engine_step(engine, *batch)]
        for _ in range(3):
            theirs, ours = (float(step()) for step in steps)
            assert abs(ours - theirs) < 1e-5 * theirs, (ours, theirs)
        loop, own = take_turns(*(repeated(step, n_steps) for step in steps), turns=n_turns)
        added = statistics.median(b - a for a, b in zip(loop, own, strict=True))
        milliseconds = (f"{1e3 * x / n_steps:.2f}" for x in (min(loop), added))
        ratios = (f"{x:.3f}" for x in (median_ratio(own, loop), min(own) / min(loop)))
        print_row(name, f"{rows} x {seq_len}", *milliseconds, *ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--attn-type", default="sdpa", choices=["sdpa", "flex", "varlen"])
    parser.add_argument("--turns", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread; CPU-milliseconds and ratios, engine over loop")
    print_header("model", "rows", "loop, ms", "added, ms", "CPU", "best turns")
    for name in args.models:
        measure(name, args.attn_type, args.turns)


if __name__ == "__main__":
    main()
