"""Moving a model, its gradients and its optimizer's state to host memory and back.

Parameter objects stay the same ones, tied ones tied, so that optimizers and whoever else holds
them need not be told.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torchtitan.components.optimizer import OptimizersContainer

HOST = torch.device("cpu")


class Offloader:
    """Knows where the states of an engine are: on its device, or in host memory.

    device: where the engine computes. `places` says where "model", "optimizer" and "grad" are.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        optimizers: "OptimizersContainer",
        device: torch.device,
    ) -> None:
        self.model_parts = model_parts
        self.optimizers = optimizers
        self.device = device
        self.places = {"model": device, "optimizer": device, "grad": device}
        # Gradients that are elsewhere than their parameters, which torch does not allow.
        self._detached: dict[nn.Parameter, Tensor] = {}
        for optimizer in optimizers:
            optimizer.register_load_state_dict_post_hook(self._put_back_loaded)

    def check_target(self, device: torch.device | str) -> torch.device:
        """The device as the engine spells it; ValueError if it is neither its own nor the host."""
        target = torch.device(device)
        if target.type == self.device.type and target.index in (None, self.device.index):
            return self.device
        if target == HOST:
            return HOST
        raise ValueError(
            f"to(device) got {str(device)!r}, but this engine computes on {self.device}: give "
            f"{str(self.device)!r}, or 'cpu' to put its states away in host memory"
        )

    def check_here(self, step: str, *kinds: str) -> None:
        """Raises RuntimeError if what `step` needs is put away."""
        away = [kind for kind in kinds if self.places[kind] != self.device]
        if away:
            flags = ", ".join(f"{kind}=True" for kind in away)
            raise RuntimeError(
                f"{step} needs {' and '.join(away)} on {self.device}, but {self.places[away[0]]} "
                f"is where to() has put them: call to({str(self.device)!r}, {flags}) before"
            )

    def move(self, target: torch.device, *, model: bool, optimizer: bool, grad: bool) -> None:
        """Move what is asked for and is elsewhere; the rest stays where it is."""
        wanted = {"model": model, "optimizer": optimizer, "grad": grad}
        kinds = {kind for kind in wanted if wanted[kind] and self.places[kind] != target}
        if not kinds:
            return
        self.replace(kinds, lambda tensor: tensor.to(target))
        self.places |= dict.fromkeys(kinds, target)
        if target == HOST and self.device.type != "cpu":
            getattr(torch, self.device.type).empty_cache()  # for others on the same device

    @torch.no_grad()
    def replace(self, kinds: Iterable[str], relocate: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor of these kinds by what `relocate` makes of it, in place."""
        from torchtitan.distributed.fsdp import reshard_model

        for part in self.model_parts:
            reshard_model(part)
        gradients = self._take_gradients()
        if "model" in kinds:
            for part in self.model_parts:
                part._apply(_once_each(relocate))
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

    def _put_back_loaded(self, optimizer: Optimizer) -> None:
        """Loading leaves an optimizer's state where its parameters are."""
        if self.places["optimizer"] != self.places["model"]:
            _replace_state(optimizer, lambda tensor: tensor.to(self.places["optimizer"]))

    def _take_gradients(self) -> dict[nn.Parameter, Tensor]:
        gradients, self._detached = self._detached, {}
        for part in self.model_parts:
            for parameter in part.parameters():
                if parameter.grad is not None:
                    gradients[parameter] = parameter.grad
                    # Parameters that are DTensors are swapped, which a gradient would prevent.
                    parameter.grad = None
        return gradients


def _replace_state(optimizer: Optimizer, relocate: Callable[[Tensor], Tensor]) -> None:
    for group in optimizer.param_groups:
        # Otherwise the step is counted on the host, wherever the parameter is.
        counts_on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and (key != "step" or counts_on_device):
                    state[key] = relocate(value)


def _once_each(relocate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`relocate`, with a tensor that several modules share moved at its first one."""
    seen: dict[int, Tensor] = {}

    def relocate_once(tensor: Tensor) -> Tensor:
        if id(tensor) in seen:
            return tensor.detach()
        seen[id(tensor)] = tensor  # held, so that no other tensor gets its id
        return relocate(tensor)

    return relocate_once
