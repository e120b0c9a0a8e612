"""CPU-seconds of drawing completions as RL does, with and without the cache of keys and values.

    python benchmarks/rl_generation.py [--prompt-tokens 16] [--new-tokens 16] [--dim 128]

256 completions by a Llama of two layers with random weights, fp32, one thread: of as many prompts,
of 16 prompts with 16 completions each, and of prompts that differ in length. Each is drawn five
times after one to warm up, and the fastest counts.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.rl.decoding import LocalDecoder, continue_prompts
from torchtitan.rl.types import SamplingConfig

REPEATS = 5
N_ROWS = 256
VOCAB = 32


@torch.no_grad()
def toy_model(dim: int, max_length: int) -> Transformer:
    torch.manual_seed(0)
    sizes = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "multiple_of": 32}
    args = TransformerModelArgs(dim=dim, vocab_size=VOCAB, max_seq_len=max_length, **sizes)
    model = Transformer(args)
    model.init_weights()
    return model


@torch.no_grad()
def draw_uncached(model: Transformer, prompts: list[list[int]], n_new: int) -> None:
    tokens = torch.tensor(prompts)
    for _ in range(n_new):
        probs = model(tokens)[:, -1].softmax(dim=-1)
        tokens = torch.cat((tokens, probs.multinomial(1)), dim=1)


def cpu_seconds(run: Callable[[], object]) -> float:
    best = float("inf")
    for repeat in range(REPEATS + 1):
        started = time.process_time()
        run()
        if repeat > 0:
            best = min(best, time.process_time() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    args = parser.parse_args()
    torch.set_num_threads(1)
    n_prompt, n_new = args.prompt_tokens, args.new_tokens
    model = toy_model(args.dim, n_prompt + n_new)
    decoder, sampling = LocalDecoder.of_model(model), SamplingConfig(max_tokens=n_new)
    uniform = torch.rand(N_ROWS, n_new, dtype=torch.float64)

    def drawing(n_prompts: int, shorter: int = 0) -> Callable[[], object]:
        lengths = [n_prompt - i % (shorter + 1) for i in range(n_prompts)]
        prompts = [torch.randint(VOCAB, (length,)).tolist() for length in lengths]
        rows = [row * n_prompts // N_ROWS for row in range(N_ROWS)]
        return lambda: continue_prompts(decoder, prompts, rows, uniform, sampling, 0)

    whole = torch.randint(VOCAB, (N_ROWS, n_prompt)).tolist()
    ways = {
        "256 prompts": drawing(N_ROWS),
        "256 prompts of 4 lengths": drawing(N_ROWS, shorter=3),
        "16 prompts, 16 completions each": drawing(16),
        "256 prompts, a whole forward per token": lambda: draw_uncached(model, whole, n_new),
    }
    print(f"{N_ROWS} completions, {n_prompt}+{n_new} tokens, dim {args.dim}, 1 thread")
    for name, run in ways.items():
        seconds = cpu_seconds(run)
        speed = N_ROWS * n_new / seconds
        print(f"{name:40} {seconds:6.3f} CPU-s {speed:8,.0f} new tokens/s")


if __name__ == "__main__":
    main()
