"""What bf16 costs on this CPU: a linear layer, forward and backward, next to fp32.

    python benchmarks/bf16_on_cpu.py [--tokens 256] [--repeats 5]

"torch" is what torch does by itself, "ours" the layers of our models. CPU time of one thread, the
least of all repeats, taken in turns in one run; figures are ratios to fp32.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchtitan.numerics.linear import Linear, cpu_multiplies_bf16

SHAPES = [(256, 256), (256, 768), (256, 2048)]


def step_of(layer: nn.Linear, dtype: torch.dtype, n_tokens: int) -> Callable[[], None]:
    layer = layer.to(dtype)
    x = torch.randn(n_tokens, layer.in_features, dtype=dtype, requires_grad=True)
    grad: Tensor = torch.randn(n_tokens, layer.out_features, dtype=dtype)
    return lambda: layer(x).backward(grad)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.tokens} tokens; this CPU has bf16 instructions: {cpu_multiplies_bf16()}")
    print(f"{'in':>5} {'out':>5} {'fp32 ms':>9} {'bf16 torch':>11} {'bf16 ours':>10}")
    for shape in SHAPES:
        steps = {
            "fp32": step_of(nn.Linear(*shape), torch.float32, args.tokens),
            "torch": step_of(nn.Linear(*shape), torch.bfloat16, args.tokens),
            "ours": step_of(Linear(*shape), torch.bfloat16, args.tokens),
        }
        least = dict.fromkeys(steps, float("inf"))
        for _ in range(args.repeats):
            for name, step in steps.items():
                start = time.process_time()
                step()
                least[name] = min(least[name], time.process_time() - start)
        fp32 = least["fp32"]
        ratios = f"{least['torch'] / fp32:10.1f}x {least['ours'] / fp32:9.1f}x"
        print(f"{shape[0]:5} {shape[1]:5} {fp32 * 1e3:9.2f} {ratios}", flush=True)


if __name__ == "__main__":
    main()
