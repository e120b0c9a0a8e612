"""Compile flash-linear-attention's kernels of the gated delta rule for an H100, without one.

python -m tests.cuda_lowering.fla_kernels     # a line of JSON for each kernel, in its first configuration
"""

import contextlib
import json
import sys
import types
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from tests.cuda_lowering import target


def patch_device() -> None:
    """fla asks torch for the card. Tensors stay on the CPU, because no kernel is launched."""
    card = types.SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, warp_size=32,
        total_memory=80 * 2**30, shared_memory_per_block_optin=target.SHARED_MEMORY,
    )  # fmt: skip
    answers = dict(
        get_device_properties=card, get_device_name=card.name, get_device_capability=(9, 0),
        is_available=True, device_count=1, current_device=0, set_device=None,
    )  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    torch.version.cuda = "13.0"
    triton.runtime.driver.set_active(target._driver())


def compile_launches(found: dict[str, dict[str, Any]]) -> None:
    """From now on a launch compiles its kernel, and does nothing else."""
    run = JITFunction.run

    def compile_kernel(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = run(kernel, *args, grid=(1,), warmup=True, **options)
        registers, stack = target._usage(compiled.asm["cubin"])
        numbers = dict(registers=registers, stack=stack, shared=compiled.metadata.shared)
        found[kernel.__name__] = {"name": kernel.__name__, **numbers}

    def choose_first(tuner: Any, *args: Any, **options: Any) -> None:
        tuner.fn.run(*args, **options | tuner.configs[0].all_kwargs())

    JITFunction.run, Autotuner.run = compile_kernel, choose_first


def main() -> None:
    patch_device()
    found: dict[str, dict[str, Any]] = {}
    compile_launches(found)
    from torchtitan.numerics import delta_rule_fla

    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 128), (2, 128), (4, 128), (4,), (4,)]
    q, k, v, g, beta = (torch.rand(1, 256, *s, generator=generator).bfloat16() for s in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v, -g.float(), beta)]
    out = delta_rule_fla.gated_delta_rule(*inputs, torch.tensor([0, 100, 256]))
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    for kernel in found.values():
        print(json.dumps(kernel))


if __name__ == "__main__":
    sys.exit(main())
