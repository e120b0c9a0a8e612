"""Linear attention by the gated delta rule: its cost beside transformers', and its memory.

    python benchmarks/linear_attention.py [--only steps rule documents memory] [--turns 9]

steps: training steps of a small Qwen 3.5, of transformers (eager, AdamW, clipping) and of this engine, by turns, on
rows of one document, because transformers mixes packed ones. rule: the delta rule only, forward and backward.
documents: a step on one document of 8,192 tokens, and on 64 of 128. CPU-seconds of one thread; a ratio is the
median of the turns' ratios. memory: what the peak of a call adds.
"""

import argparse
import itertools
import tempfile
from collections.abc import Callable

import torch
from common import Call, median_ratio, print_header, print_row, take_turns
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from torchtitan.config import job_config as config
from torchtitan.engine import TrainingEngine
from torchtitan.models.hf_config import to_hf_config
from torchtitan.numerics import products
from torchtitan.numerics.delta_rule import gated_delta_rule

# rows, tokens, key heads, value heads, head size
RULES = [(4, 256, 4, 4, 16), (4, 256, 4, 8, 32), (2, 512, 4, 8, 64), (1, 1024, 4, 8, 128)]
LENGTHS = (1024, 4096, 8192)


def make_engine(seq_len: int, ac: str = "none") -> TrainingEngine:
    packed = dict(attn_type="varlen", attn_mask_type="position_block_causal")
    return TrainingEngine(
        config.JobConfig(
            job=config.Job(dump_folder=tempfile.mkdtemp()),
            model=config.Model(name="qwen3_5", flavor="debugmodel", **packed),
            training=config.Training(seq_len=seq_len, mixed_precision_param="float32"),
            activation_checkpoint=config.ActivationCheckpoint(mode=ac),
        )
    )


def engine_step(engine: TrainingEngine, tokens: Tensor, length: int) -> Callable[[], Tensor]:
    """A step on rows [B, T] of documents of `length` tokens."""
    positions = (torch.arange(tokens.shape[1]) % length).expand(tokens.shape)
    batch = {"input": tokens, "positions": positions}

    def step() -> Tensor:
        n = tokens.numel()
        loss = engine.forward_backward_step(input_dict=batch, labels=tokens, global_valid_tokens=n)
        engine.optim_step()
        return loss

    return step


def their_step(engine: TrainingEngine, tokens: Tensor) -> Callable[[], Tensor]:
    """A step of transformers' model with the engine's weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    content = AutoConfig.for_model(**to_hf_config(engine.model_args))
    content._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(content)
    adapter = engine.train_spec.state_dict_adapter(engine.model_args, None)
    model.load_state_dict(adapter.to_hf(engine.model_parts[0].state_dict()))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> Tensor:
        logits = model(tokens, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def compare(name: str, first: Call, second: Call, turns: int) -> None:
    """Print the milliseconds of both calls, and second / first."""
    times = take_turns(first, second, turns=turns)
    best = [f"{1e3 * min(column):.1f}" for column in times]
    print_row(name, *best, f"{median_ratio(times[1], times[0]):.2f}")


def show_steps(turns: int) -> None:
    for rows, length, uses_onednn in [(4, 256, True), (1, 1024, True), (4, 256, False)]:
        with make_engine(length) as engine:
            if not uses_onednn:
                products.avoid_onednn()
            tokens = torch.randint(0, 2048, (rows, length))
            theirs, ours = their_step(engine, tokens), engine_step(engine, tokens, length)
            torch.testing.assert_close(ours(), theirs(), rtol=1e-4, atol=0)
            name = f"step, {rows} x {length}{'' if uses_onednn else ', without oneDNN'}"
            compare(name, theirs, ours, turns)


def rule(compute: Callable[..., Tensor], *size: int) -> Call:
    rows, length, n_key_heads, n_value_heads, dim = size
    shapes = [(n_key_heads, dim)] * 2 + [(n_value_heads, dim)] + [(n_value_heads,)] * 2
    q, k, v, g, beta = (torch.randn(rows, length, *shape) for shape in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v, -g.abs(), beta.sigmoid())]
    return lambda: torch.autograd.grad(compute(*inputs).sum(), inputs)


def our_rule(q: Tensor, *others: Tensor) -> Tensor:
    return gated_delta_rule(q, *others, torch.zeros(q.shape[:2], dtype=torch.int32))[0]


def their_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
    return torch_chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]


def show_rules(turns: int) -> None:
    for size in RULES:
        name = "rule, {} x {}, {} and {} heads of {}".format(*size)
        compare(name, rule(their_rule, *size), rule(our_rule, *size), turns)


def show_documents(turns: int) -> None:
    with make_engine(8192) as engine:
        tokens = torch.randint(0, 2048, (1, 8192))
        one, many = (engine_step(engine, tokens, length) for length in (8192, 128))
        compare("step, one document of 8,192 and 64 of 128", one, many, turns)


def peak_mib(call: Call) -> str:
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return f"{max(itertools.accumulate(n_bytes for _, n_bytes in changes)) / 2**20:.0f}"


def show_memory(_: int) -> None:
    print_header("peak in MiB, of tokens", *map(str, LENGTHS))
    for name, compute in {"rule": our_rule, "transformers' rule": their_rule}.items():
        peaks = [peak_mib(rule(compute, 1, length, 4, 8, 128)) for length in LENGTHS]
        print_row(f"{name}, 4 and 8 heads of 128", *peaks)
    for mode in ("none", "selective", "full"):
        peaks = []
        for length in LENGTHS:
            with make_engine(length, mode) as engine:
                tokens = torch.randint(0, 2048, (1, length))
                peaks.append(peak_mib(engine_step(engine, tokens, 128)))
        print_row(f"step, activation checkpointing {mode}", *peaks)


def main() -> None:
    parts = {"steps": show_steps, "rule": show_rules, "documents": show_documents}
    parts["memory"] = show_memory
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=parts, default=[*parts])
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print_header("what", "theirs (or the first), ms", "ours (or the second), ms", "ratio")
    for name in args.only:
        parts[name](args.turns)


if __name__ == "__main__":
    main()
