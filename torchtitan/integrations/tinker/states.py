"""States of several LoRA models that share one base model, and where states of idle models are stored.

A state is this rank's shard of a model's adapters, gradients and optimizer state. States of recently
used models stay on the device; older states move to host memory, and then to files.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from torchtitan.distributed.dtensor import local_tensor
from torchtitan.distributed.processes.ranks import on_all_ranks
from torchtitan.rl.job_config import RLServe
from torchtitan.rl.learner import Pass
from torchtitan.tools.files import regular_file, save_tensors
from torchtitan.tools.logging import logger

_DEVICE, _HOST, _FILE = range(3)


@dataclass
class TrainingState:
    """The trained weights of a policy, their optimizer state, and the state of the current step.

    weights, gradients: name -> this rank's shard. optimizers: the `state` of each optimizer.
    passes: see `Learner`.
    """

    weights: dict[str, Tensor]
    optimizers: list[Any]
    gradients: dict[str, Tensor | None]
    passes: tuple[Pass, ...] = ()
    failure: Exception | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Yield this rank's shard of each tensor, without a copy; always in the same order."""
        yield from self.weights.values()
        yield from (local_tensor(grad) for grad in self.gradients.values() if grad is not None)
        for optimizer in self.optimizers:
            for of_parameter in optimizer.values():
                yield from (local_tensor(x) for x in of_parameter.values() if isinstance(x, Tensor))

    @torch.no_grad()
    def add_gradients(self, gradients: dict[str, Tensor]) -> None:
        """Add the gradients of one more `forward_backward` call."""
        for name, new in gradients.items():
            old = self.gradients[name]
            self.gradients[name] = new if old is None else old.add_(new)
        self.passes += (Pass(),)

    def own_memory(self) -> None:
        """Copy each gradient to separate memory; gradients of a shared pass are views of one buffer."""
        for name, grad in self.gradients.items():
            self.gradients[name] = None if grad is None else grad.clone()


@dataclass
class Limits:
    """Limits of the models with adapters that a server trains.

    n_models: number of models. n_device, n_host: numbers of states on the device and in host memory.
    full: the error message for a client whose model does not fit.
    """

    n_models: int
    n_device: int
    n_host: int
    full: str

    @classmethod
    def from_config(cls, serve: RLServe, state_bytes: int, device: torch.device) -> "Limits":
        """Return the limits that `[rl.serve]` sets.

        state_bytes: size of a state with gradients and optimizer, on the rank with the largest state.
        """
        mibs = serve.max_device_mib, serve.max_host_mib, serve.max_file_mib
        n_device, n_host, n_file = (mib * 2**20 // max(state_bytes, 1) for mib in mibs)
        if device.type == "cpu":
            n_device, n_host = n_host, 0
        n_places = n_device + n_host + n_file
        n_models = max(1, min(serve.max_models, n_places))
        full = (
            f"{n_models} models of {state_bytes / 2**20:.1f} MiB train on this server, the limit set by "
            "rl.serve.max_models, or by max_device_mib, max_host_mib and max_file_mib together; close "
            "the ServiceClient of one of them"
        )
        return cls(n_models, n_device, n_host, full)


@dataclass
class _Waiting:
    """The state of a model that does not train now. host: its tensors, if they are in host memory."""

    state: TrainingState
    where: int = _DEVICE
    host: list[Tensor] = field(default_factory=list)


class WaitingStates:
    """Stores states by model. Every rank makes the same calls, so all ranks move the same states.

    folder: holds the states in files; `close` and the constructor remove these files.
    """

    def __init__(self, limits: Limits, folder: str):
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._limits, self._folder = limits, os.path.join(folder, f"rank-{rank}")
        # The most recently used state is last.
        self._all: dict[str, _Waiting] = {}
        self.close()

    def __contains__(self, model: str) -> bool:
        return model in self._all

    def add(self, model: str, state: TrainingState) -> None:
        self._all[model] = _Waiting(state)
        self._move_oldest()

    def pop(self, model: str) -> TrainingState:
        """Remove a model's state and return it, on the device."""
        state = self.get([model])[0]
        del self._all[model]
        return state

    def get(self, models: list[str]) -> list[TrainingState]:
        """Return the models' states; they stay on the device until the next `add`, `pop` or `get`."""
        for model in models:
            waiting = self._all.pop(model)
            try:
                self._bring_back(model, waiting)
            finally:
                self._all[model] = waiting
        self._move_oldest(keeps=len(models))
        return [self._all[model].state for model in models]

    def drop(self, model: str) -> None:
        self._all.pop(model, None)
        Path(self._path(model)).unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, model: str) -> str:
        return os.path.join(self._folder, f"{model.replace(':', '-')}.safetensors")

    def _move_oldest(self, keeps: int = 1) -> None:
        """Move states to host memory or files to keep the limits; the newest `keeps` states don't move."""
        n_device = max(self._limits.n_device, keeps)
        newest_first = list(reversed(self._all.items()))
        for number, (model, waiting) in enumerate(newest_first[n_device:], start=n_device):
            where = _FILE if number >= n_device + self._limits.n_host else _HOST
            if waiting.where < where:
                self._move_away(model, waiting, where)

    def _move_away(self, model: str, waiting: _Waiting, where: int) -> None:
        if waiting.where == _DEVICE:
            waiting.state.own_memory()
        tensors = list(waiting.state.tensors())
        held = waiting.host or tensors
        waiting.where, waiting.host = where, []
        try:
            if where == _FILE:
                os.makedirs(self._folder, exist_ok=True)
                save_tensors({str(i): x.detach() for i, x in enumerate(held)}, self._path(model))
        except OSError as error:
            # Don't raise, because other ranks may have saved their shards.
            logger.warning("the state of model %s stays in memory: %s", model, error)
            where = _HOST
        if where == _HOST:
            waiting.host = [x.to("cpu", copy=True) for x in held]
        for tensor in tensors:
            # Frees the memory, but keeps the tensor object that other objects refer to.
            tensor.untyped_storage().resize_(0)

    def _bring_back(self, model: str, waiting: _Waiting) -> None:
        """Move a state to the device. Collective for a state in files: if one rank fails, all ranks raise."""

        def read() -> None:
            tensors, held = list(waiting.state.tensors()), waiting.host
            if not held:
                saved = load_file(regular_file(self._path(model)))
                held = [saved[str(i)] for i in range(len(tensors))]
            for tensor, value in zip(tensors, held, strict=True):
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                tensor.detach().copy_(value)

        if waiting.where == _FILE:
            on_all_ranks(read)
            Path(self._path(model)).unlink(missing_ok=True)
        elif waiting.where == _HOST:
            read()
        waiting.where, waiting.host = _DEVICE, []
