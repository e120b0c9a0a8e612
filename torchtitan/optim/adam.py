"""Adam and AdamW whose moments may be kept in fewer bits than the parameters."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from torchtitan.distributed.dtensor import local_tensor

MOMENTS = "exp_avg", "exp_avg_sq"  # torch's names of the first and the second moment


class RoundedAdam(Optimizer):
    """torch's Adam or AdamW on this rank's part of each parameter, with moments in `state_dtype`.

    bf16 moments are rounded stochastically, so that they are right on average: with beta2 = 0.999, a step
    changes a second moment by less than half of bf16's spacing, and rounding to nearest would drop the
    change. The random numbers depend only on the parameter's index and step count, so replicas stay
    equal and resumed runs continue bit for bit.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        fused: bool = False,
        foreach: bool = False,
        decoupled_weight_decay: bool = True,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._options = {
            "fused": fused,
            "foreach": foreach,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        self.state_dtype = state_dtype
        params = [p for group in self.param_groups for p in group["params"]]
        self._number_of = {p: number for number, p in enumerate(params)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self._update_by_adam(group, group["params"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.state_dtype is None:
            return
        for state in self.state.values():  # undo torch's conversion to the parameters' dtype
            for name in state.keys() - {"step"}:
                state[name] = state[name].to(self.state_dtype)

    def _update_by_adam(self, group: dict[str, Any], params: list[Tensor]) -> None:
        params = [p for p in params if p.grad is not None]
        for some in [params] if self.state_dtype is None else [[p] for p in params]:
            moments = [self._moments(p, *MOMENTS) for p in some]
            adam(
                [local_tensor(p) for p in some],
                [local_tensor(p.grad) for p in some],
                [first for first, _ in moments],
                [second for _, second in moments],
                [],
                # Copies of the step count: a fused kernel reads and increments the count on the device.
                [torch.full((), float(self.state[p]["step"]), device=p.device) for p in some],
                amsgrad=False,
                maximize=False,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                **self._options,
            )
            for p, of_param in zip(some, moments, strict=True):
                self._keep(p, dict(zip(MOMENTS, of_param, strict=True)))

    def _moments(self, p: Tensor, *names: str) -> list[Tensor]:
        """Return this rank's parts of p's moments, in p's dtype. Call `_keep` after changing them."""
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in names:
                state[name] = torch.zeros_like(p, dtype=self.state_dtype)
        return [local_tensor(state[name]).to(p.dtype) for name in names]

    def _keep(self, p: Tensor, moments: dict[str, Tensor]) -> None:
        """Store changed moments of p, and increment p's step count."""
        state = self.state[p]
        if self.state_dtype is not None:
            random = torch.Generator(p.device)
            random.manual_seed((int(state["step"]) << 24) + self._number_of[p])
            for name, moment in moments.items():
                round_at_random(moment, local_tensor(state[name]), random)
        state["step"] += 1


def round_at_random(x: Tensor, out: Tensor, generator: torch.Generator) -> None:
    """Write fp32 x to the bf16 tensor `out`, stochastically rounded, so that the mean is x.

    bf16 is the upper half of fp32's bits: adding a random lower half carries into the upper half
    with a probability that is proportional to the lower half.
    """
    noise = torch.randint(
        0, 2**16, x.shape, dtype=torch.int32, device=x.device, generator=generator
    )
    out.copy_(noise.add_(x.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32))
