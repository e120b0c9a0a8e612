"""Finds the weight elements that changed since the last send to rollouts, without gathering weights.

Used by verl's checkpoint engine `delta_sharded`. Each rank compares its shards (blocks) of weights with
copies in host memory. If several ranks hold the same block, the first of these ranks reports it.
"""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from verl.checkpoint_engine.delta_sync.sparse_gather import shard_delta_indices
from verl.workers.engine.spec import BlockPlacement, translate_flat_indices

from torchtitan.distributed.dtensor import LocalShard
from torchtitan.distributed.processes.ranks import all_ranks
from torchtitan.engine import TrainingEngine

Block = tuple[str, tuple[int, ...]]
"""(a weight's Hugging Face name, the block's offsets in each dimension)"""

Entry = tuple[list[tuple[str, tuple[int, ...]]], str, Tensor, Tensor, Tensor, dist.ProcessGroup]
"""([(name, shape)], name of the dtype, number of changes n as a tensor [1], flat indices of the changed
elements as int32 [n], their new values [n], the process group of the ranks that share the weight)"""


class WeightDeltas:
    """Iterates over the changes of all weights since the last iteration, or since `prime`.

    Collective: all ranks construct, prime and iterate together. dtype: dtype of the weights in rollouts.
    Raises ValueError for a weight whose flat indices don't fit in 32 bits.
    """

    def __init__(self, engine: TrainingEngine, dtype: torch.dtype):
        self._engine, self._dtype = engine, dtype
        held = [
            (name, tuple(shard.offsets), tuple(shard.shape), shard.tensor.dtype)
            for name, shard in self._shards()
        ]
        # name -> (shape, dtype), in the same order on all ranks
        self._weights: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        # block -> the first rank that holds the block
        owners: dict[Block, int] = {}
        for rank, blocks in enumerate(all_ranks(held)):
            for name, offsets, shape, weight_dtype in blocks:
                self._weights.setdefault(name, (shape, weight_dtype))
                owners.setdefault((name, offsets), rank)
        for name, (shape, _) in self._weights.items():
            if math.prod(shape) >= 2**31:
                raise ValueError(
                    f"sharded deltas need weights of fewer than 2**31 elements, got {name} of shape "
                    f"{shape}; choose another checkpoint engine of verl"
                )
        self._own = {block for block, owner in owners.items() if owner == dist.get_rank()}
        self._sent: dict[Block, Tensor] = {}

    def _shards(self) -> Iterator[tuple[str, LocalShard]]:
        return iter(self._engine.iter_hf_weights(dtype=self._dtype, sharded=True))

    def prime(self) -> None:
        """Copy the current weights, which rollouts have just received."""
        for name, shard in self._shards():
            block = name, tuple(shard.offsets)
            if block in self._own:
                self._sent[block] = shard.tensor.detach().flatten().to("cpu", copy=True)

    def __iter__(self) -> Iterator[Entry]:
        """Yield one entry per weight, in the same order on every rank, and record the changes as sent."""
        device = self._engine.device
        positions: dict[str, list[Tensor]] = {name: [] for name in self._weights}
        values: dict[str, list[Tensor]] = {name: [] for name in self._weights}
        for name, shard in self._shards():
            block = name, tuple(shard.offsets)
            if block not in self._own:
                continue
            now = shard.tensor.detach().to(device).flatten()
            local, changed = shard_delta_indices(now, self._sent[block].to(device), 0)
            self._sent[block].copy_(now)
            place = BlockPlacement(tuple(shard.tensor.shape), block[1], tuple(shard.shape))
            positions[name].append(translate_flat_indices(local, place).int())
            values[name].append(changed)
        for name, (shape, dtype) in self._weights.items():
            nothing = torch.empty(0, device=device)
            where = torch.cat([*positions.pop(name), nothing.int()])
            what = torch.cat([*values.pop(name), nothing.to(dtype)])
            count = torch.tensor([where.numel()])
            dtype_name = str(dtype).removeprefix("torch.")
            yield [(name, shape)], dtype_name, count, where, what, dist.group.WORLD
