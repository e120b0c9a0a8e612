"""Initial weights that don't depend on how the model is spread over ranks.

An element's value depends only on the seed, the parameter's name, the number of earlier draws into
the parameter, and the element's global index. Each rank generates only its own shard.

The random numbers are SplitMix64's output function (Steele, Lea, Flood 2014, with the constants of
Stafford's variant 13) of `key + index * golden`, where `key` is a hash of seed, name and draws.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.distributed.dtensor import (
    is_dtensor,
    local_shape_and_offsets,
    local_tensor,
    with_local,
)
from torchtitan.distributed.tied_copies import name_in_whole_model
from torchtitan.numerics import nf4
from torchtitan.tools import torch_parts
from torchtitan.tools.logging import logger, warn_once

# On the CPU a chunk and its temporaries fit the L2 cache; accelerators prefer few, large kernels.
_CHUNK_ELEMENTS_CPU = 2**14
_CHUNK_ELEMENTS_ACCELERATOR = 2**24

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

# Changes [n] float64 numbers, uniform in (0, 1), to the wanted distribution, in place.
_Transform = Callable[[Tensor], Tensor]

_active: "seeded_init | None" = None


class seeded_init(torch_parts.DispatchMode):
    """Context in which the model's `init_weights()` sets the same weights on every layout.

    In this context, in-place `normal_` and `uniform_` (and all functions of `torch.nn.init` that call them)
    and our `trunc_normal_` fill a parameter of `model`, plain or DTensor, with numbers that depend only on
    the seed and the parameter's name; a tied parameter uses its first name. Other draws use torch's
    generator, depend on the layout, and cause a warning.

    Enter after the parameters have memory (`to_empty`), under `torch.no_grad()`.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._num_draws: Counter[str] = Counter()
        self._name_by_id: dict[int, str] = {}
        self._name_by_memory: dict[tuple, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            name = name_in_whole_model(model, torch_parts.name_without_wrappers(name))
            self._name_by_id.setdefault(id(parameter), name)
            memory = _memory_of(parameter)
            if memory is not None:
                self._name_by_memory.setdefault(memory, name)

    def __enter__(self) -> "seeded_init":
        global _active
        _active = self
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        global _active
        _active = None
        super().__exit__(*exc_info)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        tensor, *numbers = args
        if isinstance(tensor, Tensor) and tensor.is_meta:
            return func(*args, **kwargs)
        transform = None
        if func in _TRANSFORMS and kwargs.get("generator") is None:
            options = {name: value for name, value in kwargs.items() if name != "generator"}
            transform = _TRANSFORMS[func](*numbers, **options)
        if transform is None or not self.fill(tensor, transform):
            warn_once(
                logger,
                f"initialisation draws with {func} from torch's generator (shape "
                f"{list(tensor.shape) if isinstance(tensor, Tensor) else tensor}), so the result "
                f"depends on the number of ranks. Draw whole parameters with normal_, uniform_ "
                f"or torchtitan.models.utils.trunc_normal_ instead",
            )
            return func(*args, **kwargs)
        return tensor

    def fill_outside(self, tensor: Any, transform: _Transform) -> bool:
        """Call `fill` with this dispatch mode disabled."""
        super().__exit__(None, None, None)
        try:
            return self.fill(tensor, transform)
        finally:
            super().__enter__()

    def fill(self, tensor: Any, transform: _Transform) -> bool:
        """Fill this rank's part of a parameter; returns False if the model has no such parameter."""
        name = self._name_by_id.get(id(tensor)) or self._name_by_memory.get(_memory_of(tensor))
        if name is None:
            return False
        draw = f"{self._seed}/{name}/{self._num_draws[name]}"
        key = int.from_bytes(hashlib.blake2b(draw.encode(), digest_size=8).digest(), "little")
        self._num_draws[name] += 1
        local = stored = local_tensor(tensor)
        if stored.dtype == torch.uint8:
            local = nf4.empty_numbers(stored)
            tensor = with_local(tensor, local)
        values = torch.empty(local.shape, dtype=local.dtype, device=local.device)
        flat = values.view(-1)
        start = 0
        for index in _global_index_chunks(tensor, local):
            flat[start : start + index.numel()] = transform(_uniform(index, key))
            start += index.numel()
        stored.copy_(nf4.quantize(values) if stored.dtype == torch.uint8 else values)
        return True


def trunc_normal_(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> Tensor:
    """Fill with N(mean, std) truncated to the absolute bounds [a, b]; returns the tensor.

    Computes in at least fp32: bf16 loses the tails. Call under `torch.no_grad()`.
    """
    if _active is not None and not tensor.is_meta:
        if _active.fill_outside(tensor, _truncated_normal(mean, std, a, b)):
            return tensor
    drawn = torch.empty_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    tensor.copy_(nn.init.trunc_normal_(drawn, mean, std, a, b))
    return tensor


def _truncated_normal(
    mean: float = 0.0, std: float = 1.0, a: float = -math.inf, b: float = math.inf
) -> _Transform:
    # Inverse transform sampling, with the distribution function written with erf.
    low, high = (
        math.erf((bound - mean) / (std * math.sqrt(2))) if std else 0.0 for bound in (a, b)
    )

    def transform(u: Tensor) -> Tensor:
        u.mul_(high - low).add_(low).erfinv_().mul_(std * math.sqrt(2)).add_(mean)
        return u.clamp_(a, b)

    return transform


# Random op -> the transform of uniform numbers that replaces it. Other ops are left to torch.
_TRANSFORMS: dict[Any, Callable[..., _Transform]] = {
    torch.ops.aten.normal_.default: _truncated_normal,
    torch.ops.aten.uniform_.default: lambda low=0.0, high=1.0: (
        lambda u: u.mul_(high - low).add_(low)
    ),
}


def _uniform(index: Tensor, key: int) -> Tensor:
    """Return pseudo-random numbers in (0, 1). [n] int64 (overwritten) -> [n] float64."""
    bits = index.mul_(_signed(_GOLDEN)).add_(_signed(key))  # overflow wraps, as intended
    shifted = torch.empty_like(bits)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        bits.bitwise_xor_(_shift_right(bits, shift, shifted)).mul_(_signed(factor))
    bits.bitwise_xor_(_shift_right(bits, 31, shifted))
    # The upper 52 bits plus one half: exact in float64, and never 0 or 1.
    return _shift_right(bits, 12, shifted).double().add_(0.5).mul_(2.0**-52)


def _shift_right(bits: Tensor, count: int, out: Tensor) -> Tensor:
    """Shift right and fill with zeros, where torch's operator fills with the sign bit."""
    torch.bitwise_right_shift(bits, count, out=out)
    return out.bitwise_and_((1 << (64 - count)) - 1)


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def _global_index_chunks(tensor: Tensor, local: Tensor) -> Iterator[Tensor]:
    """Yield every local element's index in the flattened whole parameter, in order, as [n] int64."""
    offsets: tuple[int, ...] = (0,) * local.ndim
    if is_dtensor(tensor):
        shape, offsets = local_shape_and_offsets(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        assert tuple(shape) == tuple(local.shape), f"{shape} != {local.shape}"
    if local.numel() == 0:
        return
    device, whole = local.device, tensor.shape
    # First the index at which each row (along the last dim) begins, then the elements of rows.
    row_starts = torch.zeros(1, dtype=torch.int64, device=device)
    for size, offset, whole_size in zip(local.shape[:-1], offsets, whole, strict=False):
        along = torch.arange(offset, offset + size, device=device)
        row_starts = (row_starts[:, None] * whole_size + along).flatten()
    width = 1
    if local.ndim:
        width, row_starts = local.shape[-1], row_starts * whole[-1] + offsets[-1]

    chunk = _CHUNK_ELEMENTS_CPU if device.type == "cpu" else _CHUNK_ELEMENTS_ACCELERATOR
    columns = torch.arange(width, device=device)
    for rows in row_starts.split(max(1, chunk // width)):
        for part in columns.split(chunk):
            yield (rows[:, None] + part).flatten()


def _memory_of(tensor: Any) -> tuple | None:
    """Return the tensor's memory location, which also identifies `parameter.data`."""
    local = local_tensor(tensor)
    if type(local) not in (Tensor, nn.Parameter) or local.is_meta or local.numel() == 0:
        return None
    return local.untyped_storage().data_ptr(), local.storage_offset(), local.shape, local.stride()
