"""Linear attention by the gated delta rule: its cost beside transformers', and its memory.

    python benchmarks/linear_attention.py [--only steps rule documents memory] [--turns 9]

steps: training steps of small Qwen 3.5 models, of this engine and of transformers (eager, AdamW, clipping) by turns,
on rows of one document, because transformers mixes packed ones. rule: only the delta rule, forward and backward, of
several sizes. documents: a step on 64 documents of 128 tokens beside one document of 8,192. memory: peaks of
the rule and of four layers, with and without activation checkpointing, of forward and backward, beyond what
was there before. CPU-seconds of one thread; each ratio is the median of the turns' ratios.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from torchtitan.config import job_config as config
from torchtitan.engine import TrainingEngine
from torchtitan.models.hf_config import to_hf_config
from torchtitan.numerics import products
from torchtitan.numerics.delta_rule import gated_delta_rule

LR, MAX_NORM = 1e-3, 1.0
# (rows, tokens), flavor, whether oneDNN may be used; transformers never uses it for fp32 products
STEPS = [(4, 256, "debugmodel", True), (4, 256, "debugmodel", False), (1, 1024, "debugmodel", True)]
# rows, tokens, key heads, value heads, head size
RULES = [(4, 256, 4, 4, 16), (4, 256, 4, 8, 32), (2, 512, 4, 8, 64), (1, 1024, 4, 8, 128)]


def make_engine(flavor: str, seq_len: int, ac: str = "none") -> TrainingEngine:
    packed = dict(attn_type="varlen", attn_mask_type="position_block_causal")
    return TrainingEngine(
        config.JobConfig(
            job=config.Job(dump_folder=tempfile.mkdtemp()),
            model=config.Model(name="qwen3_5", flavor=flavor, **packed),
            optimizer=config.Optimizer(lr=LR),
            training=config.Training(
                seq_len=seq_len, mixed_precision_param="float32", max_norm=MAX_NORM
            ),
            activation_checkpoint=config.ActivationCheckpoint(mode=ac),
            debug=config.Debug(seed=0),
        )
    )


def engine_step(engine: TrainingEngine, tokens: Tensor, length: int) -> Callable[[], Tensor]:
    """A step on rows [B, T] of documents of `length` tokens."""
    positions = (torch.arange(tokens.shape[1]) % length).expand(tokens.shape)
    batch = {"input": tokens, "positions": positions}

    def step() -> Tensor:
        loss = engine.forward_backward_step(
            input_dict=batch, labels=tokens, global_valid_tokens=tokens.numel()
        )
        engine.optim_step()
        return loss

    return step


def their_step(engine: TrainingEngine, tokens: Tensor) -> Callable[[], Tensor]:
    """A step of transformers' model with the engine's weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    adapter = engine.train_spec.state_dict_adapter(engine.model_args, None)
    content = AutoConfig.for_model(**to_hf_config(engine.model_args))
    content._attn_implementation = content._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(content)
    model.load_state_dict(adapter.to_hf(engine.model_parts[0].state_dict()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> Tensor:
        logits = model(tokens, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def seconds_of(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def compare(name: str, base: Callable, other: Callable, turns: int) -> None:
    """Print the CPU-seconds of both, and other / base."""
    calls, found = (base, other), []
    for turn in range(turns + 1):
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        seconds = {i: seconds_of(calls[i]) for i in order}
        found += [seconds] if turn else []  # the first warms up
    ratio = statistics.median(s[1] / s[0] for s in found)
    best = [1e3 * min(s[i] for s in found) for i in (0, 1)]
    print(f"| {name} | {best[0]:.1f} | {best[1]:.1f} | {ratio:.2f} |", flush=True)


def show_steps(turns: int) -> None:
    for rows, length, flavor, may_use_onednn in STEPS:
        with make_engine(flavor, length) as engine:
            if not may_use_onednn:
                products.avoid_onednn()
            tokens = torch.randint(
                0, 2048, (rows, length), generator=torch.Generator().manual_seed(0)
            )
            theirs, ours = their_step(engine, tokens), engine_step(engine, tokens, length)
            first = float(theirs()), float(ours())
            assert abs(first[0] - first[1]) < 1e-4 * first[0], first
            name = f"{flavor}, {rows} x {length}{'' if may_use_onednn else ', without oneDNN'}"
            compare(name, theirs, ours, turns)


def rule(size: tuple[int, ...], compute: Callable[..., Tensor]) -> Callable[[], object]:
    rows, length, n_key_heads, n_value_heads, dim = size
    generator = torch.Generator().manual_seed(0)
    shapes = [(n_key_heads, dim)] * 2 + [(n_value_heads, dim)] + [(n_value_heads,)] * 2
    inputs = [torch.randn(rows, length, *shape, generator=generator) for shape in shapes]
    inputs = [*inputs[:3], -inputs[3].abs(), inputs[4].sigmoid()]
    inputs = [x.requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(compute(*inputs).sum(), inputs)


def our_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return gated_delta_rule(q, k, v, g, beta, torch.zeros(q.shape[:2], dtype=torch.int32))[0]


def their_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    heads = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(heads, 2) for x in (q, k))
    return torch_chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]


def show_rules(turns: int) -> None:
    for size in RULES:
        name = "rule, {} x {}, {} and {} heads of {}".format(*size)
        compare(name, rule(size, their_rule), rule(size, our_rule), turns)


def show_documents(turns: int) -> None:
    with make_engine("debugmodel", 8192) as engine:
        tokens = torch.randint(0, 2048, (1, 8192), generator=torch.Generator().manual_seed(0))
        one, many = (engine_step(engine, tokens, length) for length in (8192, 128))
        compare("one document of 8,192, and 64 of 128", one, many, turns)


def peak_mib(call: Callable[[], object]) -> float:
    """Return what the peak of a call's tensors adds to those that were there before."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(nbytes for _, nbytes in changes)) / 2**20


def show_memory() -> None:
    lengths = (1024, 4096, 8192)
    print(f"\n| peak, MiB, of tokens | {' | '.join(f'{n:,}' for n in lengths)} |")
    print("|---|" + "---|" * len(lengths))
    rows = {"rule, 4 and 8 heads of 128": lambda n: rule((1, n, 4, 8, 128), our_rule)}
    rows["transformers' rule"] = lambda n: rule((1, n, 4, 8, 128), their_rule)
    for name, make in rows.items():
        print(f"| {name} | {' | '.join(f'{peak_mib(make(n)):.0f}' for n in lengths)} |", flush=True)
    for mode in ("none", "selective", "full"):
        cells = []
        for length in lengths:
            with make_engine("debugmodel", length, mode) as engine:
                tokens = torch.randint(0, 2048, (1, length))
                cells.append(f"{peak_mib(engine_step(engine, tokens, 128)):.0f}")
        print(f"| step of the debugmodel, {mode} AC | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = {"steps": show_steps, "rule": show_rules, "documents": show_documents}
    parser.add_argument("--only", nargs="+", choices=[*parts, "memory"], default=[*parts, "memory"])
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| what | theirs (or the first), ms | ours (or the second), ms | ratio |\n|---|---|---|---|"
    )
    for name, show in parts.items():
        if name in args.only:
            show(args.turns)
    if "memory" in args.only:
        show_memory()


if __name__ == "__main__":
    main()
