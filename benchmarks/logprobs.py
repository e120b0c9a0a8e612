"""Peak memory and time of log-probs: chunked in a head, from whole logits, and as torch does it.

    python benchmarks/logprobs.py [--tokens 8192] [--vocab 131072] [--dim 256] [--entropy]

Each way runs in a process of its own: a forward without gradients, then forward and backward.
Memory is what the peak adds to what hidden states, weight and labels take. On a CPU that is
resident memory, and time is CPU-seconds of one thread; "ratio" is to the first way. Ends with an
error if the ways give different losses or gradients.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from common import GIB, clock, print_header, print_row, status_bytes
from torch import Tensor
from torch.nn import functional as F

from torchtitan.loss.logprobs import TokenLogProbs, TokenOutputs, token_logprobs
from torchtitan.tools.utils import get_device_type


def chunked(h: Tensor, weight: Tensor, labels: Tensor, entropy: bool) -> TokenOutputs:
    return TokenLogProbs(entropy=entropy)(h, weight, labels=labels)


def whole_logits(h: Tensor, weight: Tensor, labels: Tensor, entropy: bool) -> TokenOutputs:
    return token_logprobs(F.linear(h, weight), labels, entropy=entropy)


def log_softmax(h: Tensor, weight: Tensor, labels: Tensor, entropy: bool) -> TokenOutputs:
    log_probs = torch.log_softmax(F.linear(h, weight).float(), dim=-1)
    chosen = log_probs.gather(-1, labels[..., None]).squeeze(-1)
    return TokenOutputs(chosen, -(log_probs.exp() * log_probs).sum(-1) if entropy else None)


WAYS = {"chunked": chunked, "token_logprobs": whole_logits, "log_softmax": log_softmax}


def measured(run: Callable[[], list[float]], device: str) -> dict:
    """GiB that the peak of `run` adds, its seconds, and what it returns."""
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = status_bytes("VmRSS")
    else:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    started = clock()
    values = run()
    seconds = clock() - started
    peak = status_bytes("VmHWM") if device == "cpu" else torch.cuda.max_memory_allocated()
    return {"gib": (peak - before) / GIB, "seconds": seconds, "values": values}


def run_way(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    device = get_device_type()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    h = torch.randn(1, args.tokens, args.dim, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(args.vocab, args.dim, device=device, dtype=dtype) / math.sqrt(args.dim)
    weight.requires_grad_()
    labels = torch.randint(args.vocab, (1, args.tokens), device=device)

    def forward(h: Tensor, labels: Tensor) -> Tensor:
        outputs = WAYS[args.way](h, weight, labels, args.entropy)
        loss = -outputs.logprobs.sum()
        return loss if outputs.entropy is None else loss - outputs.entropy.sum()

    def forward_only() -> list[float]:
        with torch.no_grad():
            return [forward(h, labels).item()]

    def forward_backward() -> list[float]:
        loss = forward(h, labels)
        loss.backward()
        return [loss.item(), h.grad.norm().item(), weight.grad.norm().item()]

    forward(h[:, :8], labels[:, :8]).backward()
    h.grad = weight.grad = None
    results = {"forward": measured(forward_only, device)}
    results["forward and backward"] = measured(forward_backward, device)
    print(json.dumps(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--entropy", action="store_true")
    parser.add_argument("--way", choices=WAYS, help="run this one alone, and print JSON")
    args = parser.parse_args()
    if args.way:
        return run_way(args)
    results = {}
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], f"--way={way}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        results[way] = json.loads(child.stdout)
    print(f"logits in fp32 are {args.tokens * args.vocab * 4 / GIB:.2f} GiB")
    print_header("part", "way", "GiB", "ratio", "seconds", "ratio")
    for part, first in results["chunked"].items():
        for way in WAYS:
            gib, seconds, values = results[way][part].values()
            ratios = f"{gib / first['gib']:.1f}", f"{seconds / first['seconds']:.2f}"
            print_row(part, way, f"{gib:.2f}", ratios[0], f"{seconds:.1f}", ratios[1])
            for value, expected in zip(values, first["values"], strict=True):
                if not math.isclose(value, expected, rel_tol=1e-3):
                    sys.exit(f"{way} and chunked differ: {values}, {first['values']}")


if __name__ == "__main__":
    main()
