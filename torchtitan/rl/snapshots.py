"""Copies of earlier weights, which replace the current weights for a forward pass or for sampling.

There is no second model: this rank's part of the weights (and of the biases that balance experts)
is swapped with a copy, and swapped back afterwards.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.distributed.dtensor import forget_scales, is_dtensor, local_tensor
from torchtitan.engine import TrainingEngine
from torchtitan.tools import torch_parts
from torchtitan.tools.torch_parts import name_without_wrappers


def own_weights(engine: TrainingEngine) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's part of the weights: parameters, and persistent floating-point buffers."""
    for part in engine.model_parts:
        for name, parameter in part.named_parameters():
            yield name_without_wrappers(name), parameter
        for prefix, module in part.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                is_saved = name not in torch_parts.unsaved_buffers(module)
                if is_saved and buffer.is_floating_point():
                    yield name_without_wrappers(f"{prefix}.{name}"), buffer


def changing_weights(engine: TrainingEngine) -> Iterator[tuple[str, Tensor]]:
    """Yield the `own_weights` that training changes; with LoRA, only weights that require gradients."""
    has_adapters = "lora" in engine.job_config.model.converters
    return (pair for pair in own_weights(engine) if pair[1].requires_grad or not has_adapters)


def exchange(engine: TrainingEngine, weights: dict[str, Tensor]) -> None:
    """Swap the weights that training changes with the tensors in `weights`, in place."""
    swap(changing_weights(engine), weights)


@torch.no_grad()
def swap(live: Iterable[tuple[str, Tensor]], weights: dict[str, Tensor]) -> None:
    """Swap live weights with the entries of the same names in `weights`, in place."""
    live = list(live)
    own = [local_tensor(weight) for _, weight in live]
    others, kept = [local_tensor(weights[name]) for name, _ in live], [x.clone() for x in own]
    torch_parts.foreach_copy(own, others)
    torch_parts.foreach_copy(others, kept)
    forget_scales(weight for _, weight in live)


def swap_memory(live: Sequence[tuple[str, Tensor]], weights: dict[str, Tensor]) -> None:
    """Like `swap`, for weights on one device; swaps storages instead of copying, except for DTensors."""
    if any(is_dtensor(weight) for _, weight in live):
        return swap(live, weights)
    for name, weight in live:
        weights[name], weight.data = weight.data, weights[name]


def host_copy(engine: TrainingEngine) -> dict[str, Tensor]:
    """Return this rank's part of the weights that training changes, copied to host memory."""
    return {
        name: local_tensor(weight.detach()).to("cpu", copy=True)
        for name, weight in changing_weights(engine)
    }


@dataclass(eq=False)
class WeightsKey:
    """Identifies one state of the weights. number: the index of the key, from 1."""

    number: int
    is_pinned: bool = False


class Snapshots:
    """Keeps snapshots of weights in host memory while a caller holds their key.

    limit: a key expires when more than this many later keys exist, and its weights are dropped; pinned
        keys never expire. Expiry counts created keys, because all ranks create the same keys, but
        free them at different times.
    """

    def __init__(self, engine: TrainingEngine, limit: int):
        self._engine, self._limit = engine, limit
        self._copies: weakref.WeakKeyDictionary[WeightsKey, dict[str, Tensor]]
        self._copies = weakref.WeakKeyDictionary()
        self._n_keys = 0
        self._now: Callable[[], WeightsKey | None] = lambda: None

    def key(self, *, pinned: bool = False) -> WeightsKey:
        """Return the key of the current weights, which `changing` copies before they change."""
        key = self._now()
        if key is None:
            key = self._new_key()
            self._now = weakref.ref(key)
        key.is_pinned |= pinned
        return key

    def _new_key(self) -> WeightsKey:
        self._n_keys += 1
        for old in [old for old in self._copies if self.is_expired(old)]:
            del self._copies[old]
        return WeightsKey(self._n_keys)

    def is_expired(self, key: WeightsKey) -> bool:
        """Return True if more than `limit` later keys exist and this key is not pinned."""
        return not key.is_pinned and self._n_keys - key.number > self._limit

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Wrap code that changes the weights; copies the old weights if a caller holds their key."""
        key = self._now()
        if key is not None:
            self._copies[key] = host_copy(self._engine)
        try:
            yield
        finally:
            self._now = lambda: None

    def weights(self, key: WeightsKey) -> dict[str, Tensor]:
        """Return the key's weights: a host copy, or the live tensors. ValueError if the key expired."""
        if key is self._now():
            return {name: local_tensor(w.detach()) for name, w in changing_weights(self._engine)}
        if self.is_expired(key):
            raise ValueError(
                f"the weights of this sampling client are gone, because more than {self._limit} later "
                "snapshots exist; raise rl.generator.max_snapshots, or sample from a saved state"
            )
        return self._copies[key]

    @contextlib.contextmanager
    def using(self, key: WeightsKey) -> Iterator[None]:
        """Give the model the key's weights inside the context. Raises ValueError if the key expired."""
        if key is self._now():
            yield
            return
        copy = self.weights(key)
        exchange(self._engine, copy)
        try:
            yield
        finally:
            exchange(self._engine, copy)

    def loaded(self, load: Callable[[], object]) -> WeightsKey:
        """Call `load`, restore the model's own weights, and return the key of the loaded weights."""
        copy = host_copy(self._engine)
        try:
            load()
        finally:
            exchange(self._engine, copy)
        key = self._new_key()
        self._copies[key] = copy
        return key
