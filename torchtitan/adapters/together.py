"""Adapters of several models in one pass over their base.

Each row of a batch belongs to a model. A layer's frozen product is computed once for all rows; the
low-rank products are computed for each model's rows with its own A and B, which are stacked. Experts'
tokens are sorted by expert and then by model (`AdaptedExperts.groups`).

m models, E experts, r rank, K inputs and N outputs of a layer, n tokens of all rows.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.adapters.lora import adapted_weights, adapter_names
from torchtitan.config import JobConfig
from torchtitan.config.pipeline_layout import splits_backward
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.dtensor import (
    is_dtensor,
    load_dtensor,
    local_shape_and_offsets,
    local_tensor,
    with_local,
)
from torchtitan.distributed.seeded_init import name_without_wrappers
from torchtitan.numerics.low_rank import LowRank
from torchtitan.tools.compiler import uncompiled
from torchtitan.tools.host_copy import to_device

# ---- one layer ----


class Stacked:
    """The adapters of a layer's weights. together: knows the models of the rows.

    pairs: of each weight, A [m, r, K] and B [m, N, r]; of experts [m, E, r, K] and [m, E, N, r].
    """

    def __init__(self, pairs: dict[str, tuple[Tensor, Tensor]], together: "AdaptersTogether"):
        self.pairs, self.together = pairs, together

    def low_rank(self, x: Tensor, scale: float, product: Callable[..., Tensor]) -> LowRank:
        """Return the low-rank product of x [B, T, K], or [B * T, K]. product: as in `LowRank`."""
        counts, order = self.together.counts, self.together.order
        tokens_per_row = x.shape[:-1].numel() // sum(counts)
        sizes = [n_rows * tokens_per_row for n_rows in counts]
        return LowRank(x, *self.pairs["weight"], sizes, scale, order, product)

    def models_of_tokens(self, n_tokens: int) -> tuple[Tensor, int]:
        """Return the models [n_tokens] of the tokens of all rows, and the number of models."""
        models, counts = self.together.models, self.together.counts
        return models.repeat_interleave(n_tokens // len(models)), len(counts)


# ---- the model ----


def reasons_for_turns(
    job_config: JobConfig, parallel_dims: ParallelDims, parts: Sequence[nn.Module]
) -> list[str]:
    """Return why models with adapters cannot share a pass; [] if they can."""
    adapted = adapter_names(adapted_weights(parts))
    trained = (
        name_without_wrappers(name)
        for part in parts
        for name, parameter in part.named_parameters()
        if parameter.requires_grad
    )
    whole = next((name for name in trained if name not in adapted), None)
    parallelism = job_config.parallelism
    reasons = {
        f"{whole}, which lora.also_train trains whole, is in every row": whole is not None,
        "shared passes were not tried where a pipeline splits backward": parallel_dims.pp_enabled
        and splits_backward(parallelism),
    }
    return [reason for reason, applies in reasons.items() if applies]


class _Matrix(NamedTuple):
    """An A or B, and this rank's part of it.

    shape: of the part that this rank computes with: whole, or tensor or expert parallelism's part.
    own: where this rank's shard is in it. shards: the groups that have the other shards.
    sums: the groups over which its gradient is summed.
    """

    name: str
    parameter: Tensor
    shape: tuple[int, ...]
    own: tuple[slice, ...]
    shards: tuple[dist.ProcessGroup, ...]
    sums: tuple[dist.ProcessGroup, ...]


def _matrix(name: str, parameter: Tensor, group: dist.ProcessGroup | None) -> _Matrix:
    """group: the ranks that have other rows or tokens."""
    shape, own = tuple(parameter.shape), tuple(slice(0, size) for size in parameter.shape)
    others = [] if group is None else [group]
    if not is_dtensor(parameter):
        return _Matrix(name, parameter, shape, own, (), tuple(others))
    mesh, placements = parameter.device_mesh, parameter.placements
    names = mesh.mesh_dim_names or ()
    is_split = [axis in ("tp", "ep", "etp") for axis in names]
    replicate = load_dtensor().Replicate()
    computed = [p if split else replicate for p, split in zip(placements, is_split, strict=True)]
    shape, begins = local_shape_and_offsets(parameter.shape, mesh, computed)
    own_shape, own_begins = local_shape_and_offsets(parameter.shape, mesh, placements)
    own = tuple(
        slice(o - b, o - b + n) for o, b, n in zip(own_begins, begins, own_shape, strict=True)
    )
    axes = list(enumerate(zip(placements, is_split, strict=True)))
    shards = [mesh.get_group(i) for i, (p, split) in axes if not split and not p.is_replicate()]
    # Ranks that compute with the same part, for other inputs or outputs.
    copies = [mesh.get_group(i) for i, (p, split) in axes if split and p.is_replicate()]
    if "ep" in names:  # the gradient has the tokens of all ranks of this axis
        others = [mesh.get_group(i) for i, split in enumerate(is_split) if not split]
    return _Matrix(name, parameter, shape, own, tuple(shards), (*copies, *others))


class AdaptersTogether:
    """Computes passes in which each row has the adapters of its model.

    parts: the model, with its parameters sharded. group: the ranks that have other rows or tokens,
    over which gradients are summed; None without. has_ddp: the parts scale gradients for DDP.
    """

    def __init__(
        self, parts: Sequence[nn.Module], group: dist.ProcessGroup | None, has_ddp: bool = False
    ):
        self._parts, self._group, self._has_ddp = list(parts), group, has_ddp
        # Of the current microbatch: each row's model, rows of each model, and the rows sorted by model,
        # None if they are.
        self.models = torch.empty(0)
        self.counts: list[int] = []
        self.order: Tensor | None = None
        self._modules: list[nn.Module] = []
        parameters: dict[str, Tensor] = {}
        for part in self._parts:
            parameters |= {name_without_wrappers(n): p for n, p in part.named_parameters()}
            self._modules += [m for m in part.modules() if hasattr(m, "lora")]
        names = [name for one in adapted_weights(self._parts) for name in (one.a, one.b)]
        self._matrices = [_matrix(name, parameters[name], group) for name in names]
        # In the buffers, matrices with the same groups are next to each other.
        kinds = [(matrix.shards, matrix.sums) for matrix in self._matrices]
        order = sorted(range(len(names)), key=lambda i: kinds.index(kinds[i]))
        self._places = [order.index(i) for i in range(len(names))]
        self._ordered = [self._matrices[i] for i in order]

    @contextlib.contextmanager
    def adapters(
        self, weights: Sequence[Mapping[str, Tensor]], trains: bool = True
    ) -> Iterator[list[dict[str, Tensor]]]:
        """Compute with these models' adapters inside, in microbatches after `set_rows`. Collective.

        weights: of each model, this rank's part of its A and B, by name, also in host memory. trains:
        yields a list that gets each model's gradients at the end, in the layout of the parameters.
        """
        gradients: list[dict[str, Tensor]] = []
        if not self._matrices:  # a pipeline stage without adapters
            yield [{} for _ in weights]
            return
        like = local_tensor(self._matrices[0].parameter)
        n_values = len(weights) * sum(math.prod(matrix.shape) for matrix in self._ordered)
        values = like.new_empty(n_values)
        stacks = self._views(values, len(weights))
        for matrix, stack in zip(self._matrices, stacks, strict=True):
            own = [of_model[matrix.name].to(like.device) for of_model in weights]
            if matrix.shards:
                stack.zero_()[(slice(None), *matrix.own)] = torch.stack(own)
            else:
                torch.stack(own, out=stack)
        # Each sum is of one rank's value and the other ranks' zeros.
        self._reduce(values, len(weights), lambda matrix: matrix.shards)
        sums = torch.zeros_like(values) if trains else values
        leaves = [stack.detach().requires_grad_(trains) for stack in stacks]
        for leaf, grad in zip(leaves, self._views(sums, len(weights)), strict=True):
            leaf.grad = grad if trains else None
        self.counts, self.order = [0] * len(weights), None
        pairs = iter(zip(leaves[::2], leaves[1::2], strict=True))
        for module in self._modules:
            module.lora_stacked = Stacked({name: next(pairs) for name in module.lora.scales}, self)
        for part in self._parts if self._has_ddp else ():
            part.set_requires_gradient_sync(False)  # its parameters get no gradients
        try:
            with uncompiled():  # compiled blocks would be compiled for every division of rows
                yield gradients
        finally:
            for part in self._parts if self._has_ddp else ():
                part.set_requires_gradient_sync(True)
            for module in self._modules:
                module.lora_stacked = None
        if trains:
            gradients += self._summed(sums, len(weights))

    def set_rows(self, models: Sequence[int]) -> contextlib.AbstractContextManager[None]:
        """Call before a microbatch's forward, and before its backward; the context does nothing.

        models: of the microbatch's rows.
        """
        order = sorted(range(len(models)), key=models.__getitem__)
        self.counts = [models.count(model) for model in range(len(self.counts))]
        device = self._matrices[0].parameter.device if self._matrices else "cpu"
        self.models = to_device(torch.tensor(models), device)
        is_sorted = order == list(range(len(models)))
        self.order = None if is_sorted else to_device(torch.tensor(order), device)
        return contextlib.nullcontext()

    def _views(self, values: Tensor, n_models: int) -> list[Tensor]:
        """Return the stack [m, ...] of each matrix in a buffer of all, in the order of `_matrices`."""
        sizes = [n_models * math.prod(matrix.shape) for matrix in self._ordered]
        pieces = values.split(sizes)
        return [
            pieces[place].view(n_models, *matrix.shape)
            for place, matrix in zip(self._places, self._matrices, strict=True)
        ]

    def _reduce(
        self,
        values: Tensor,
        n_models: int,
        groups_of: Callable[[_Matrix], tuple[dist.ProcessGroup, ...]],
    ) -> None:
        """Sum a buffer of all matrices over ranks, each matrix over its groups."""
        begin = 0
        for groups, matrices in itertools.groupby(self._ordered, groups_of):
            end = begin + n_models * sum(math.prod(matrix.shape) for matrix in matrices)
            for group in groups:
                dist.all_reduce(values[begin:end], group=group)
            begin = end

    def _summed(self, sums: Tensor, n_models: int) -> Iterator[dict[str, Tensor]]:
        """Sum the gradients over ranks, and yield this rank's part of each model's."""
        self._reduce(sums, n_models, lambda matrix: matrix.sums)
        if self._group is not None and self._has_ddp:
            sums /= self._group.size()  # its hook has multiplied them, because DDP averages
        of_models = [
            (stack[(slice(None), *matrix.own)] if matrix.shards else stack).unbind()
            for matrix, stack in zip(self._matrices, self._views(sums, n_models), strict=True)
        ]
        for model in range(n_models):
            yield {
                m.name: with_local(m.parameter, of[model]) if is_dtensor(m.parameter) else of[model]
                for m, of in zip(self._matrices, of_models, strict=True)
            }
