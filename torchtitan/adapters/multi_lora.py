"""Multi-LoRA: one pass over the base model for rows of several models with different adapters.

The models' A and B are stacked; each row's low-rank product uses the A and B of the row's model.
Experts' tokens are sorted by expert and then by model (`AdaptedExperts.groups`). All stacks of a pass
are views of one buffer, so matrices with the same process groups share one all-reduce.

m models, E experts, r rank, K inputs and N outputs of a layer.
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
    own_slices,
    with_local,
)
from torchtitan.numerics.low_rank import LowRank
from torchtitan.tools.compiler import uncompiled
from torchtitan.tools.host_copy import to_device
from torchtitan.tools.torch_parts import name_without_wrappers


class Stacked:
    """The stacked adapters of a module. passes: the `MultiLoRA` that knows each row's model.

    pairs: weight name -> (A [m, r, K], B [m, N, r]); for experts ([m, E, r, K], [m, E, N, r]).
    """

    def __init__(self, pairs: dict[str, tuple[Tensor, Tensor]], passes: "MultiLoRA"):
        self.pairs, self.passes = pairs, passes

    def low_rank(self, x: Tensor, scale: float, product: Callable[..., Tensor]) -> LowRank:
        """Return the low-rank product of x [B, T, K] or [B * T, K]. product: the matmul function."""
        counts, order = self.passes.counts, self.passes.order
        tokens_per_row = x.shape[:-1].numel() // sum(counts)
        sizes = [n_rows * tokens_per_row for n_rows in counts]
        return LowRank(x, *self.pairs["weight"], sizes, scale, order, product)

    def models_of_tokens(self, n_tokens: int) -> tuple[Tensor, int]:
        """Return the model index of each token [n_tokens], and the number of models."""
        models, counts = self.passes.models, self.passes.counts
        return models.repeat_interleave(n_tokens // len(models)), len(counts)


def reasons_for_turns(
    job_config: JobConfig, parallel_dims: ParallelDims, parts: Sequence[nn.Module]
) -> list[str]:
    """Return the reasons why models cannot share a forward and backward pass; [] if they can."""
    adapted = adapter_names(adapted_weights(parts))
    reasons = [
        f"{name}, which lora.also_train trains whole, acts on every row"
        for part in parts
        for name, parameter in part.named_parameters()
        if parameter.requires_grad and name_without_wrappers(name) not in adapted
    ][:1]
    if parallel_dims.pp_enabled and splits_backward(job_config.parallelism):
        reasons.append("shared passes are untested under schedules that split the backward pass")
    return reasons


class _Matrix(NamedTuple):
    """An A or B matrix, and this rank's part of it.

    shape: shape of the matrix that this rank computes with; under TP or EP, the shape of its shard.
    own: the slices of this matrix that are this rank's FSDP shard. shards: the process groups over which
    FSDP shards the matrix. sums: the process groups that sum the gradient.
    """

    name: str
    parameter: Tensor
    shape: tuple[int, ...]
    own: tuple[slice, ...]
    shards: tuple[dist.ProcessGroup, ...]
    sums: tuple[dist.ProcessGroup, ...]


def _matrix(name: str, parameter: Tensor, group: dist.ProcessGroup | None) -> _Matrix:
    """Return the `_Matrix` of an A or B. group: see `MultiLoRA`."""
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
    of_whole = zip(own_slices(parameter), begins, strict=True)
    own = tuple(slice(part.start - begin, part.stop - begin) for part, begin in of_whole)
    axes = list(enumerate(zip(placements, is_split, strict=True)))
    shards = [mesh.get_group(i) for i, (p, split) in axes if not split and not p.is_replicate()]
    # TP or EP axes along which this matrix is replicated; the ranks of such an axis have partial gradients.
    copies = [mesh.get_group(i) for i, (p, split) in axes if split and p.is_replicate()]
    if "ep" in names:  # an expert's gradient already contains the tokens of all EP ranks
        others = [mesh.get_group(i) for i, split in enumerate(is_split) if not split]
    return _Matrix(name, parameter, shape, own, tuple(shards), (*copies, *others))


class MultiLoRA:
    """Runs forward and backward passes in which each batch row uses the adapters of its model.

    parts: the sharded model. group: the ranks that share a step's rows and tokens (DP and CP); gradients
    are summed over it. has_ddp: the parts are DDP replicas, whose gradients are scaled for DDP's averaging.
    """

    def __init__(
        self, parts: Sequence[nn.Module], group: dist.ProcessGroup | None, has_ddp: bool = False
    ):
        self._parts, self._group, self._has_ddp = list(parts), group, has_ddp
        # Of the current microbatch: each row's model index, the number of rows per model, and the row
        # indices sorted by model (None if the rows are sorted already).
        self.models = torch.empty(0)
        self.counts: list[int] = []
        self.order: Tensor | None = None
        parameters: dict[str, Tensor] = {}
        modules: list[nn.Module] = []
        for part in self._parts:
            parameters |= {name_without_wrappers(n): p for n, p in part.named_parameters()}
            modules += [m for m in part.modules() if hasattr(m, "lora")]
        adapted = adapted_weights(self._parts)  # in the order of the modules and their weights
        self._layers = [(m, {name: next(adapted) for name in m.lora.scales}) for m in modules]
        names = [n for _, of_layer in self._layers for x in of_layer.values() for n in (x.a, x.b)]
        matrices = [_matrix(name, parameters[name], group) for name in names]
        # Matrices with the same process groups are adjacent in the buffer.
        kinds = [(matrix.shards, matrix.sums) for matrix in matrices]
        self._matrices = sorted(matrices, key=lambda x: kinds.index((x.shards, x.sums)))

    @contextlib.contextmanager
    def adapters(
        self, weights: Sequence[Mapping[str, Tensor]], trains: bool = True
    ) -> Iterator[list[dict[str, Tensor]]]:
        """A context in which microbatches use the adapters of several models; see `set_rows`. Collective.

        weights: for each model, name -> this rank's shard of that A or B. Yields an empty list. If `trains`,
        the end of the context appends each model's gradients: name -> gradient, sharded like the parameter.
        """
        gradients: list[dict[str, Tensor]] = []
        if not self._matrices:  # this pipeline stage has no adapters
            yield [{} for _ in weights]
            return
        buffer = self._gathered(weights)
        stacks = self._stacks(buffer, len(weights))
        stacks = {name: stack.detach().requires_grad_(trains) for name, stack in stacks.items()}
        sums = torch.zeros_like(buffer) if trains else None
        if sums is not None:
            for name, grad in self._stacks(sums, len(weights)).items():
                stacks[name].grad = grad  # backward accumulates into this view of `sums`
        self.counts, self.order = [0] * len(weights), None
        for module, adapted in self._layers:
            pairs = {name: (stacks[x.a], stacks[x.b]) for name, x in adapted.items()}
            module.lora_stacked = Stacked(pairs, self)
        for part in self._parts if self._has_ddp else ():
            part.set_requires_gradient_sync(False)  # the part's own parameters get no gradients
        try:
            with uncompiled():  # compiled blocks would recompile for every split of rows
                yield gradients
        finally:
            for part in self._parts if self._has_ddp else ():
                part.set_requires_gradient_sync(True)
            for module, _ in self._layers:
                module.lora_stacked = None
        if sums is not None:
            gradients += self._gradients(sums, len(weights))

    def set_rows(self, models: Sequence[int]) -> contextlib.AbstractContextManager[None]:
        """Set the model index of each row. Call before a microbatch's forward and before its backward."""
        order = sorted(range(len(models)), key=models.__getitem__)
        self.counts = [models.count(model) for model in range(len(self.counts))]
        device = self._matrices[0].parameter.device if self._matrices else "cpu"
        self.models = to_device(torch.tensor(models), device)
        is_sorted = order == list(range(len(models)))
        self.order = None if is_sorted else to_device(torch.tensor(order), device)
        return contextlib.nullcontext()

    def _sizes(self, n_models: int) -> list[int]:
        return [n_models * math.prod(matrix.shape) for matrix in self._matrices]

    def _stacks(self, buffer: Tensor, n_models: int) -> dict[str, Tensor]:
        pieces = zip(self._matrices, buffer.split(self._sizes(n_models)), strict=True)
        return {matrix.name: piece.view(n_models, *matrix.shape) for matrix, piece in pieces}

    def _all_reduce(
        self,
        buffer: Tensor,
        n_models: int,
        groups_of: Callable[[_Matrix], tuple[dist.ProcessGroup, ...]],
    ) -> None:
        """Sum the buffer over ranks, each matrix over the groups that `groups_of` returns."""
        pieces = zip(self._matrices, self._sizes(n_models), strict=True)
        begin = 0
        for groups, of_groups in itertools.groupby(pieces, lambda piece: groups_of(piece[0])):
            end = begin + sum(size for _, size in of_groups)
            for group in groups:
                dist.all_reduce(buffer[begin:end], group=group)
            begin = end

    def _gathered(self, weights: Sequence[Mapping[str, Tensor]]) -> Tensor:
        like, n_models = local_tensor(self._matrices[0].parameter), len(weights)
        buffer = like.new_zeros(sum(self._sizes(n_models)))
        stacks = self._stacks(buffer, n_models)
        for matrix in self._matrices:
            shards = [of_model[matrix.name].to(like.device) for of_model in weights]
            torch.stack(shards, out=stacks[matrix.name][(slice(None), *matrix.own)])
        # The all-reduce adds one rank's shard and the other ranks' zeros, so it acts as an all-gather.
        self._all_reduce(buffer, n_models, lambda matrix: matrix.shards)
        return buffer

    def _gradients(self, sums: Tensor, n_models: int) -> list[dict[str, Tensor]]:
        self._all_reduce(sums, n_models, lambda matrix: matrix.sums)
        if self._group is not None and self._has_ddp:
            # With DDP, a hook multiplies the gradients by the group's size to undo DDP's averaging. Here DDP
            # averages nothing, so divide.
            sums /= self._group.size()
        stacks = self._stacks(sums, n_models)

        def own_part(matrix: _Matrix, model: int) -> Tensor:
            own = stacks[matrix.name][(model, *matrix.own)]
            return with_local(matrix.parameter, own) if is_dtensor(matrix.parameter) else own

        return [{m.name: own_part(m, i) for m in self._matrices} for i in range(n_models)]
