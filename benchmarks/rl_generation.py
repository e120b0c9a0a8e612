"""CPU-seconds of drawing completions as RL does, with and without the cache of keys and values.

    python benchmarks/rl_generation.py [--prompt-tokens 16] [--new-tokens 16] [--dim 128]
    python benchmarks/rl_generation.py --lengths [--new-tokens 256] [--sigma 1.0] [--rows 16 64]

256 completions by a Llama of two layers with random weights, fp32, one thread: of as many prompts,
of 16 prompts with 16 completions each, and of prompts that differ in length. Each is drawn five
times after one to warm up, and the fastest counts.

With --lengths, completions end at log-normal lengths, of a median of a sixteenth of the longest, and
--rows of them are in the cache at once: in portions, each of which begins when the last row of the one
before has ended, or each as soon as there is room. The two take turns; the fastest of each counts.
A row of a forward is spent if it is there, and useful if its token is in a completion.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from torchtitan.generation.kv_cache import CachedForward
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


def cpu_seconds(*ways: Callable[[], object]) -> list[float]:
    """Of each way, which take turns."""
    best = [float("inf")] * len(ways)
    for repeat in range(REPEATS + 1):
        for i, run in enumerate(ways):
            started = time.process_time()
            run()
            if repeat > 0:
                best[i] = min(best[i], time.process_time() - started)
    return best


def count_rows() -> list[int]:
    """Return a list that gets the rows of every later forward of one token, and 0 for others."""
    spent: list[int] = []
    call = CachedForward.__call__

    def counting(self: CachedForward, tokens: torch.Tensor, *args: Any, **options: Any) -> Any:
        spent.append(len(tokens) if tokens.shape[1] == 1 else 0)
        return call(self, tokens, *args, **options)

    CachedForward.__call__ = counting
    return spent


def compare_lengths(args: argparse.Namespace) -> None:
    n_new, stop, rng = args.new_tokens, VOCAB - 1, random.Random(0)
    model = toy_model(args.dim, args.prompt_tokens + n_new)
    decoder, spent = LocalDecoder.from_model(model), count_rows()
    sampling = SamplingConfig(max_tokens=n_new, stop_token_ids=(stop,))
    lengths = [
        min(n_new, 1 + round(n_new / 16 * rng.lognormvariate(0, args.sigma))) for _ in range(N_ROWS)
    ]
    # The numbers decide where the last token of the vocabulary, which ends a row, is drawn.
    uniform = 0.8 * torch.rand(N_ROWS, n_new, dtype=torch.float64)
    uniform[range(N_ROWS), [length - 1 for length in lengths]] = 1 - 2**-53
    prompts = torch.randint(VOCAB, (N_ROWS // args.samples, args.prompt_tokens)).tolist()
    prompt_of_row = [row // args.samples for row in range(N_ROWS)]

    def draw(portion: int, max_rows: int) -> list[int]:
        found = []
        for first in range(0, N_ROWS, portion):
            rows = slice(first, first + portion)
            of_rows = prompt_of_row[rows]
            found += continue_prompts(decoder, prompts, of_rows, uniform[rows], sampling, max_rows)
        return [len(row.tokens) for row in found]

    n_useful = sum(lengths) - N_ROWS  # the first token of each comes with its prompt
    print(f"{N_ROWS} completions, mean {sum(lengths) / N_ROWS:.0f}, longest {max(lengths)} tokens")
    for n_rows in args.rows:
        ways = {
            "in portions": lambda n=n_rows: draw(n, 0),
            "as soon as there is room": lambda n=n_rows: draw(N_ROWS, n),
        }
        for (name, run), seconds in zip(ways.items(), cpu_seconds(*ways.values()), strict=True):
            spent.clear()
            assert run() == lengths
            print(
                f"{n_rows:4} rows {name:25} {len(spent):5} forwards, "
                f"{sum(spent) / n_useful:5.2f} rows spent per useful one, {seconds:6.3f} CPU-s, "
                f"{sum(lengths) / seconds:8,.0f} new tokens/s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--lengths", action="store_true")
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--samples", type=int, default=16, help="of each prompt")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64])
    args = parser.parse_args()
    args.new_tokens = args.new_tokens or (256 if args.lengths else 16)
    torch.set_num_threads(1)
    if args.lengths:
        return compare_lengths(args)
    n_prompt, n_new = args.prompt_tokens, args.new_tokens
    model = toy_model(args.dim, n_prompt + n_new)
    decoder, sampling = LocalDecoder.from_model(model), SamplingConfig(max_tokens=n_new)
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
        (seconds,) = cpu_seconds(run)
        speed = N_ROWS * n_new / seconds
        print(f"{name:40} {seconds:6.3f} CPU-s {speed:8,.0f} new tokens/s")


if __name__ == "__main__":
    main()
