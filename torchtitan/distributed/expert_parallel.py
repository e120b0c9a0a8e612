"""Expert parallelism: each rank of a mesh holds some of the experts, and tokens travel to them.

R ranks of the `ep` axis, E experts of which each rank holds e = E / R, N (token, expert) pairs of
one rank, D model dim. The experts of a layer compute on pairs grouped by expert. One all-to-all
comes before the experts, and one after:

    dispatch   [N, D], ordered by expert -> [M, D], all ranks' pairs for this rank's e experts
    combine    sends the results back: [M, D] -> [N, D]

Every rank enters every all-to-all, in backward too, even without any pairs.

Under tensor parallelism all ranks of the `tp` axis have the same pairs. Either each rank dispatches a
share of the pairs (`ReordererSequenceParallel`), or experts are split by hidden units over an axis `etp`
of the same ranks (`ExpertTensorParallel`). With `ExpertTensorParallel` or `TensorParallel`, a rank's
result is one summand of the whole result, and so is the gradient of its input.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ParallelStyle

from torchtitan.distributed.collectives import AllToAll, all_to_all
from torchtitan.distributed.deepep import dispatch_tokens
from torchtitan.distributed.device_reads import read_once
from torchtitan.distributed.tensor_parallel import split_parameter
from torchtitan.distributed.token_groups import (
    kernel_alignment,
    permute_tokens,
    unpermute_tokens,
)

SWIGLU_HIDDEN_DIMS: Mapping[str, int | None] = {"w1": 1, "w2": 2, "w3": 1}
"""Parameter of `GroupedExperts` -> its dimension of hidden units; None keeps the parameter whole."""


class TensorParallel(ParallelStyle):
    """Splits experts by hidden units over a 1-D mesh, without communication. Raises ValueError for a
    parameter that is not in `hidden_dims`."""

    def __init__(self, hidden_dims: Mapping[str, int | None] = SWIGLU_HIDDEN_DIMS) -> None:
        super().__init__()
        self.hidden_dims = hidden_dims

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _split(module, device_mesh, [], self.hidden_dims)
        return module


class BaseExpertParallel(ParallelStyle, ABC):
    """Splits a module of experts, and wraps the module's forward in dispatch and combine.

    The module is called with (tokens [N, D] grouped by expert, tokens per expert [E]). Use one object per
    module, because dispatch stores values in the object for the next combine.
    """

    @abstractmethod
    def _partition_fn(self, name: str, mod: nn.Module, device_mesh: DeviceMesh) -> None:
        """Replace the module's own parameters by this rank's shares."""

    @abstractmethod
    def _token_dispatch(
        self, mod: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh
    ) -> tuple[Tensor, Tensor]:
        """Return the input of this rank's experts: tokens [M, D] and their counts [e]."""

    @abstractmethod
    def _token_combine(
        self, mod: nn.Module, routed_output: Tensor, device_mesh: DeviceMesh
    ) -> Tensor:
        """Return the results [N, D] for this rank's tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            partition_fn=self._partition_fn,
            input_fn=self._token_dispatch,
            output_fn=self._token_combine,
        )


class ExpertParallel(BaseExpertParallel):
    """Distributes whole experts over a 1-D mesh: rank r holds experts r * e to (r + 1) * e - 1."""

    def __init__(self) -> None:
        super().__init__()
        self.input_splits: list[int] = []
        self.output_splits: list[int] = []
        self.input_shape: torch.Size | None = None
        self.permuted_indices: Tensor | None = None
        self._announced: _Exchange | None = None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def announce_counts(num_tokens_per_expert: Tensor) -> None:
            """Start the all-to-all of the next dispatch's counts [E] early, while the device is busy."""
            self._announced = _begin_exchange(num_tokens_per_expert, _ep_axis(device_mesh))

        module.announce_counts = announce_counts
        return super()._apply(module, device_mesh)

    def _partition_fn(self, name: str, mod: nn.Module, device_mesh: DeviceMesh) -> None:
        _split(mod, device_mesh, [0])

    def _token_dispatch(
        self, mod: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh
    ) -> tuple[Tensor, Tensor]:
        routed, num_tokens_per_expert = inputs
        mesh = _ep_axis(device_mesh)
        num_ranks, group = mesh.size(), mesh.get_group().group_name
        exchange, self._announced = self._announced, None
        if exchange is None or exchange.sent is not num_tokens_per_expert:
            exchange = _begin_exchange(num_tokens_per_expert, mesh)
        self.input_splits, self.output_splits = read_once(exchange.wait_for_splits)
        routed = AllToAll.apply(routed, self.output_splits, self.input_splits, group)
        self.input_shape, routed, self.permuted_indices, padded_counts = permute_tokens(
            routed,
            exchange.received,
            num_ranks,
            experts_per_rank=num_tokens_per_expert.shape[0] // num_ranks,
            alignment=kernel_alignment(routed.device),
        )
        return routed, padded_counts

    def _token_combine(
        self, mod: nn.Module, routed_output: Tensor, device_mesh: DeviceMesh
    ) -> Tensor:
        group = _ep_axis(device_mesh).get_group().group_name
        out = unpermute_tokens(routed_output, self.input_shape, self.permuted_indices)
        return AllToAll.apply(out, self.input_splits, self.output_splits, group)


class ExpertTensorParallel(ExpertParallel):
    """Distributes experts over the axis `ep` of a mesh [ep, etp], and splits each expert along `etp`."""

    def __init__(self, hidden_dims: Mapping[str, int | None] = SWIGLU_HIDDEN_DIMS) -> None:
        super().__init__()
        self.hidden_dims = hidden_dims

    def _partition_fn(self, name: str, mod: nn.Module, device_mesh: DeviceMesh) -> None:
        _split(mod, device_mesh, [0], self.hidden_dims)


class ReordererSequenceParallel(ParallelStyle):
    """Makes a `TokenReorderer` reorder only this rank's share of tokens that all ranks hold.

    The reorderer gets scores and experts [T, k], k per token. It returns indices among all T * k pairs.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        first_pair = 0

        def own_tokens(module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> tuple:
            nonlocal first_pair
            top_scores, selected = inputs
            num_tokens, top_k = top_scores.shape
            share = -(-num_tokens // mesh.size())
            first = min(share * mesh.get_local_rank(), num_tokens)
            first_pair = first * top_k
            own = slice(first, first + share)
            return top_scores[own], selected[own]

        def number_in_all(module: nn.Module, outputs: tuple, mesh: DeviceMesh) -> tuple:
            scores, pairs, counts = outputs
            return scores, pairs + first_pair, counts

        return distribute_module(module, device_mesh, input_fn=own_tokens, output_fn=number_in_all)


DeepEPExpertParallel = dispatch_tokens


def _split(
    experts: nn.Module,
    mesh: DeviceMesh,
    dims: list[int | None],
    hidden_dims: Mapping[str, int | None] | None = None,
) -> None:
    """Split every parameter along dims[i] over mesh axis i.

    hidden_dims: name of a parameter -> the dimension to split over mesh axis len(dims).
    """
    for name, parameter in list(experts.named_parameters(recurse=False)):
        if hidden_dims is not None and name not in hidden_dims:
            raise ValueError(
                f"hidden_dims has no entry for the experts' parameter {name!r}, only for "
                f"{', '.join(map(repr, hidden_dims))}; add its dimension of hidden units, or None"
            )
        all_dims = dims if hidden_dims is None else [*dims, hidden_dims[name]]
        share = split_parameter(f"the experts' {name}", parameter, mesh, all_dims)
        experts.register_parameter(name, share)


def _ep_axis(mesh: DeviceMesh) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else mesh["ep"]


@dataclass
class _Exchange:
    """The result of an all-to-all of token counts per expert.

    sent: [E], this rank's counts. received: [R * e], every rank's counts for this rank's experts.
    splits: [2, R], the sums of `sent` and `received` per rank; on the host, valid after the event `copied`.
    """

    sent: Tensor
    received: Tensor
    splits: Tensor
    copied: torch.Event | None

    def wait_for_splits(self) -> list[list[int]]:
        """Return the numbers of rows sent to, and received from, each rank. Waits for the device."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.splits.tolist()


@torch.no_grad()
def _begin_exchange(sent: Tensor, mesh: DeviceMesh) -> _Exchange:
    num_ranks = mesh.size()
    even = [sent.shape[0] // num_ranks] * num_ranks
    received = all_to_all(sent, even, even, mesh.get_group().group_name)
    sums = torch.stack([sent, received]).unflatten(1, (num_ranks, -1)).sum(dim=2)
    splits = sums.to("cpu", non_blocking=True)
    copied = None
    if sent.device.type != "cpu":
        copied = torch.get_device_module(sent.device).Event()
        copied.record()
    return _Exchange(sent, received, splits, copied)
