"""CPU-seconds of drawing completions as RL does, with and without the cache of keys and values.

    python benchmarks/rl_generation.py [--prompt-tokens 16] [--new-tokens 16] [--dim 128]
    python benchmarks/rl_generation.py --lengths [--new-tokens 256] [--sigma 1.0] [--rows 16 64]

256 completions by a Llama of two layers with random weights, fp32, one thread: of as many prompts,
of 16 prompts with 16 completions each, and of prompts that differ in length. Each is drawn five
times after one to warm up, and the fastest counts.

With --lengths, completions end at log-normal lengths, of a median of a sixteenth of the longest, and
--rows of them are in the cache at once: in portions, each of which begins when the last row of the one
before has ended, or each as soon as there is room.
"""

import argparse
import random
from functools import partial

import torch
from common import print_header, print_row, take_turns

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


def compare_lengths(args: argparse.Namespace) -> None:
    n_new, stop, rng = args.new_tokens, VOCAB - 1, random.Random(0)
    decoder = LocalDecoder.from_model(toy_model(args.dim, args.prompt_tokens + n_new))
    sampling = SamplingConfig(max_tokens=n_new, stop_token_ids=(stop,))
    lengths = [
        min(n_new, 1 + round(n_new / 16 * rng.lognormvariate(0, args.sigma))) for _ in range(N_ROWS)
    ]
    # The numbers decide where the last token of the vocabulary, which ends a row, is drawn.
    uniform = 0.8 * torch.rand(N_ROWS, n_new, dtype=torch.float64)
    uniform[range(N_ROWS), [length - 1 for length in lengths]] = 1 - 2**-53
    prompts = torch.randint(VOCAB, (N_ROWS // args.samples, args.prompt_tokens)).tolist()
    prompt_of_row = [row // args.samples for row in range(N_ROWS)]

    def draw(portion: int, max_rows: int) -> None:
        found = []
        for first in range(0, N_ROWS, portion):
            rows = slice(first, first + portion)
            of_rows = prompt_of_row[rows]
            drawn = continue_prompts(decoder, prompts, of_rows, uniform[rows], sampling, max_rows)
            found += [len(row.token_ids) for row in drawn]
        assert found == lengths

    print(f"{N_ROWS} completions, mean {sum(lengths) / N_ROWS:.0f}, longest {max(lengths)} tokens")
    print_header("rows", "in portions, CPU-s", "as soon as there is room", "ratio")
    for n in args.rows:
        ways = partial(draw, n, 0), partial(draw, N_ROWS, n)
        portions, filled = (min(times) for times in take_turns(*ways, turns=REPEATS))
        print_row(n, f"{portions:.3f}", f"{filled:.3f}", f"{portions / filled:.2f}")


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

    def draw(n_prompts: int, shorter: int = 0) -> None:
        lengths = [n_prompt - i % (shorter + 1) for i in range(n_prompts)]
        prompts = [torch.randint(VOCAB, (length,)).tolist() for length in lengths]
        rows = [row * n_prompts // N_ROWS for row in range(N_ROWS)]
        continue_prompts(decoder, prompts, rows, uniform, sampling, 0)

    whole = torch.randint(VOCAB, (N_ROWS, n_prompt)).tolist()
    ways = {
        "256 prompts": partial(draw, N_ROWS),
        "256 prompts of 4 lengths": partial(draw, N_ROWS, shorter=3),
        "16 prompts, 16 completions each": partial(draw, 16),
        "256 prompts, a whole forward per token": partial(draw_uncached, model, whole, n_new),
    }
    print_header(f"{N_ROWS} completions, {n_prompt} + {n_new} tokens", "CPU-s", "new tokens/s")
    for name, run in ways.items():
        seconds = min(take_turns(run, turns=REPEATS)[0])
        print_row(name, f"{seconds:.3f}", f"{N_ROWS * n_new / seconds:,.0f}")


if __name__ == "__main__":
    main()
