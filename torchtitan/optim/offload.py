"""Moving a model, its gradients and its optimizer's state to host memory and back.

Parameters stay the same objects, because optimizers and clients refer to them; tied weights stay tied.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchtitan.config import JobConfig
from torchtitan.distributed.fsdp import reshard_model
from torchtitan.optim.optimizer import OptimizersContainer
from torchtitan.tools import host, torch_parts
from torchtitan.tools.logging import logger, warn_once

HOST = torch.device("cpu")


class Offloader:
    """Moves the states of an engine between its `device` and host memory.

    places: the current device of "model", "optimizer" and "grad".
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        optimizers: OptimizersContainer,
        device: torch.device,
    ) -> None:
        self.model_parts = model_parts
        self.optimizers = optimizers
        self.device = device
        self.places = {"model": device, "optimizer": device, "grad": device}
        # Gradients on another device than their parameter, which `parameter.grad` cannot hold.
        self._detached: dict[nn.Parameter, Tensor] = {}
        self._has_pinned = False

        def put_back(optimizer: Optimizer) -> None:
            """Move loaded state, which torch puts on the parameters' device, to `places["optimizer"]`."""
            if self.places["optimizer"] != self.places["model"]:
                _replace_state(optimizer, lambda tensor: tensor.to(self.places["optimizer"]))

        for optimizer in optimizers:
            optimizer.register_load_state_dict_post_hook(put_back)

    def check_target(self, device: torch.device | str) -> torch.device:
        """Return the engine's device or `HOST`, whichever `device` names; ValueError for other devices."""
        target = torch.device(device)
        if target.type == self.device.type and target.index in (None, self.device.index):
            return self.device
        if target == HOST:
            return HOST
        raise ValueError(
            f"to(device) got {str(device)!r}, but this engine computes on {self.device}: give "
            f"{str(self.device)!r}, or 'cpu' to move its states to host memory"
        )

    def can_move(self, job_config: JobConfig) -> bool:
        """True if the states can be moved; False, with a warning, if they always stay on the CPU.

        Raises ValueError if moving would lose the hooks of optimizers that step in backward.
        """
        if job_config.optimizer.early_step_in_backward:
            raise ValueError(
                "to(device) cannot move parameters whose optimizer steps in gradient hooks; set "
                "optimizer.early_step_in_backward = false"
            )
        if job_config.training.enable_cpu_offload and self.device.type != "cpu":
            warn_once(
                logger, "to(device) moves nothing: training.enable_cpu_offload keeps all on the CPU"
            )
            return False
        return True

    def check_here(self, step: str, *kinds: str) -> None:
        """Raise RuntimeError if states that `step` needs are not on the engine's device."""
        away = [kind for kind in kinds if self.places[kind] != self.device]
        if away:
            flags = ", ".join(f"{kind}=True" for kind in away)
            raise RuntimeError(
                f"{step} needs {' and '.join(away)} on {self.device}, but to() has moved them to "
                f"{self.places[away[0]]}: call to({str(self.device)!r}, {flags}) first"
            )

    def move(self, target: torch.device, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move the chosen states to `target`, unless they are there already."""
        wanted = {"model": model, "optimizer": optimizer, "grad": grad}
        kinds = {kind for kind in wanted if wanted[kind] and self.places[kind] != target}
        if not kinds:
            return
        if target == HOST:
            copies = self._pinned_copies(kinds)
            self.replace(kinds, lambda t: copies[id(t)][1] if id(t) in copies else t.to(HOST))
            copies.clear()  # drop the last references to the tensors on the device
            getattr(torch, self.device.type).empty_cache()  # other processes may use the memory now
        else:
            self.replace(kinds, lambda tensor: tensor.to(target, non_blocking=True))
        self.places |= dict.fromkeys(kinds, target)

    @torch.no_grad()
    def _pinned_copies(self, kinds: set[str]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return tensor id -> (tensor, its copy in host memory) for all tensors on the device.

        All copies are queued, and then the host waits once. Only then may copies replace parameters, because
        FSDP reads a replacement at once, to pad it. The copies are in pinned memory, which torch keeps.
        """
        tensors = list(self._detached.values()) if "grad" in kinds else []
        for part in self.model_parts:
            reshard_model(part)
            if "model" in kinds:
                tensors += [*part.parameters(), *part.buffers()]
            if "grad" in kinds:
                tensors += [p.grad for p in part.parameters() if p.grad is not None]
        if "optimizer" in kinds:
            states = (state for optimizer in self.optimizers for state in optimizer.state.values())
            tensors += [v for state in states for v in state.values() if isinstance(v, Tensor)]
        copies = {
            id(tensor): (tensor, tensor.to(HOST, non_blocking=True))
            for tensor in tensors
            if tensor.device.type == self.device.type
        }
        if copies:
            torch.accelerator.current_stream(self.device).synchronize()
        if copies and not self._has_pinned:
            self._has_pinned = True
            host.at_last_move_out(release_pinned_memory)
        return copies

    @torch.no_grad()
    def replace(self, kinds: Iterable[str], relocate: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor of these kinds by `relocate(tensor)`, in place."""
        for part in self.model_parts:
            reshard_model(part)
        gradients, self._detached = self._detached, {}
        for parameter in (p for part in self.model_parts for p in part.parameters()):
            if parameter.grad is not None:
                gradients[parameter] = parameter.grad
                # torch swaps DTensor parameters in place, and refuses to if they have gradients.
                parameter.grad = None
        seen: dict[int, Tensor] = {}

        def relocate_once(tensor: Tensor) -> Tensor:
            """Relocate a tensor. A tensor that modules share is relocated only at its first visit."""
            if id(tensor) in seen:
                return tensor.detach()
            seen[id(tensor)] = tensor  # kept alive, so that no other tensor gets its id
            return relocate(tensor)

        if "model" in kinds:
            for part in self.model_parts:
                seen.clear()
                part._apply(relocate_once)
        if "grad" in kinds:
            gradients = {parameter: relocate(grad) for parameter, grad in gradients.items()}
        for parameter, grad in gradients.items():
            if grad.device == parameter.device:
                parameter.grad = grad
            else:
                self._detached[parameter] = grad
        if "optimizer" in kinds:
            for optimizer in self.optimizers:
                _replace_state(optimizer, relocate)


def release_pinned_memory() -> None:
    """Return unused pinned host memory, which torch keeps, to the system."""
    torch_parts.empty_host_cache()


def _replace_state(optimizer: Optimizer, relocate: Callable[[Tensor], Tensor]) -> None:
    for group in optimizer.param_groups:
        # torch keeps the step count on the host, except with these two options.
        counts_on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and (key != "step" or counts_on_device):
                    state[key] = relocate(value)
