"""Generating with the cache of keys and values against a whole forward for each token.

    python benchmarks/generation.py [--new-tokens 128] [--prompt-tokens 16] [--batch-size 1]

The debug model, random weights, fp32, the likeliest token each time. Both ways run in turns,
three times after one to warm up, and the fastest of each counts; the ratio is of one run. On a
CPU one thread's CPU-seconds are counted, so other load disturbs little. Ends with an error if the
texts differ.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from torchtitan.generation.sampling import generate, generate_next_token
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.utils import get_device_type

REPEATS = 3


@torch.no_grad()
def debug_model(max_length: int, device: torch.device) -> nn.Module:
    spec = get_train_spec("llama3")
    args = copy.deepcopy(spec.model_args["debugmodel"])
    args.max_seq_len = max_length
    torch.manual_seed(0)
    with device:
        model = spec.model_cls(args)
    model.init_weights()
    return model


@torch.no_grad()
def generate_uncached(model: nn.Module, tokens: Tensor, n_new: int) -> Tensor:
    for _ in range(n_new):
        tokens = torch.cat((tokens, generate_next_token(model, tokens, temperature=0)), dim=1)
    return tokens


def seconds_and_text(run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    clock = time.process_time if get_device_type() == "cpu" else time.perf_counter
    started = clock()
    text = run().cpu()  # which waits for the device
    return clock() - started, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(get_device_type())
    model = debug_model(args.prompt_tokens + args.new_tokens, device)
    shape = (args.batch_size, args.prompt_tokens)
    prompt = torch.randint(0, model.vocab_size, shape, device=device)
    ways: dict[str, Callable[[], Tensor]] = {
        "cached": lambda: generate(model, prompt, max_new_tokens=args.new_tokens, temperature=0),
        "uncached": lambda: generate_uncached(model, prompt, args.new_tokens),
    }
    best = dict.fromkeys(ways, float("inf"))
    texts: dict[str, Tensor] = {}
    for repeat in range(REPEATS + 1):
        for name, run in ways.items():
            seconds, texts[name] = seconds_and_text(run)
            if repeat > 0:
                best[name] = min(best[name], seconds)
    if not torch.equal(texts["cached"], texts["uncached"]):
        raise SystemExit("the texts differ")
    for name, seconds in best.items():
        print(f"{name:9} {1e3 * seconds / args.new_tokens:7.2f} ms per token on {device}")
    print(
        f"{args.new_tokens} tokens after {args.prompt_tokens}, {args.batch_size} row(s): "
        f"{best['uncached'] / best['cached']:.1f}x faster with the cache"
    )


if __name__ == "__main__":
    main()
