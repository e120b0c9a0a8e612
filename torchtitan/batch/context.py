"""Context parallelism of a batch: pad rows, keep a rank's tokens and mask, join the ranks' outputs.

B rows, T tokens per row, cp ranks.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.batch.batch import Entries, TokenBatch
from torchtitan.batch.mask import (
    DocumentMask,
    Masks,
    positions_of_rank,
    shards_of,
    starts_from_boundaries,
)
from torchtitan.config.context_layout import sequence_multiple
from torchtitan.config.job_config import Parallelism
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel import (
    ContextPart,
    TokenShards,
    deal_chunks,
    needed_keys,
)
from torchtitan.tools import torch_parts
from torchtitan.tools.host_copy import fetch, to_device


@dataclass(frozen=True)
class ContextSharding:
    """Shards a job's batches: takes whole rows, and returns this rank's tokens of each row."""

    mesh: DeviceMesh
    load_balancer: str | None
    rotate_method: str

    @classmethod
    def from_parallelism(
        cls, parallel_dims: ParallelDims, config: Parallelism
    ) -> "ContextSharding | None":
        """Return the sharding of a job, or None without context parallelism."""
        if not parallel_dims.cp_enabled:
            return None
        return cls(
            parallel_dims.get_mesh("cp"),
            config.context_parallel_load_balancer or None,
            config.context_parallel_rotate_method,
        )

    def pad(self, batch: TokenBatch) -> TokenBatch:
        """Pad rows at their end until the ranks can share them equally.

        Raises ValueError if rows need padding and the batch has an attention kernel's masks. A padding
        mask [B, T] is padded with the rows.
        """
        seq_len = batch.tokens.shape[1]
        multiple = sequence_multiple(self.load_balancer, self.mesh.size())
        n_more = -seq_len % multiple
        if not n_more:
            return batch
        if not isinstance(batch.entries.get("attention_masks"), Tensor | None):
            raise ValueError(
                f"rows of {seq_len} tokens with their own attention_masks don't divide over "
                f"{self.mesh.size()} context-parallel ranks; pad the rows and "
                f"the masks to a multiple of {multiple} tokens"
            )

        def lengthen(x: Tensor, padding: int) -> Tensor:
            more = x.new_full((x.shape[0], n_more, *x.shape[2:]), padding)
            return torch.cat((x, more), dim=1)

        longer = batch.with_tokens(lengthen)
        cu_seqlens = batch.entries.get("cu_seqlens")
        if cu_seqlens is not None and cu_seqlens.dim() == 1 and batch.document_ids is not None:
            # 1-D cumulative lengths of the unpadded rows are wrong now: replace them by document ids.
            entries = {key: x for key, x in longer.entries.items() if key != "cu_seqlens"}
            entries["document_ids"] = longer.document_ids
            longer = replace(longer, entries=entries)
        return longer

    def shard(
        self, inputs: Tensor, labels: Tensor | None, extra_inputs: Entries, extra_kwargs: Entries
    ) -> tuple[Tensor, Tensor | None, Entries, Entries]:
        """Return the arguments for this rank's tokens; masks and positions are moved to `extra_kwargs`."""
        moved = {x: extra_inputs[x] for x in extra_inputs.keys() & {"positions", "attention_masks"}}
        kwargs = {"positions": None, **extra_kwargs, **moved}
        own, own_labels, kwargs = prepare_context_parallel_input(
            inputs, labels, kwargs, self.mesh, inputs.device, self.load_balancer, self.rotate_method
        )
        shards = shards_of(kwargs["attention_masks"])
        assert shards is not None, "masks from cp_shard know their shards"
        others = {name: x for name, x in extra_inputs.items() if name not in moved}
        entries = shard_batch(TokenBatch(inputs, entries=others), shards).entries
        return own, own_labels, dict(entries), kwargs


def shard_batch(batch: TokenBatch, shards: TokenShards) -> TokenBatch:
    """Return the batch with this rank's tokens only, [B, T, ...] -> [B, T/cp, ...]."""
    return batch.with_tokens(lambda x, _padding: shards.shard(x))


def join_outputs(outputs: Any, shards: TokenShards, n_tokens: int, seq_len: int) -> Any:
    """Return outputs for whole rows: tensors [B, T/cp, ...] become [B, T, ...].

    n_tokens: T/cp. seq_len: the rows' length without padding, which is cut off. Collective over the ranks
    that share the rows. Each rank gets the gradient of its own tokens.
    """

    def join(x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[1] != n_tokens:
            return x
        return shards.unshard(x)[:, :seq_len]

    return torch_parts.pytree.tree_map_only(torch.Tensor, join, outputs)


def cp_shard(
    cp_mesh: DeviceMesh,
    inputs: tuple[Tensor, ...],
    attention_masks: Any = None,
    load_balancer_type: str | None = "headtail",
    input_seq_dim: int = 1,
    rotate_method: str | None = "allgather",
) -> tuple[tuple[Tensor, ...], Masks]:
    """Return this rank's part of each input, and the mask (or dict of masks) for it.

    inputs: tensors of whole rows, T along `input_seq_dim`, the first one [B, T, ...].
    attention_masks: a BlockMask, VarlenMetadata, a dict of them, or None for plain causal.
    load_balancer_type: "headtail", "ptrr" (balances the mask's work) or None (consecutive parts).
    rotate_method: None means "allgather" if all masks have known document boundaries, else "alltoall".

    Raises ValueError if the load balancer cannot cut T into equal chunks, for a padding mask [B, T], and
    for "allgather" with a mask whose document boundaries are unknown. Waits for the device if "allgather"
    or "ptrr" needs boundaries that only the device has (see `tools.host_copy`).
    """
    n_rows, seq_len = inputs[0].shape[0], inputs[0].shape[input_seq_dim]
    is_dict = isinstance(attention_masks, dict)
    given = attention_masks if is_dict else {"": attention_masks}
    if any(isinstance(mask, Tensor) for mask in given.values()):
        raise ValueError(
            "a padding mask [B, T] cannot be sharded over context-parallel ranks; first turn it into "
            "the kernel's mask with the model's get_padding_masks(padding_mask)"
        )
    masks = {name: DocumentMask.from_mask(mask) for name, mask in given.items()}
    boundaries = {name: mask.boundaries(seq_len) for name, mask in masks.items()}
    unknown = [name for name, x in boundaries.items() if x is None]
    if rotate_method is None:
        rotate_method = "alltoall" if unknown else "allgather"
    if rotate_method == "allgather" and unknown:
        raise ValueError(
            "parallelism.context_parallel_rotate_method = 'allgather' needs a mask from the model's "
            "get_attention_masks, which has the document boundaries, got a "
            f"{type(given[unknown[0]]).__name__}; set it to 'alltoall'"
        )
    starts: dict[str, Tensor] = {}  # name of a mask -> document starts, on the host
    if rotate_method == "allgather" or load_balancer_type == "ptrr":
        known = {name: fetch(x) for name, x in boundaries.items() if x is not None}
        starts = {name: starts_from_boundaries(x, n_rows, seq_len) for name, x in known.items()}
    # With several masks, balance the mask with the most work; sliding windows are ignored.
    widest = None
    if attention_masks is not None and starts:
        widest = min(starts.values(), key=lambda s: int(s.sum()) * n_rows // len(s))
    chunks = deal_chunks(load_balancer_type, cp_mesh.size(), seq_len, widest)
    shards = TokenShards.from_chunks(chunks, cp_mesh)
    sharded = {}
    for name, mask in masks.items():
        keys = None
        if rotate_method == "allgather":
            rank = cp_mesh.get_local_rank()
            keys = needed_keys(starts[name], n_rows, chunks, rank, mask.window, mask.branches)
            keys = torch_parts.pytree.tree_map_only(
                Tensor, lambda x: to_device(x, inputs[0].device), keys
            )
        sharded[name] = mask.with_part(ContextPart(shards, rotate_method, keys))
    parts = tuple(shards.shard(x, input_seq_dim) for x in inputs)
    return parts, sharded if is_dict else sharded[""]


def prepare_context_parallel_input(
    inputs: Tensor,
    labels: Tensor | None,
    extra_kwargs: dict[str, Any],
    cp_mesh: DeviceMesh,
    device: torch.device,
    load_balancer_type: str | None = "headtail",
    rotate_method: str | None = None,
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Return this rank's tokens, labels, and keyword arguments of the model's forward.

    For clients of torchtitan 0.2.x. inputs: tokens [B, T]. labels: [B, T] or None, shifted already.
    extra_kwargs: changed in place and returned; this rank's part replaces the `attention_masks` and
    `positions` [1 or B, T] of whole rows. device: accepted for compatibility.
    rotate_method: as in `cp_shard`, whose errors this function may raise.
    """
    parts, masks = cp_shard(
        cp_mesh,
        (inputs,) if labels is None else (inputs, labels),
        extra_kwargs.get("attention_masks"),
        load_balancer_type,
        rotate_method=rotate_method,
    )
    extra_kwargs["attention_masks"] = masks
    if "positions" in extra_kwargs:
        extra_kwargs["positions"] = positions_of_rank(
            masks, extra_kwargs["positions"], parts[0].shape[1]
        )
    return parts[0], None if labels is None else parts[1], extra_kwargs
