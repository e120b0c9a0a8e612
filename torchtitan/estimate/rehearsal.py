"""The dispatch mode in which tensors on "cuda" are fake and all other tensors are real.

It raises if an operator mixes tensors of host and device. `waits` counts the places where the host
waits for the device or copies from pageable memory. `races` counts the places where a stream or the
host uses memory that another stream may still be using.

Not covered: kernels and their limits, device memory, NCCL.
"""

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper
from torch.utils._pytree import tree_iter

from torchtitan.estimate import device

aten = torch.ops.aten

READS = {aten._local_scalar_dense.default, aten.equal.default}
SIZED_BY_VALUES = {
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten.masked_select.default,
    aten._unique2.default,
}
_FAKE = torch._C._TorchDispatchModeKey.FAKE

# Reads from the device return made-up values: 1 for a number, zeros for a copied tensor. These functions of
# torchtitan need another value: function's name -> function from its local variables to the value.
ANSWERS: dict[str, Callable[[dict[str, Any]], float]] = {
    # 0 means that no rank saw a leak.
    "_on_any_rank": lambda _: 0,
    "check": lambda _: 0,
    # 0 means that no rank ran out of data.
    "_sum_over_ranks": lambda _: 0,
    "_is_asked_to_stop": lambda _: 0,
    # 1 makes each prompt get one token.
    "continue_prompts": lambda _: 1,
    "_begin_exchange": lambda local: _local_of_caller("pairs").shape[0] // local["num_ranks"],
}


def _local_of_caller(name: str) -> Any:
    frame = sys._getframe()
    while name not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals[name]


class Rehearsal(TorchDispatchMode):
    """This module's dispatch mode; `rehearsing` enters it. waits, races: description and place -> count."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.waits: Counter[str] = Counter()
        self.races: Counter[str] = Counter()
        # Storage on the device -> its uses.
        self._uses: dict[int, _Uses] = {}
        # Address of host memory -> the copy that arrives there.
        self._arriving: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._lock = threading.Lock()

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # otherwise the compiler refuses to compile in this mode

    def forget(self) -> None:
        """Reset the counts."""
        self.waits.clear()
        self.races.clear()

    def note(self, what: str) -> None:
        # Waits in threads that Python code started do not count. Autograd's threads have another class.
        if type(threading.current_thread()) is threading.Thread:
            return
        self.waits[f"{what} in {place()[0]}"] += 1

    def _made_up(self, default: float = 1) -> float:
        _, frame = place()
        answer = ANSWERS.get(frame.f_code.co_name) if frame else None
        return default if answer is None else answer(frame.f_locals)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor calls operators on local tensors, which come here again
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            return func(*args, **kwargs)  # DTensor or the compiler infers shapes
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if isinstance(source, FakeTensor) and source.is_cuda:
            if func in READS:
                self.note(func.name())
                value = self._made_up()
                return bool(value) if func is aten.equal.default else _as(source.dtype, value)
            if func in SIZED_BY_VALUES and kwargs.get("output_size") is None:
                self.note(func.name())
                n = int(self._made_up())
                shape = (n, source.dim()) if func is aten.nonzero.default else (n,)
                with self.fake_mode:
                    return torch.zeros(shape, dtype=torch.int64, device="cuda")
        if func is aten._to_copy.default and "device" in kwargs:
            return self._copy_to(func, source, kwargs)
        if func is aten.copy_.default and isinstance(args[1], torch.Tensor):
            return self._copy_into(func, *args, **kwargs)
        on_device = torch.device(kwargs.get("device") or "cpu").type == "cuda"
        if "device" in kwargs and not on_device and isinstance(source, FakeTensor):
            # For empty_like, new_zeros and the like: a real tensor of this shape that takes no memory.
            args = (torch.empty((), dtype=source.dtype).expand(source.shape), *args[1:])
        with self.fake_mode if on_device else contextlib.nullcontext():
            out = func(*args, **kwargs)
        self._track(func, args, kwargs, out)
        return out

    # ---- copies between host and device ----

    def _copy_to(self, func, source, kwargs):
        to_device = torch.device(kwargs["device"]).type == "cuda"
        if source.is_cuda and not to_device:
            return self._read(source, kwargs)
        if to_device and not source.is_cuda:
            self._check_source(source, kwargs.get("non_blocking", False))
        with self.fake_mode if to_device else contextlib.nullcontext():
            out = func(source, **kwargs)
        self._track(func, (source,), {}, out)
        return out

    def _copy_into(self, func, target, source, non_blocking=False):
        if target.is_cuda == source.is_cuda:
            out = func(target, source, non_blocking)
            self._track(func, (target, source), {}, out)
            return out
        if target.is_cuda:
            self._check_source(source, non_blocking)
            with self.fake_mode:
                out = func(target, source, non_blocking)
            self._track(func, (target,), {}, out)
            return out
        self._track(func, (source,), {}, None)
        if non_blocking and target.is_pinned():
            self._expect(target)
        else:
            self.note("copy to host")
        return target

    def _read(self, source, kwargs):
        self._track(aten.clone.default, (source,), {}, None)
        # Like torch: a non-blocking copy goes to pinned memory.
        non_blocking = bool(kwargs.get("non_blocking"))
        dtype = kwargs.get("dtype") or source.dtype
        value = _as(dtype, self._made_up(default=0))
        copy = torch.full(source.shape, value, dtype=dtype, pin_memory=non_blocking)
        if non_blocking:
            self._expect(copy)
        else:
            self.note("copy to host")
        return copy

    def _expect(self, tensor) -> None:
        """Record that the current stream copies into a host tensor while the host continues."""
        stream = device.current_stream()
        reference = StorageWeakRef(tensor.untyped_storage())
        arrives = reference, stream.stream_id, stream.clock[stream.stream_id]
        self._arriving[tensor.untyped_storage().data_ptr()] = arrives

    def check_arrival(self, tensor) -> None:
        key = tensor.untyped_storage().data_ptr() if self._arriving else 0
        reference, stream_id, tick = self._arriving.get(key, (None, 0, 0))
        if reference is None:
            return
        if not reference.expired() and device.host.clock[stream_id] < tick:
            self.races[f"read of a copy that is on its way in {place()[0]}"] += 1
        del self._arriving[key]

    def _check_source(self, source, non_blocking: bool) -> None:
        """Count a copy to the device in `waits`, unless it is non-blocking and from pinned memory.

        A blocking copy of a scalar is counted as "copy of a number".
        """
        if source.dim() == 0 and source.numel() == 1 and not non_blocking:
            self.note("copy of a number")
        elif not source.is_pinned():
            self.note("copy of pageable" + (", async" if non_blocking else ""))
        elif not non_blocking:
            self.note("copy of pinned, not async")

    # ---- streams ----

    def _track(self, func, args, kwargs, out) -> None:
        """Record the storages that an operator uses on the current stream, and count races."""
        used = _tensors((args, kwargs))
        reads = self._arriving and not getattr(func, "is_view", False)
        for tensor in used if reads else ():
            has_memory = not isinstance(tensor, FakeTensor) and not is_wrapper(tensor)
            if tensor.device.type == "cpu" and has_memory:
                self.check_arrival(tensor)
        used = [tensor for tensor in used if isinstance(tensor, FakeTensor) and tensor.is_cuda]
        made = [x for x in _tensors(out) if isinstance(x, FakeTensor) and x.is_cuda]
        if not used and not made:
            return
        arguments = func._schema.arguments if hasattr(func, "_schema") else ()
        written = {
            id(value)
            for value, argument in zip(args, arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        with self._lock:
            stream = device.current_stream()
            stream.tick()
            keys = set()
            for tensor in used:
                storage = tensor.untyped_storage()
                keys.add(storage._cdata)
                self.use_storage(storage, id(tensor) in written, func)
            for tensor in made:
                storage = tensor.untyped_storage()
                if storage._cdata not in keys:  # the operator has allocated the storage
                    self._uses[storage._cdata] = _Uses(storage)
                    self._uses[storage._cdata].add(stream, True)

    def use_storage(self, storage: torch.UntypedStorage, is_write: bool, func: Any) -> None:
        stream = device.current_stream()
        uses = self._uses.setdefault(storage._cdata, _Uses(storage))
        if not uses.is_safe(stream, is_write):
            what = "write" if is_write else "read"
            self.races[f"{what} of {func} in {place()[0]}"] += 1
        uses.add(stream, is_write)


@contextlib.contextmanager
def rehearsing() -> Iterator[Rehearsal]:
    """Run the block, and the threads that it starts, in a `Rehearsal`."""
    mode = Rehearsal()
    run, tolist, stage = threading.Thread.run, torch.Tensor.tolist, StateDictStager._offload_tensor

    def run_inside(thread: threading.Thread) -> None:
        with mode:  # each thread has its own dispatch modes
            run(thread)

    def list_as_a_whole(tensor: torch.Tensor) -> Any:
        """Copy a CUDA tensor to the host once, as torch does; a fake tensor would copy each element."""
        if not tensor.is_cuda:
            mode.check_arrival(tensor)
        return tolist(tensor.cpu() if tensor.is_cuda else tensor)

    def stage_fake(stager: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Record that a checkpoint copies x, because the copy dispatches no operator; return zeros."""
        if not isinstance(x, FakeTensor):
            return stage(stager, x, *args, **kwargs)
        mode.use_storage(x.untyped_storage(), False, "a tensor that is staged")
        return torch.zeros(x.shape, dtype=x.dtype)

    with contextlib.ExitStack() as stack:
        for change in (
            (device, "on_host_wait", mode.note),
            (threading.Thread, "run", run_inside),
            (StateDictStager, "_offload_tensor", stage_fake),
            (torch.Tensor, "tolist", list_as_a_whole),
            (FakeTensor, "tolist", list_as_a_whole),
        ):
            stack.enter_context(mock.patch.object(*change))
        yield stack.enter_context(mode)


class _Uses:
    """uses: stream id -> the stream's tick at its last use of a storage. writes: the same, last write only.

    While `reference` exists, no other storage gets the same address.
    """

    __slots__ = ("reference", "writes", "uses")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.reference = StorageWeakRef(storage)
        self.writes: dict[int, int] = {}
        self.uses: dict[int, int] = {}

    def is_safe(self, stream, is_write: bool) -> bool:
        before = self.uses if is_write else self.writes
        return all(stream.clock[other] >= tick for other, tick in before.items())

    def add(self, stream, is_write: bool) -> None:
        number = stream.stream_id
        self.uses[number] = stream.clock[number]
        if is_write:
            self.writes = {number: stream.clock[number]}


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_iter(values) if isinstance(x, torch.Tensor)]


def _as(dtype: torch.dtype, value: float) -> Any:
    if dtype is torch.bool:
        return bool(value)
    return float(value) if dtype.is_floating_point else int(value)


_SKIPPED = "__torch_dispatch__", "<listcomp>", "<dictcomp>", "<genexpr>", "<lambda>"


def place() -> tuple[str, Any]:
    """Return ("file function", frame) for the innermost frame of the project or its tests."""
    frame = sys._getframe(1)
    while frame is not None:
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        in_project = "/torchtitan/" in name or ("/tests/" in name and "site-packages" not in name)
        is_own = "/cuda_rehearsal/" in name or "/torchtitan/estimate/" in name
        if in_project and not is_own and function not in _SKIPPED:
            file = name.rpartition("/torchtitan/" if "/torchtitan/" in name else "/tests/")[2]
            return f"{file} {function}", frame
        frame = frame.f_back
    return "backward", None


def patch_kernels() -> None:
    """Replace the attention kernels by those that run on an H100.

    Flex attention calls the operator that compiled code would call. Neither flex nor varlen is compiled. sdpa
    calls the kernel that an H100 chooses, because torch's CPU build would choose one that stores all scores.
    """
    from torch._functorch import partitioners
    from torch.nn.attention.flex_attention import flex_attention
    from torch.nn.attention.varlen import varlen_attn

    from torchtitan.models.attention import FlexAttentionWrapper, VarlenAttentionWrapper

    def flex(*args, **kwargs):
        with mock.patch("torch.compiler.is_dynamo_compiling", lambda: True):
            return flex_attention(*args, **kwargs)

    FlexAttentionWrapper._compiled_flex_attn = staticmethod(flex)
    VarlenAttentionWrapper._compiled_varlen_attn = staticmethod(varlen_attn)
    F.scaled_dot_product_attention = _attention_of_h100
    # Compiled code that recomputes attention would restore a random generator's state, which this device
    # lacks. The state is not needed, because attention without dropout draws no random number.
    partitioners.functionalize_rng_ops = lambda joint, forward, backward, n: (forward, backward)


_attention_of_host = F.scaled_dot_product_attention


def _attention_of_h100(q, k, v, *, attn_mask=None, scale=None, is_causal=False, enable_gqa=False):
    options = {"attn_mask": attn_mask, "scale": scale, "is_causal": is_causal}
    if not q.is_cuda:
        return _attention_of_host(q, k, v, enable_gqa=enable_gqa, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
    if q.dtype.itemsize == 2:
        attend = aten._scaled_dot_product_cudnn_attention
        return attend(q, k, v, attn_mask, True, 0.0, is_causal, False, scale=scale)[0]
    attend = aten._scaled_dot_product_efficient_attention
    return attend(q, k, v, attn_mask, True, 0.0, is_causal, scale=scale)[0]
