"""Time of the experts of one layer, forward and backward: in one grouped kernel against a loop.

    python benchmarks/experts.py [--device cuda --dtype bfloat16]

Prints the median times, and how many times as fast the grouped kernel is. Both are measured in
turns in one run, with one thread on a CPU. Every fourth expert gets no token.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from torchtitan.models.moe import GroupedExperts


def measure(experts: GroupedExperts, x: torch.Tensor, counts: torch.Tensor) -> float:
    # CPU-seconds, since other load disturbs them little; on a GPU the host only waits.
    clock = time.process_time if x.device.type == "cpu" else time.perf_counter
    start = clock()
    experts(x, counts).backward(x)
    if x.device.type != "cpu":
        torch.accelerator.synchronize()
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--hidden_dim", type=int, default=256)
    parser.add_argument("--num_experts", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--num_tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    print("experts  loop (ms)  grouped (ms)  loop / grouped")
    for num_experts in args.num_experts:
        torch.manual_seed(0)
        layers = {}
        for grouped in (False, True):
            experts = GroupedExperts(args.dim, args.hidden_dim, num_experts, grouped)
            with torch.no_grad():
                experts.init_weights(0.02)
            layers[grouped] = experts.to(args.device, dtype)
        busy = torch.arange(num_experts) % 4 != 3
        ids = busy.nonzero().flatten()[torch.randint(int(busy.sum()), (args.num_tokens,))]
        counts = torch.bincount(ids, minlength=num_experts).to(args.device)
        x = torch.randn(args.num_tokens, args.dim, device=args.device, dtype=dtype)
        times: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(args.repeats + 1):
            for grouped, experts in layers.items():
                seconds = measure(experts, x, counts)
                if repeat:  # the first is for warming up
                    times[grouped].append(seconds)
        loop, grouped_mm = (1e3 * statistics.median(times[grouped]) for grouped in (False, True))
        print(
            f"{num_experts:7}  {loop:9.1f}  {grouped_mm:12.1f}  {loop / grouped_mm:14.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
