"""What context parallelism does to a batch: pad rows, keep a rank's tokens, join outputs again.

B rows, T tokens per row, cp ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from torchtitan.batch.documents import (
    IGNORE_INDEX,
    PADDING,
    document_ids_from_cu_seqlens,
)
from torchtitan.config.context_layout import sequence_multiple
from torchtitan.config.job_config import Parallelism
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel import (
    TokenShards,
    positions_of_rank,
    prepare_context_parallel_input,
    shards_of,
)

Batch = dict[str, Any]

# What is put behind a row; 0 for entries that are not listed.
_PADDING_OF = {"positions": PADDING, "document_ids": PADDING, "labels": IGNORE_INDEX}


@dataclass(frozen=True)
class ContextSharding:
    """The choices of one job; its methods see whole rows, and return what this rank works on."""

    mesh: DeviceMesh
    load_balancer: str | None
    rotate_method: str

    @classmethod
    def of(cls, parallel_dims: ParallelDims, config: Parallelism) -> "ContextSharding | None":
        """None without context parallelism."""
        if not parallel_dims.cp_enabled:
            return None
        return cls(
            parallel_dims.get_mesh("cp"),
            config.context_parallel_load_balancer or None,
            config.context_parallel_rotate_method,
        )

    def pad(self, batch: Batch, labels: Tensor | None) -> tuple[Batch, Tensor | None]:
        """Lengthen rows at their end until they divide over the ranks.

        Nothing sees the added tokens, and they count in no loss.
        Raises ValueError if the batch brings a kernel's attention masks, which cannot be
        lengthened; a padding mask [B, T] can.
        """
        n_rows, seq_len = batch["input"].shape
        n_more = -seq_len % sequence_multiple(self.load_balancer, self.mesh.size())
        if not n_more:
            return batch, labels
        if not isinstance(batch.get("attention_masks"), Tensor | None):
            raise ValueError(
                f"rows of {seq_len} tokens with attention_masks of their own don't divide over "
                f"{self.mesh.size()} context-parallel ranks; pad both to a multiple of "
                f"{sequence_multiple(self.load_balancer, self.mesh.size())} tokens"
            )
        padded = {
            key: _lengthen(value, n_more, _PADDING_OF.get(key, 0))
            if key not in ("seq_lens", "cu_seqlens") and _has_tokens(value, n_rows, seq_len)
            else value
            for key, value in batch.items()
        }
        cu_seqlens = padded.get("cu_seqlens")
        if cu_seqlens is not None and cu_seqlens.dim() == 1:
            # It counts through rows laid end to end, which are longer now.
            ids = document_ids_from_cu_seqlens(cu_seqlens[None], n_rows * seq_len)
            padded["document_ids"] = _lengthen(ids.view(n_rows, seq_len), n_more, PADDING)
            del padded["cu_seqlens"]
        return padded, None if labels is None else _lengthen(labels, n_more, IGNORE_INDEX)

    def shard(
        self, inputs: Tensor, labels: Tensor | None, extra_inputs: Batch, extra_kwargs: Batch
    ) -> tuple[Tensor, Tensor | None, Batch, Batch]:
        """Return the same four for this rank's tokens; masks and positions in the last one."""
        extra_inputs = dict(extra_inputs)
        for key in ("positions", "attention_masks"):
            if key in extra_inputs:
                extra_kwargs = {**extra_kwargs, key: extra_inputs.pop(key)}
        n_rows, seq_len = inputs.shape
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
        shards = shards_of(masks)
        assert shards is not None, "prepare_context_parallel_input has made them"
        extra_kwargs["positions"] = positions_of_rank(
            masks, extra_kwargs.get("positions"), inputs.shape[1]
        )
        return inputs, labels, _shard(extra_inputs, shards, n_rows, seq_len), extra_kwargs


def shard_batch(batch: Batch, shards: TokenShards) -> Batch:
    """Return the batch with this rank's tokens alone, [B, T, ...] -> [B, T/cp, ...]."""
    return _shard(batch, shards, *batch["input"].shape)


def join_outputs(outputs: Any, shards: TokenShards, n_tokens: int, seq_len: int) -> Any:
    """Return outputs for whole rows: tensors [B, T/cp, ...] become [B, T, ...], others stay.

    n_tokens: T/cp. seq_len: what is left of T after padding is cut off. Collective over the
    ranks that share the rows; they have to give outputs of the same structure. No gradient.
    """

    def join(x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[1] != n_tokens:
            return x
        return shards.unshard(x)[:, :seq_len]

    return tree_map_only(torch.Tensor, join, outputs)


def _shard(batch: Batch, shards: TokenShards, n_rows: int, seq_len: int) -> Batch:
    return {
        key: shards.shard(value) if _has_tokens(value, n_rows, seq_len) else value
        for key, value in batch.items()
    }


def _has_tokens(value: Any, n_rows: int, seq_len: int) -> bool:
    """Whether it is [B, T, ...], or [1, T, ...] for all rows."""
    return (
        isinstance(value, Tensor)
        and value.dim() >= 2
        and value.shape[0] in (1, n_rows)
        and value.shape[1] == seq_len
    )


def _lengthen(x: Tensor, n_more: int, value: int) -> Tensor:
    more = x.new_full((x.shape[0], n_more, *x.shape[2:]), value)
    return torch.cat((x, more), dim=1)
