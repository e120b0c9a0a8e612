"""Inductor's kernels of a block, run on numbers of the CPU by Triton's interpreter.

python -m tests.cuda_lowering.interpret                # all blocks: relative differences to eager
python -m tests.cuda_lowering.interpret "llama3"

The block is compiled on fake tensors of the device. What its two graphs launch is then run again on
tensors that have numbers: Triton's kernels, flex attention with the mask of documents among them,
by the interpreter, and matrix products by torch. fp32, as the interpreter's products in bf16 are
wrong (triton 3.7.1).
"""

# ruff: noqa: E402 (the device has to be there before torch)

import copy
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from torchtitan.estimate.device import load_device, patch_cuda

load_device()

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.cuda_lowering import target
from tests.cuda_rehearsal.records import print_records
from torchtitan.batch.documents import document_starts
from torchtitan.batch.mask import DocumentMask, map_masks
from torchtitan.protocols.train_spec import get_train_spec

# name -> (family, layer, sizes of the debug model that differ); the lengths are of one row
_HEADS = {"n_heads": 2, "n_kv_heads": 1}
BLOCKS = {
    "llama3": ("llama3", 0, {"dim": 128, **_HEADS}),
    "qwen3": ("qwen3", 0, {"dim": 128, "head_dim": 64, "hidden_dim": 256, **_HEADS}),
    "gpt_oss": ("gpt_oss", 0, {"dim": 128, "head_dim": 64, **_HEADS}),
    "deepseek_v3": ("deepseek_v3", 1, {}),
    "llama4": ("llama4", 1, {"dim": 128, **_HEADS}),
}
LENGTHS = [70, 1, 89]  # of documents, in two blocks of which the second is not full
_BLOCK_MASK = """
    kv_num_blocks kv_indices full_kv_num_blocks full_kv_indices
    q_num_blocks q_indices full_q_num_blocks full_q_indices
""".split()


def differences(name: str) -> dict[str, float]:
    """Return |interpreted - eager| / |eager| of the output and of each gradient."""
    torch._dynamo.reset()
    target.allocate_on("cuda")
    (family, layer, sizes), seq_len = BLOCKS[name], sum(LENGTHS)
    spec = get_train_spec(family)
    args = copy.deepcopy(spec.model_args["debugmodel"])
    for key, value in (sizes | {"attn_type": "flex", "attn_mask_type": "block_causal"}).items():
        assert hasattr(args, key), key
        setattr(args, key, value)
    args.n_layers, args.max_seq_len = layer + 1, seq_len
    torch.manual_seed(0)
    real = spec.model_cls(args)
    real.init_weights()
    _randomize(real)
    rope = real.build_rope_table(seq_len)[None]
    lengths = torch.tensor(LENGTHS)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None].int()
    starts = document_starts(ids)
    x, grad = torch.randn(2, 1, seq_len, args.dim)

    block = real.layers[str(layer)]
    x.requires_grad_()
    expected = block(x, rope, real._lowered_masks(DocumentMask(starts)))
    expected.backward(grad)

    numbers = {"x": x, "rope": rope, "starts": starts, "grad": grad}
    graphs, twins = _compile(spec.model_cls, args, layer, numbers)
    _give_numbers(twins, real, numbers)
    results = _run(graphs, twins, grad)
    wanted = {"output": expected, "x": x.grad} | {n: p.grad for n, p in block.named_parameters()}
    return {
        name: ((results[name] - value).norm() / value.norm()).item()
        for name, value in wanted.items()
        if value is not None
    }


def _randomize(model: nn.Module) -> None:
    """Initial weights of 1 and 0 would hide factors and terms."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)


class _Twins:
    """Fake tensors of the device, and the tensors with numbers that stand for them."""

    def __init__(self) -> None:
        self.fakes: dict[str, Tensor] = {}
        self._real: dict[int, Tensor] = {}

    def pair(self, fake: Tensor, real: Tensor) -> None:
        self._real[fake.untyped_storage()._cdata] = real.detach()

    def real(self, fake: object) -> object:
        if not isinstance(fake, Tensor):
            return fake
        found = self._real[fake.untyped_storage()._cdata]
        if found.is_complex() and not fake.dtype.is_complex:
            found = torch.view_as_real(found)
        return found.contiguous().as_strided(fake.size(), fake.stride())


def _compile(model_cls, args, layer, numbers) -> tuple[list, _Twins]:
    """Return (forward, backward) as (code, inputs) each, and the fake tensors by name."""
    from torch._inductor.output_code import CompiledFxGraph

    graphs, call = [], CompiledFxGraph.__call__

    def noted(graph, inputs):
        graphs.append((graph.current_callable, list(inputs)))
        return call(graph, inputs)

    CompiledFxGraph.__call__ = noted
    twins = _Twins()
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            model = model_cls(args)
        fakes = {name: torch.empty_like(v, device="cuda") for name, v in numbers.items()}
        fakes["x"] = fakes["x"].detach().requires_grad_()
        masks = model._lowered_masks(DocumentMask(fakes["starts"]))
        block = torch.compile(model.layers[str(layer)], fullgraph=True)
        block(fakes["x"], fakes["rope"], masks).backward(fakes["grad"])
    twins.fakes = fakes | {"masks": masks, "model": model}
    assert len(graphs) == 2, f"{len(graphs)} graphs in place of forward and backward"
    return graphs, twins


def _give_numbers(twins, real, numbers) -> None:
    for name, value in numbers.items():
        twins.pair(twins.fakes[name], value)
    fake_model, starts = twins.fakes["model"], numbers["starts"]
    real_state = dict([*real.named_parameters(), *real.named_buffers()])
    for name, tensor in [*fake_model.named_parameters(), *fake_model.named_buffers()]:
        twins.pair(tensor, real_state[name])
    # As on the device: on the CPU `lower` would make another kind of mask.
    masks = map_masks(lambda mask: mask.block_mask(), real.layer_masks(DocumentMask(starts)))
    pairs = [(twins.fakes["masks"], masks)]
    if isinstance(masks, dict):
        pairs = [(twins.fakes["masks"][name], mask) for name, mask in masks.items()]
    for fake, mask in pairs:
        twins.pair(fake.starts, starts)
        for name in _BLOCK_MASK:
            twins.pair(getattr(fake.lowered, name), getattr(mask, name))
        twins.pair(fake.lowered.mask_mod.starts, starts)


def _run(graphs: list, twins: _Twins, grad: Tensor) -> dict[str, Tensor]:
    """Return the output, and the gradients of x and of the block's parameters, by name."""
    (forward, inputs), (backward, backward_inputs) = graphs
    target.allocate_on("cpu")
    output, *saved = forward([twins.real(fake) for fake in inputs])
    given = [*saved, grad]
    for value, fake in zip(given, backward_inputs, strict=True):
        assert not isinstance(fake, Tensor) or value.shape == fake.shape, "saved in another order"
    results = {"output": output}
    block = [*twins.fakes["model"].layers.values()][-1]
    names = {p.untyped_storage()._cdata: name for name, p in block.named_parameters()}
    names[twins.fakes["x"].untyped_storage()._cdata] = "x"
    for fake, gradient in zip(inputs, backward(given), strict=False):
        if isinstance(gradient, Tensor):
            results[names[fake.untyped_storage()._cdata]] = gradient
    return results


def main() -> None:
    patch_cuda()
    target.patch_compiler(compiles=False)
    target.let_interpreter_compute()
    print_records(sys.argv[1:] or BLOCKS, lambda name: {"differences": differences(name)})


if __name__ == "__main__":
    main()
