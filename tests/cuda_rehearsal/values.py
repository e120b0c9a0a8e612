"""Run tests on a CUDA device that exists only here, whose tensors have values.

    python -m pytest -p tests.cuda_rehearsal.values tests/unit/test_engine.py

`rehearsal.py` has fake tensors, and makes up what the host reads of them. Here a tensor "on cuda"
holds one on the CPU, and each operator runs on what its tensors hold: tests that compare numbers
run, and one that brings a tensor of the host together with one of the device fails as on CUDA.

Not covered: what CUDA's kernels round, generators of the device, FSDP and pinned memory. A test
that compiles is skipped.
"""

# ruff: noqa: E402 (the device has to be there before torch)

import types
from typing import Any
from unittest import mock

from tests.cuda_rehearsal.device import load_device, patch_cuda

load_device()

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

patch_cuda()

CUDA = torch.device("cuda", 0)
_FAKE = torch._C._TorchDispatchModeKey.FAKE
# Copies between the two, and indices, which CUDA takes from the host as well.
MAY_MIX = {"copy_", "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on CUDA; `held` has its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "DeviceTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=CUDA,
        )
        tensor.held = held
        return tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict, _meta: None, _size: Any, _stride: Any) -> "DeviceTensor":
        return DeviceTensor(inner["held"])

    def tolist(self) -> Any:  # torch refuses subclasses
        return self.held.tolist()

    def numpy(self, *_args: Any, **_kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def __reduce_ex__(self, _protocol: int) -> Any:
        return _rebuild, (self.held.detach(), self.requires_grad)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        if id(self) not in memo:
            copied = DeviceTensor(self.held.detach().clone())
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, types, args, kwargs or {})


def _rebuild(held: torch.Tensor, requires_grad: bool) -> DeviceTensor:
    return DeviceTensor(held).requires_grad_(requires_grad)


class Values(TorchDispatchMode):
    """Inside, what is made on "cuda" is a DeviceTensor."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, types, args, kwargs or {})


def _run(func, types, args, kwargs):
    if any(issubclass(t, DTensor) for t in types):
        return NotImplemented
    if torch._C._get_dispatch_mode(_FAKE) is not None:
        return func(*args, **kwargs)
    leaves = pytree.tree_leaves((args, kwargs))
    on_device = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    operator = func.name() if isinstance(func, torch._ops.OpOverload) else str(func)
    name = operator.rpartition("::")[2].partition(".")[0]
    if name == "set_":
        return func(*args, **kwargs)
    if on_device and name not in MAY_MIX:
        _check_devices(leaves, operator)

    stays = bool(on_device)
    if kwargs.get("device") is not None:
        stays = torch.device(kwargs["device"]).type == "cuda"
    held_args, held_kwargs = pytree.tree_map(_held, (args, kwargs))
    out = func(*held_args, **held_kwargs)
    if not stays:  # a copy to the host, of what the device may change afterwards
        return out.clone() if any(out is tensor.held for tensor in on_device) else out

    wrappers = {id(tensor.held): tensor for tensor in on_device}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, DeviceTensor):
            return value
        return wrappers[id(value)] if id(value) in wrappers else DeviceTensor(value)

    out = pytree.tree_map(wrapped, out)
    is_view = on_device and isinstance(func, torch._ops.OpOverload)
    if is_view and name not in ("_to_copy", "clone"):
        return return_and_correct_aliasing(func, args, kwargs, out)
    return out


def _held(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.held
    is_cuda = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if is_cuda else value


def _check_devices(leaves: list[Any], operator: str) -> None:
    for leaf in leaves:
        # A single number may be the host's.
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.device.type == "cpu":
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! ({operator})"
            )


# ---- what is compiled or communicates elsewhere ----


def _flex(q, k, v, *, score_mod, block_mask, scale, return_aux, enable_gqa):
    """By the mask written out from its mask function."""
    assert score_mod is None
    row = torch.arange(q.shape[0], device=q.device)[:, None, None, None]
    column = torch.arange(q.shape[2], device=q.device)
    allowed = block_mask.mask_mod(row, row, column[:, None], column)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q.float() @ k.float().mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~allowed, float("-inf"))
    out = (scores.softmax(-1) @ v.float()).to(v.dtype)
    return (out, types.SimpleNamespace(lse=scores.logsumexp(-1))) if return_aux else out


def _varlen(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    from torchtitan.models.attention_cpu import document_attention

    if q.dtype == torch.float32:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    window = None if window_size[0] < 0 else window_size[0] + 1
    return document_attention(q, k, v, cu_seq_q, cu_seq_k, scale, window)[0]


def pytest_configure() -> None:
    from torchtitan import rank_layout
    from torchtitan.distributed.processes import process_group
    from torchtitan.models.attention import FlexAttentionWrapper, VarlenAttentionWrapper

    FlexAttentionWrapper._compiled_flex_attn = staticmethod(_flex)
    VarlenAttentionWrapper._compiled_varlen_attn = staticmethod(_varlen)
    # Gloo communicates what the tensors hold.
    initialize = dist.init_process_group

    def with_gloo(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        initialize("gloo", *args, **kwargs)

    dist.Backend.default_device_backend_map["cuda"] = "gloo"
    dist.init_process_group = dist.distributed_c10d.init_process_group = with_gloo
    process_group._check_existing_group = lambda *_: None
    # FSDP resizes storages, which these tensors don't have.
    join_ranks = rank_layout.join_ranks

    def join_without_fsdp(*args: Any) -> Any:
        with mock.patch.object(rank_layout, "is_fsdp_wanted_always", lambda *_: False):
            return join_ranks(*args)

    rank_layout.join_ranks = join_without_fsdp
    torch.compile = lambda *_args, **_kwargs: pytest.skip("compiles, which needs a real device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    with Values():
        return (yield)
