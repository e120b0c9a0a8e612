"""Context parallelism of a batch: pad rows, keep a rank's tokens, join the ranks' outputs.

B rows, T tokens per row, cp ranks.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from torchtitan.batch.batch import Entries, PackedBatch
from torchtitan.batch.mask import positions_of_rank, prepare_context_parallel_input, shards_of
from torchtitan.config.context_layout import sequence_multiple
from torchtitan.config.job_config import Parallelism
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel import TokenShards


@dataclass(frozen=True)
class ContextSharding:
    """Shards the batches of a job: whole rows go in, this rank's tokens come out."""

    mesh: DeviceMesh
    load_balancer: str | None
    rotate_method: str

    @classmethod
    def of(cls, parallel_dims: ParallelDims, config: Parallelism) -> "ContextSharding | None":
        """Return the sharding of a job, or None without context parallelism."""
        if not parallel_dims.cp_enabled:
            return None
        return cls(
            parallel_dims.get_mesh("cp"),
            config.context_parallel_load_balancer or None,
            config.context_parallel_rotate_method,
        )

    def pad(self, batch: PackedBatch) -> PackedBatch:
        """Pad rows at their end until the ranks can share them equally.

        No token attends to the padding, and no loss includes it.
        Raises ValueError if the batch has a kernel's attention masks, which cannot be padded; a
        padding mask [B, T] can.
        """
        seq_len = batch.tokens.shape[1]
        multiple = sequence_multiple(self.load_balancer, self.mesh.size())
        n_more = -seq_len % multiple
        if not n_more:
            return batch
        if not isinstance(batch.entries.get("attention_masks"), Tensor | None):
            raise ValueError(
                f"rows of {seq_len} tokens with their own attention_masks don't divide over "
                f"{self.mesh.size()} context-parallel ranks; pad both to a multiple of "
                f"{multiple} tokens"
            )

        def lengthen(x: Tensor, padding: int) -> Tensor:
            more = x.new_full((x.shape[0], n_more, *x.shape[2:]), padding)
            return torch.cat((x, more), dim=1)

        longer = batch.with_tokens(lengthen)
        cu_seqlens = batch.entries.get("cu_seqlens")
        if cu_seqlens is not None and cu_seqlens.dim() == 1 and batch.document_ids is not None:
            # These lengths count through rows laid end to end, and the rows are longer now.
            entries = {key: x for key, x in longer.entries.items() if key != "cu_seqlens"}
            entries["document_ids"] = longer.document_ids
            longer = replace(longer, entries=entries)
        return longer

    def shard(
        self, inputs: Tensor, labels: Tensor | None, extra_inputs: Entries, extra_kwargs: Entries
    ) -> tuple[Tensor, Tensor | None, Entries, Entries]:
        """Return the four arguments for this rank's tokens.

        Masks and positions are moved to the last one, `extra_kwargs`.
        """
        extra_inputs = dict(extra_inputs)
        for key in ("positions", "attention_masks"):
            if key in extra_inputs:
                extra_kwargs = {**extra_kwargs, key: extra_inputs.pop(key)}
        whole = inputs
        inputs, labels, extra_kwargs = prepare_context_parallel_input(
            inputs,
            labels,
            extra_kwargs,
            self.mesh,
            inputs.device,
            self.load_balancer,
            self.rotate_method,
        )
        masks = extra_kwargs["attention_masks"]
        extra_kwargs["positions"] = positions_of_rank(
            masks, extra_kwargs.get("positions"), inputs.shape[1]
        )
        shards = shards_of(masks)
        assert shards is not None, (
            "prepare_context_parallel_input makes masks that know their shards"
        )
        whole_rows = PackedBatch(whole, entries=extra_inputs)
        extra_inputs = dict(shard_batch(whole_rows, shards).entries)
        return inputs, labels, extra_inputs, extra_kwargs


def shard_batch(batch: PackedBatch, shards: TokenShards) -> PackedBatch:
    """Return the batch with this rank's tokens only, [B, T, ...] -> [B, T/cp, ...]."""
    return batch.with_tokens(lambda x, _padding: shards.shard(x))


def join_outputs(outputs: Any, shards: TokenShards, n_tokens: int, seq_len: int) -> Any:
    """Return outputs for whole rows: tensors [B, T/cp, ...] become [B, T, ...].

    Other values stay as they are. n_tokens: T/cp. seq_len: the rows' length without padding, which
    is cut off. Collective over the ranks that share the rows; their outputs must have the same
    structure. Each rank gets the gradient of its own tokens.
    """

    def join(x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[1] != n_tokens:
            return x
        return shards.unshard(x)[:, :seq_len]

    return tree_map_only(torch.Tensor, join, outputs)
