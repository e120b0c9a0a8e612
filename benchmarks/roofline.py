"""Bytes, FLOPs and launches of a training step on an H100, and the MFU that follows, without one.

    python benchmarks/roofline.py                  # Llama 1B and Qwen 0.6B: flex, two rows of 16k
    python benchmarks/roofline.py --models 1B --rows 1 --json out.json

Steps of the engine are trained on fake tensors (`tests/cuda_lowering`), with two and with three
layers; the difference, times the other layers, gives the model's. Each operator and each kernel
that inductor wrote counts what it has to read and write, and a matrix product its FLOPs. An
operator takes the longest of bytes / bandwidth, FLOPs / rate and the time of a launch. The rates are
assumptions, printed with the result; a kernel is assumed to reach them whatever its shape. What the
host does, and what could overlap, is left out: this predicts which costs are worth removing, and
a bound that a measurement may miss.
"""

# ruff: noqa: E402 (the device has to be there before torch)

import argparse
import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cuda_rehearsal.device import load_device, patch_cuda

load_device()

import torch
from torch import Tensor

from tests.cuda_lowering.target import patch_compiler
from tests.cuda_rehearsal import jobs, rehearsal
from torchtitan.protocols.train_spec import get_train_spec

BANDWIDTH = 2.8e12  # bytes/s, of 3.35e12
MATMUL_RATE = 650e12  # FLOP/s in bf16, of 989e12
# FLOP/s of flex attention by head size, counting the pairs that are needed: each needs one
# exponential, however many features it has.
FLEX_RATE = {64: 300e12, 128: 400e12}
LAUNCH = 2.5e-6  # seconds
PEAK = 989e12
MODELS = {"1B": ("llama3", "1B"), "0.6B": ("qwen3", "0.6B"), "30B-A3B": ("qwen3", "30B-A3B")}
SEQ_LEN, MEAN_DOCUMENT = 16384, 1024
N_WARM_UP = 2

_NO_TRAFFIC = ("aten::empty", "aten::new_empty", "aten::detach", "aten::alias", "prim::")
_BY_INDEX = {  # operators that read or write as much as they return
    "aten::index.Tensor", "aten::embedding", "aten::gather", "aten::index_select",
}  # fmt: skip


@dataclasses.dataclass
class Cost:
    launches: float = 0
    bytes: float = 0
    flops: float = 0
    seconds: float = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    def __mul__(self, factor: float) -> "Cost":
        return Cost(*(factor * value for value in _values(self)))


def _values(cost: Cost) -> tuple[float, ...]:
    return dataclasses.astuple(cost)


class Recorder:
    """costs: by what it is for. Nothing is recorded until `is_on`."""

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = defaultdict(Cost)
        self.is_on = False

    def operator(self, func, args, kwargs, out) -> None:
        name = func.name() if hasattr(func, "name") else str(func)
        if not self.is_on or getattr(func, "is_view", False) or name.startswith(_NO_TRAFFIC):
            return
        read = _on_device((args, kwargs))
        made = [x for x in _on_device(out) if all(x is not other for other in read)]
        if not read and not made:
            return
        written = _on_device([
            value
            for value, argument in _arguments(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ])  # fmt: skip
        if name in _BY_INDEX:
            n_bytes = 2 * _bytes(made)
        elif name.startswith(("aten::scatter", "aten::index_copy", "aten::index_add")):
            n_bytes = 2 * _bytes(_on_device(args[-1])) + _bytes(made)
        else:
            n_bytes = _bytes(read) + _bytes(made) + _bytes(written)
        if name.startswith(("aten::fill_", "aten::zero_")):
            n_bytes = _bytes(written)
        flops = 0
        if name.partition(".")[0] in ("aten::mm", "aten::addmm", "aten::addmm_"):
            a, b = [x for x in args if isinstance(x, Tensor)][-2:]
            flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
        elif name.startswith("aten::_grouped_mm"):
            flops = 2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[-1]
        self._add(_purpose(flops), n_bytes, flops)

    def kernel(self, name: str, args: tuple) -> None:
        if self.is_on:
            purpose = "flex attention" if "tem_fused" in name else "kernels in blocks and loss"
            self._add(purpose, _bytes(_on_device(args)))

    def _add(self, purpose: str, n_bytes: int, flops: int = 0) -> None:
        seconds = max(n_bytes / BANDWIDTH, flops / MATMUL_RATE, LAUNCH)
        self.costs[purpose] += Cost(1, n_bytes, flops, seconds)


def _purpose(flops: int) -> str:
    """By the innermost frame of the project, of FSDP, of the optimizer or of compiled code."""
    frame, purpose = sys._getframe(2), "other"
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torchtitan/loss/" in file:
            return "matmuls" if flops else "loss, one operator after the other"
        if "fsdp/_fully_shard" in file:
            return "FSDP's copies"
        if "torch/optim" in file:
            return "AdamW"
        if "clip_grad" in frame.f_code.co_name:
            return "norm of gradients"
        frame = frame.f_back
    return "matmuls" if flops else purpose


def _arguments(func, args, kwargs) -> Iterator[tuple]:
    schema = func._schema.arguments if hasattr(func, "_schema") else ()
    yield from zip(args, schema, strict=False)
    for argument in schema:
        if argument.name in kwargs:
            yield kwargs[argument.name], argument


def _on_device(values) -> list[Tensor]:
    return [x for x in rehearsal._tensors(values) if x.is_cuda]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def step_costs(model: str, rows: int, n_layers: int, target, overrides: list[str]) -> tuple:
    """Return (costs by purpose, (heads, sizes of query and value)) of a step."""
    family, flavor = MODELS[model]
    args = get_train_spec(family).model_args[flavor]
    recorder = Recorder()
    target.on_launch = recorder.kernel
    track = rehearsal.Rehearsal._track

    def noted(self, func, args, kwargs, out):
        recorder.operator(func, args, kwargs, out)
        return track(self, func, args, kwargs, out)

    flags = [
        f"--model.name={family}", f"--model.flavor={flavor}", "--model.attn_type=flex",
        "--model.attn_mask_type=block_causal", f"--training.seq_len={SEQ_LEN}",
        f"--training.local_batch_size={rows}", "--activation_checkpoint.mode=none",
        "--compile.enable", *overrides,
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with (
        mock.patch.object(rehearsal.Rehearsal, "_track", noted),
        mock.patch.object(args, "n_layers", n_layers),
        jobs.engine_of(1, *flags) as (engine, _),
    ):
        for step in range(N_WARM_UP + 1):
            tokens = torch.randint(1, 2000, (rows, SEQ_LEN), generator=generator)
            tokens[torch.rand(tokens.shape, generator=generator) < 1 / MEAN_DOCUMENT] = 0
            tokens = tokens.pin_memory()
            recorder.is_on = step == N_WARM_UP
            engine.forward_backward_step(
                input_dict={"input": tokens}, labels=tokens, global_valid_tokens=tokens.numel()
            )
            engine.optim_step()
        sizes = engine.model_args.n_heads, engine.model_args.head_dims
    return recorder.costs, sizes


def predict(model: str, rows: int, target, overrides: list[str]) -> dict:
    """Return the step's costs by purpose, and its time and MFU."""
    family, flavor = MODELS[model]
    n_layers = get_train_spec(family).model_args[flavor].n_layers
    (two, (n_heads, head_dims)), (three, _) = (
        step_costs(model, rows, n, target, overrides) for n in (2, 3)
    )
    costs = {
        purpose: two[purpose] + (three[purpose] + two[purpose] * -1) * (n_layers - 2)
        for purpose in sorted({*two, *three})
    }
    # A token sees MEAN_DOCUMENT keys on average: documents' lengths are drawn geometrically.
    pairs = rows * SEQ_LEN * MEAN_DOCUMENT
    # forward 2 and backward 4 per pair and feature of query or value
    needed = 6 * n_heads * head_dims * pairs * n_layers
    costs["flex attention"].seconds = needed * 7 / 6 / FLEX_RATE[head_dims // 2]
    total = sum(costs.values(), Cost())
    flops = total.flops + needed
    return {
        "model": model,
        "rows": rows,
        "costs": {purpose: dataclasses.asdict(cost) for purpose, cost in costs.items()},
        "seconds": total.seconds,
        "launches": total.launches,
        "mfu": flops / total.seconds / PEAK,
        "tokens_per_second": rows * SEQ_LEN / total.seconds,
    }


def show(result: dict) -> None:
    print(f"{result['model']}, {result['rows']} x {SEQ_LEN} tokens")
    for purpose, cost in result["costs"].items():
        print(
            f"  {purpose:36} {cost['launches']:7.0f} launches {cost['bytes'] / 1e9:8.1f} GB "
            f"{cost['flops'] / 1e12:7.1f} TFLOP {1e3 * cost['seconds']:7.1f} ms"
        )
    print(
        f"  {1e3 * result['seconds']:.1f} ms, {result['launches']:.0f} launches, "
        f"{result['tokens_per_second']:,.0f} tokens/s, MFU {100 * result['mfu']:.1f} %",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["1B", "0.6B"])
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--override", nargs="+", default=[], help="of the config, without --")
    parser.add_argument("--json", help="also write the results to this file")
    args = parser.parse_args()
    patch_cuda()
    rehearsal.patch_kernels()
    target = patch_compiler(compiles=False)
    print(
        f"assumed: {BANDWIDTH / 1e12} TB/s, matmuls {MATMUL_RATE / 1e12:.0f} TFLOP/s, flex "
        f"{' and '.join(f'{rate / 1e12:.0f}' for rate in FLEX_RATE.values())} TFLOP/s with heads of "
        f"{' and '.join(map(str, FLEX_RATE))}, {1e6 * LAUNCH} us a launch; peak {PEAK / 1e12:.0f} TFLOP/s"
    )
    overrides = [f"--{override}" for override in args.override]
    results = [predict(model, args.rows, target, overrides) for model in args.models]
    for result in results:
        show(result)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
