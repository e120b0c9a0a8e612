"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) on sharded matrices.

The update of a matrix is approximately the orthogonal matrix that is nearest to the momentum, a running
average of the gradients. Computing this needs the whole matrix on one rank:

    update the momentum        each rank, its part                                  `_direction`
    gather                     the ranks that share a matrix                        `_update_together`
    orthogonalize              one of these ranks; a different rank per matrix      `orthogonalize`
    send the result, update    the ranks that share it; each updates its part       `_update_together`

Parameters are [m, n], or [E, m, n] with E matrices. Experts that lie whole on one rank stay there.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.job_config import Muon as MuonOptions
from torchtitan.distributed.dtensor import (
    is_dtensor,
    load_dtensor,
    local_shape_and_offsets,
    local_tensor,
    with_local,
)
from torchtitan.optim.adam import RoundedAdam

_EPS = 1e-7  # the smallest norm to divide by; torch.optim.Muon's default


class Muon(RoundedAdam):
    """`torch.optim.Muon` for `matrices`, and AdamW for all other parameters.

    options: those of torch.optim.Muon. replicas: the ranks that replicate unsharded parameters (DDP).
    Steps are collective over the ranks that share a matrix. If such a matrix has no gradient, zeros are used.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        matrices: Collection[Tensor],
        options: MuonOptions,
        replicas: DeviceMesh | None = None,
        **adam: Any,
    ) -> None:
        super().__init__(params, **adam)
        self.options = options
        self._layout_of = {p: _Layout(p, replicas) for p in matrices}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            matrices: dict[Any, list[Tensor]] = {}
            others = []
            for p in group["params"]:
                layout = self._layout_of.get(p)
                if layout is None:
                    others.append(p)
                elif p.grad is not None or layout.axes:
                    matrices.setdefault((layout.mesh, layout.axes), []).append(p)
            self._update_by_adam(group, others)
            for sharing in matrices.values():
                # Sort by cost, about m * n * min(m, n): matrices of similar cost are then computed together.
                sharing.sort(key=lambda p: p.numel() * min(p.shape[-2:]), reverse=True)
                at_once = self._layout_of[sharing[0]].num_ranks
                for first in range(0, len(sharing), at_once):
                    self._update_together(group, sharing[first : first + at_once])

    def _update_together(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Update matrices that the same ranks share; there is at most one matrix per rank."""
        lr, options = float(group["lr"]), self.options
        layouts = [self._layout_of[p] for p in params]
        directions = [self._direction(p) for p in params]
        if not lr:  # with learning rate 0, torch runs a step only to create missing states
            return
        own = None
        for number, (layout, direction) in enumerate(zip(layouts, directions, strict=True)):
            whole = layout.gather(direction)
            if number == layout.own_number:
                own = whole
        if own is not None:
            own = orthogonalize(own, options.ns_coefficients, options.ns_steps).contiguous()
        for number, (p, layout) in enumerate(zip(params, layouts, strict=True)):
            update = layout.part_of(layout.share(own, number, directions[number]))
            local = local_tensor(p)
            local.mul_(1 - lr * group["weight_decay"])
            factor = adjustment(p.shape[-2], p.shape[-1], options.adjust_lr_fn)
            local.add_(update.to(local.device), alpha=-lr * factor)

    def _direction(self, p: Tensor) -> Tensor:
        """Update the momentum; return this rank's part of the matrix to orthogonalize."""
        (average,) = self._moments(p, "momentum_buffer")
        grad = torch.zeros_like(average) if p.grad is None else local_tensor(p.grad)
        average.lerp_(grad, 1 - self.options.momentum)
        self._keep(p, {"momentum_buffer": average})
        direction = grad.lerp(average, self.options.momentum) if self.options.nesterov else average
        return direction.to(TORCH_DTYPE_MAP[self.options.ns_dtype])


class _Layout:
    """How a parameter [m, n] or [E, m, n] is spread over ranks.

    axes: the mesh axes whose ranks share the matrices. own_number: this rank's index among these ranks.
    """

    def __init__(self, p: Tensor, replicas: DeviceMesh | None) -> None:
        self.p = p
        self.mesh = p.device_mesh if is_dtensor(p) else replicas
        self.axes: tuple[int, ...] = ()
        self.num_ranks, self.own_number = 1, 0
        if self.mesh is None:
            return
        replicate = load_dtensor().Replicate()
        placements = p.placements if is_dtensor(p) else [replicate] * self.mesh.ndim
        # Sharding along the expert dimension keeps matrices whole, so `gather` keeps this sharding.
        self.target = [
            x if getattr(x, "dim", p.ndim) < p.ndim - 2 else replicate for x in placements
        ]
        self.axes = tuple(
            axis
            for axis, placement in enumerate(self.target)
            if placement == replicate and self.mesh.size(axis) > 1
        )
        for axis in self.axes:
            self.num_ranks *= self.mesh.size(axis)
            self.own_number *= self.mesh.size(axis)
            self.own_number += self.mesh.get_local_rank(axis)

    def gather(self, x: Tensor) -> Tensor:
        """Gather the whole matrices. x: this rank's shard of them. Collective."""
        if not is_dtensor(self.p):
            return x
        x = with_local(self.p, x.to(self.mesh.device_type))  # offloaded gradients are on the host
        return x.redistribute(placements=self.target).to_local()

    def share(self, own: Any, number: int, like: Tensor) -> Tensor:
        """Broadcast the matrices of the rank with index `number`, in `like`'s dtype. Collective."""
        if number != self.own_number:
            shape = self._part(self.target)[0]
            own = torch.empty(shape, dtype=like.dtype, device=self.mesh.device_type)
        for axis in reversed(self.axes):
            number, place = divmod(number, self.mesh.size(axis))
            dist.broadcast(own, group=self.mesh.get_group(axis), group_src=place)
        return own

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of whole matrices."""
        if not is_dtensor(self.p):
            return whole
        shape, offsets = self._part(self.p.placements)
        starts = [a - b for a, b in zip(offsets, self._part(self.target)[1], strict=True)]
        return whole[tuple(slice(a, a + n) for a, n in zip(starts, shape, strict=True))]

    def _part(self, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if not is_dtensor(self.p):
            return tuple(self.p.shape), (0,) * self.p.ndim
        return local_shape_and_offsets(self.p.shape, self.mesh, placements)


def orthogonalize(x: Tensor, coefficients: Sequence[float], steps: int) -> Tensor:
    """Return x [m, n] or [E, m, n] with the singular values of each matrix near 1.

    The Newton-Schulz iteration of torch.optim.Muon, in the dtype of x.
    """
    if x.ndim == 3 and len(x) and x.device.type == "cpu":
        # One matrix at a time: on the CPU batched products round differently, and on a GPU they would only save
        # kernel launches.
        return torch.stack([orthogonalize(matrix, coefficients, steps) for matrix in x])
    a, b, c = coefficients
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    is_tall = x.size(-2) > x.size(-1)
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def adjustment(m: int, n: int, adjust_lr_fn: str) -> float:
    """Return torch.optim.Muon's factor on the learning rate of a matrix [m, n]."""
    if adjust_lr_fn == "original":
        return math.sqrt(max(1, m / n))
    return 0.2 * math.sqrt(max(m, n))  # Liu et al. 2025, arXiv:2502.16982
