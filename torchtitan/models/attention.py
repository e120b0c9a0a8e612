"""Masks for packed documents, and the attention kernels that obey them, on CPU and accelerators.

B rows, T tokens per row, N = B * T packed tokens, H query heads, K key/value heads, D head size.
Kernels get queries [B, H, T, D] and keys, values [B, K, T, D]. What they may look at comes as
nothing (sdpa: causal) or a `PaddingMask` (sdpa), a `BlockMask` (flex) or a `VarlenMetadata`
(varlen), built from document ids (see `documents.py`) once per batch and shared by all layers.

torch trains flex and varlen on accelerators only; on the CPU the same wrappers run
`attention_cpu.py` when the mask came from documents, and a mask evaluated in slices otherwise.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, Union

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan.batch.documents import document_ids_from_eos, document_starts
from torchtitan.distributed.context_parallel import ShardedMask
from torchtitan.tools.host_copy import fetch, on_host, remember_host, to_device
from torchtitan.tools.utils import get_device_type

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = [
    "AttentionMasksType",
    "FlexAttentionWrapper",
    "PaddingMask",
    "ScaledDotProductAttentionWrapper",
    "VarlenAttentionWrapper",
    "VarlenMetadata",
    "create_attention_mask",
    "create_causal_block_mask",
    "create_document_block_mask",
    "create_document_varlen_metadata",
    "create_padding_mask",
    "create_varlen_metadata_for_document",
    "get_causal_mask_mod",
    "get_document_id_mask_mod",
    "get_document_mask_mod",
    "get_fixed_block_mask_mod",
    "get_sliding_window_mask_mod",
]


class VarlenMetadata(NamedTuple):
    """Where the documents of N packed tokens begin and end.

    cu_seq_q, cu_seq_k: int32 [documents + 1], from 0 to N. max_q, max_k: the longest document.
    """

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int | float
    max_k: int | float


class PaddingMask(NamedTuple):
    """Causal, and no token sees padding, for sdpa: T * T numbers per row.

    allowed: bool [B, 1, T, T], queries by keys. document_starts: int32 [B, T], the first key of
    each query.
    """

    allowed: Tensor
    document_starts: Tensor


# BlockMask by name only: its module takes most of a second to import, and sdpa never needs it.
AttentionMasksType: TypeAlias = Union[  # noqa: UP007
    dict[str, "BlockMask"], dict[str, VarlenMetadata], "BlockMask", VarlenMetadata
]
"""What `get_attention_masks` returns. A decoder also takes a padding mask [B, T], see there."""

MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(b, h, q_idx, kv_idx) -> bool tensor: may this query look at this key?"""


# ---- mask functions ----


def get_causal_mask_mod() -> MaskMod:
    """A query sees itself and what came before."""

    def causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    return causal_mask


def get_document_mask_mod(batch: Tensor, eos_id: int) -> MaskMod:
    """A query sees its own document, later tokens included; combine with a causal mask.

    batch: tokens [B, T]. The end-of-text token `eos_id` belongs to the document it closes.
    """
    return get_document_id_mask_mod(document_ids_from_eos(batch, eos_id))


def get_document_id_mask_mod(document_ids: Tensor) -> MaskMod:
    """Like `get_document_mask_mod`, for documents [B, T] from any source.

    A padding token sees itself alone.
    """
    starts = document_starts(document_ids)

    def document_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return starts[b, q_idx] == starts[b, kv_idx]

    return document_mask


def get_fixed_block_mask_mod(fixed_block_size: int) -> MaskMod:
    """A query sees the tokens of its own chunk; chunks have `fixed_block_size` tokens."""

    def blocked_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx // fixed_block_size == kv_idx // fixed_block_size

    blocked_mask.__name__ = f"blocked_mask_mod_fixed_block_size_{fixed_block_size}"
    return blocked_mask


def get_sliding_window_mask_mod(window_size: int) -> MaskMod:
    """A query sees itself and the `window_size - 1` tokens before it.

    Raises ValueError if window_size < 1.
    """
    _check_window(window_size)

    def sliding_window_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < window_size)

    sliding_window_mask.__name__ = f"sliding_window_mod_window_size_{window_size}"
    return sliding_window_mask


def _check_window(window_size: int) -> None:
    if window_size < 1:
        raise ValueError(f"a sliding window holds at least the query itself, got {window_size=}")


# ---- compiling on first use ----


class _CompiledOnFirstCall:
    """Calls the function that `load` returns, which is asked for at the first call."""

    def __init__(self, load: Callable[[], Callable[..., Any]]):
        self._load = load
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            self._function = self._load()
        return self._function(*args, **kwargs)


def _load_flex_attention() -> Callable[..., Any]:
    import torch._inductor
    from torch.nn.attention.flex_attention import flex_attention

    options = {
        # One opaque node per region, which selective checkpointing can save by name.
        "wrap_inductor_compiled_regions": True,
        "max_autotune": True,
        "coordinate_descent_tuning": True,
        "triton.cudagraphs": False,
    }
    known = torch._inductor.list_options()
    return torch.compile(flex_attention, options={k: v for k, v in options.items() if k in known})


def _load_varlen_attention() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn

    return torch.compile(varlen_attn, mode="max-autotune-no-cudagraphs")


def _load_create_block_mask() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)


_compiled_create_block_mask = _CompiledOnFirstCall(_load_create_block_mask)


# ---- masks ----


def create_attention_mask(
    mask_mod: Callable,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> "BlockMask":
    """torch's `create_block_mask` with the same arguments, compiled off the CPU.

    device: None is the accelerator, or the CPU where there is none.

    Evaluates mask_mod everywhere. For documents `create_document_block_mask` is much faster.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    if device is None:
        device = get_device_type()
    # On a CPU compiling takes the better part of a minute and saves seconds.
    on_cpu = torch.device(device).type == "cpu"
    create = create_block_mask if on_cpu else _compiled_create_block_mask
    return create(mask_mod, B, H, Q_LEN, KV_LEN, device, **kwargs)


def create_document_varlen_metadata(document_ids: Tensor) -> VarlenMetadata:
    """Return the boundaries of documents [B, T], rows laid end to end.

    A padding token is a document by itself. Waits for the device once where ids are there and
    came from nowhere else (see `tools.host_copy`).
    """
    starts = document_starts(fetch(document_ids))
    columns = torch.arange(starts.shape[1], device="cpu", dtype=torch.int32)
    max_length = int((columns - starts).max()) + 1
    first = (starts == columns).flatten().nonzero().flatten()
    cu_seqlens = torch.cat((first, first.new_tensor([starts.numel()]))).to(torch.int32)
    cu_seqlens = to_device(cu_seqlens, document_ids.device)
    return VarlenMetadata(cu_seqlens, cu_seqlens, max_length, max_length)


def create_varlen_metadata_for_document(input_batch: Tensor, eos_id: int) -> VarlenMetadata:
    """Boundaries of tokens [B, T] whose documents end with `eos_id`; no row runs into the next."""
    return create_document_varlen_metadata(document_ids_from_eos(input_batch, eos_id))


def create_padding_mask(document_ids: Tensor) -> PaddingMask:
    """Return the mask, for sdpa, of rows [B, T] with one document and padding each."""
    starts = document_starts(document_ids)
    column = torch.arange(starts.shape[1], device=starts.device, dtype=starts.dtype)
    query, key = column[:, None], column[None, :]
    allowed = (key <= query) & (key >= starts[:, :, None])
    return PaddingMask(allowed.unsqueeze(1), starts)


def create_document_block_mask(
    document_ids: Tensor, block_size: int = 128, window: int | None = None
) -> "BlockMask":
    """Return the mask "causal, and within one document" for documents [B, T].

    window: a query sees no more than itself and the window - 1 tokens before it.
    The block structure is written down from the boundaries, without evaluating any pair of
    tokens and without waiting for the device. A padding token sees itself alone. The mask carries
    `document_starts` and the `window` for context parallelism, on the CPU the boundaries also as
    `varlen_metadata`, which lets the flex wrapper run attention document by document.
    """
    first_tokens = document_starts(document_ids)
    starts = _within_window(first_tokens, window)

    def causal_document_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (kv_idx >= starts[b, q_idx])

    mask = _block_mask_from_starts(starts, block_size, causal_document_mask)
    mask.document_starts = remember_host(first_tokens, document_starts(on_host(document_ids)))
    mask.window = window
    if document_ids.device.type == "cpu":
        mask.varlen_metadata = create_document_varlen_metadata(document_ids)
    return mask


def create_causal_block_mask(
    n_rows: int,
    seq_len: int,
    device: torch.device,
    block_size: int = 128,
    window: int | None = None,
) -> "BlockMask":
    """Return the plain causal mask: one mask for all rows, otherwise as for documents."""
    row = torch.zeros((1, seq_len), device=device, dtype=torch.int32)  # all one document
    mask_mod = get_causal_mask_mod() if window is None else get_sliding_window_mask_mod(window)
    mask = _block_mask_from_starts(_within_window(row, window), block_size, mask_mod)
    mask.document_starts = torch.zeros((1, seq_len), dtype=torch.int32, device="cpu")
    mask.window = window
    if row.device.type == "cpu":
        mask.varlen_metadata = create_document_varlen_metadata(row.expand(n_rows, -1))
    return mask


def _within_window(starts: Tensor, window: int | None) -> Tensor:
    """[B, T], the first key that each query sees; `starts` is where its document begins.

    Raises ValueError if window < 1.
    """
    if window is None:
        return starts
    _check_window(window)
    columns = torch.arange(starts.shape[1], device=starts.device, dtype=starts.dtype)
    return torch.maximum(starts, columns - (window - 1))


def _block_mask_from_starts(starts: Tensor, block_size: int, mask_mod: MaskMod) -> "BlockMask":
    """starts: [B, T], the first key that each query sees, never decreasing along a row.

    mask_mod must say the same.
    """
    from torch.nn.attention.flex_attention import BlockMask

    seq_len = starts.shape[1]
    n_blocks = -(-seq_len // block_size)
    block = torch.arange(n_blocks, device=starts.device, dtype=torch.int32)
    first_query = block * block_size
    last_query = (first_query + block_size - 1).clamp(max=seq_len - 1)

    # Starts never decrease along a row: the first query of a block looks back furthest, the
    # last one least far. So key blocks [first_key, first_full) are seen in part,
    # [first_full, own) by every query in full, and the query block's own in part (causal).
    first_key = starts[:, first_query] // block_size
    first_full = (starts[:, last_query] + block_size - 1) // block_size
    first_full = torch.minimum(first_full, block)
    if seq_len % block_size:  # queries past the end see nothing, so no block is seen by all
        first_full[:, -1] = n_blocks - 1
    n_before_own = first_full - first_key
    n_full = block - first_full

    slot = block  # [n_blocks]: place in a query block's list of key blocks
    partial_list = torch.where(
        slot < n_before_own.unsqueeze(-1), first_key.unsqueeze(-1) + slot, block.unsqueeze(-1)
    )
    full_list = (first_full.unsqueeze(-1) + slot).clamp(max=n_blocks - 1)

    def for_all_heads(x: Tensor) -> Tensor:
        return x.unsqueeze(1).to(torch.int32).contiguous()

    return BlockMask.from_kv_blocks(
        for_all_heads(n_before_own + 1),
        for_all_heads(partial_list),
        for_all_heads(n_full),
        for_all_heads(full_list),
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
        seq_lengths=(seq_len, seq_len),
    )


# ---- kernels ----


class ScaledDotProductAttentionWrapper(nn.Module):
    """torch's scaled dot product attention, from the fastest backend that takes the inputs."""

    sdpa_backends: ClassVar[list[SDPBackend]] = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,  # keeps T * T scores of every head
    ]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Return [B, H, T, Dv]. attn_mask: bool [B, 1, T, T], in place of `is_causal`."""
        is_for_flash = attn_mask is None and q.dtype.itemsize == 2
        if enable_gqa and q.device.type != "cpu" and not is_for_flash:
            # The memory-efficient kernel groups no heads, and there would be "math" alone.
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            enable_gqa = False
        with sdpa_kernel(self.sdpa_backends, set_priority=True):
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=attn_mask,
                scale=scale,
                is_causal=is_causal and attn_mask is None,
                enable_gqa=enable_gqa,
            )


class FlexAttentionWrapper(nn.Module):
    """torch's flex attention, compiled; on the CPU, our own."""

    # Read from the class, never from an instance: `set_determinism` puts another one here.
    _compiled_flex_attn: ClassVar[Callable[..., Any]] = _CompiledOnFirstCall(_load_flex_attention)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        score_mod: Callable[..., Tensor] | None = None,
        block_mask: "BlockMask | None" = None,
        scale: float | None = None,
        return_lse: bool = False,
        enable_gqa: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return [B, H, T, Dv], and with `return_lse` the log-sum-exp of the scores [B, H, T].

        `enable_gqa` has to be True if k and v have fewer heads than q.
        """
        if q.device.type == "cpu":
            return _flex_on_cpu(q, k, v, score_mod, block_mask, scale, return_lse)
        if torch.compiler.is_compiling():  # part of a larger graph: nothing to compile apart
            from torch.nn.attention.flex_attention import flex_attention as attend
        else:
            attend = FlexAttentionWrapper._compiled_flex_attn
        return attend(
            q,
            k,
            v,
            score_mod=score_mod,
            block_mask=block_mask,
            scale=scale,
            return_lse=return_lse,
            enable_gqa=enable_gqa,
        )


def _flex_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: "BlockMask | None",
    scale: float | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    from torchtitan.models import attention_cpu

    metadata = getattr(block_mask, "varlen_metadata", None)
    if metadata is None or score_mod is not None:
        return attention_cpu.block_mask_attention(
            q, k, v, block_mask, score_mod=score_mod, scale=scale, return_lse=return_lse
        )
    out, lse = attention_cpu.document_attention(
        _pack(q),
        _pack(k),
        _pack(v),
        metadata.cu_seq_q,
        scale=scale,
        window=getattr(block_mask, "window", None),
        return_lse=True,
    )
    out, lse = (x.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2) for x in (out, lse))
    return (out, lse) if return_lse else out


def _pack(x: Tensor) -> Tensor:
    """[B, heads, T, D] -> [B * T, heads, D]; a view if heads were split off the last axis."""
    return x.transpose(1, 2).flatten(0, 1)


class VarlenAttentionWrapper(nn.Module):
    """Attention over packed tokens whose documents are given by cumulative lengths; causal."""

    # Read from the class, like `FlexAttentionWrapper._compiled_flex_attn`.
    _compiled_varlen_attn: ClassVar[Callable[..., Any]] = _CompiledOnFirstCall(
        _load_varlen_attention
    )

    def forward(
        self,
        xq: Tensor,
        xk: Tensor,
        xv: Tensor,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        window: int | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """xq: [B, H, T, D]; xk, xv: [B, K, T, D]. Returns [N, H, Dv], packed.

        window: a query sees itself and the window - 1 tokens before it.
        return_lse: also return the log-sum-exp of the scores [N, H]; ValueError off the CPU.
        """
        return _varlen(_pack(xq), _pack(xk), _pack(xv), attention_masks, scale, window, return_lse)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: VarlenMetadata,
    scale: float | None,
    window: int | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """q: [N, H, D]; k, v: [M, K, D], packed. See `VarlenAttentionWrapper`."""
    if q.device.type == "cpu":
        from torchtitan.models import attention_cpu

        return attention_cpu.document_attention(
            q,
            k,
            v,
            metadata.cu_seq_q,
            scale=scale,
            window=window,
            return_lse=return_lse,
            cu_seq_k=metadata.cu_seq_k,
        )
    if return_lse:  # the kernel does return it, and drops the gradient that comes back
        raise ValueError(
            "attn_type 'varlen' gives no gradient through the log-sum-exp of the scores on "
            f"device type {q.device.type!r}, and this model needs it; set model.attn_type to "
            "'flex'"
        )

    from torch.nn.attention.varlen import varlen_attn

    extra = {}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            extra["enable_gqa"] = True
        else:  # torch < 2.13
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    # The kernels want one head size. Zeros added to both operands of a dot product don't
    # change it, and zeros added to the values come out as columns that are cut off again.
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    value_size = v.shape[-1]
    width = max(q.shape[-1], value_size)
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    if torch.compiler.is_compiling():
        attend = varlen_attn
    else:
        attend = VarlenAttentionWrapper._compiled_varlen_attn
    out = attend(
        q,
        k,
        v,
        metadata.cu_seq_q,
        metadata.cu_seq_k,
        metadata.max_q,
        metadata.max_k,
        scale=scale,
        # so many back (-1: any), none ahead
        window_size=(-1 if window is None else window - 1, 0),
        **extra,
    )
    return out[..., :value_size]


# ---- what a model's attention layer calls ----

_WRAPPERS: dict[str, type[nn.Module]] = {
    "sdpa": ScaledDotProductAttentionWrapper,
    "flex": FlexAttentionWrapper,
    "varlen": VarlenAttentionWrapper,
}


def build_inner_attention(attn_type: str) -> nn.Module:
    """Return the kernel wrapper for an `attn_type`; ValueError lists the choices."""
    if attn_type not in _WRAPPERS:
        raise ValueError(f"attn_type must be one of {', '.join(_WRAPPERS)}, got {attn_type!r}")
    return _WRAPPERS[attn_type]()


def attend(
    inner_attention: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_masks: "BlockMask | VarlenMetadata | PaddingMask | ShardedMask | None",
    scale: float | None = None,
    window: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a wrapper with the mask it needs; q [B, H, T, D], k, v [B, K, T, D] -> [B, T, H, Dv].

    attention_masks: a `ShardedMask` where T are this rank's tokens of rows spread over ranks.
    window: a query sees itself and the window - 1 tokens before it; a BlockMask says so itself.
    return_lse: also return the log-sum-exp of the scores [B, T, H].
    Raises TypeError if the mask is not of the kind that the wrapper takes, and ValueError if sdpa
    is asked for a window or the log-sum-exp.
    """
    if isinstance(attention_masks, ShardedMask):
        return _attend_over_ranks(
            inner_attention, q, k, v, attention_masks, scale, window, return_lse
        )
    if isinstance(inner_attention, VarlenAttentionWrapper):
        _check_mask_type("varlen", attention_masks, VarlenMetadata)
        out = inner_attention(
            q, k, v, attention_masks, scale=scale, window=window, return_lse=return_lse
        )
        rows = (q.shape[0], q.shape[2])
        return _each(out, lambda packed: packed.unflatten(0, rows))

    # Only a branch makes a plain bool of it where compiled code has sizes as symbols.
    enable_gqa = True if q.shape[1] != k.shape[1] else False
    if isinstance(inner_attention, FlexAttentionWrapper):
        from torch.nn.attention.flex_attention import BlockMask

        _check_mask_type("flex", attention_masks, BlockMask)
        out = inner_attention(
            q,
            k,
            v,
            block_mask=attention_masks,
            scale=scale,
            return_lse=return_lse,
            enable_gqa=enable_gqa,
        )
    else:
        if window is not None or return_lse:
            raise ValueError(
                "attn_type 'sdpa' knows no sliding window and gives no log-sum-exp, which this "
                "model needs; set model.attn_type to 'flex' or 'varlen'"
            )
        allowed = None
        if isinstance(attention_masks, PaddingMask):
            allowed = attention_masks.allowed
        else:
            _check_mask_type("sdpa", attention_masks, type(None))
        out = inner_attention(q, k, v, scale=scale, enable_gqa=enable_gqa, attn_mask=allowed)
    return _each(out, lambda heads_first: heads_first.transpose(1, 2))


def _attend_over_ranks(
    inner_attention: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sharded: ShardedMask,
    scale: float | None,
    window: int | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attend` for queries, keys and values of this rank's tokens [B, heads, T/cp, D]."""
    if sharded.rotate_method == "alltoall":
        repeats = sharded.repeats_of_kv_heads(q.shape[1], k.shape[1])
        k, v = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (k, v))
        q, k, v = (sharded.tokens_to_heads(x) for x in (q, k, v))
        out = attend(inner_attention, q, k, v, sharded.mask, scale, window, return_lse)
        return _each(out, lambda x: sharded.heads_to_tokens(x.transpose(1, 2)).transpose(1, 2))

    if return_lse and q.device.type != "cpu":
        raise ValueError(
            "parallelism.context_parallel_rotate_method = 'allgather' gives no log-sum-exp of the "
            f"scores on device type {q.device.type!r}, and this model needs it; set it to "
            "'alltoall'"
        )
    # All kernels keep documents apart in the same way, so one serves whatever the mask is.
    needed = sharded.keys
    if sharded.gathering is None:
        sharded = sharded.start_gathering(k, v)
    packed = sharded.gathered_keys()
    k, v = (x.transpose(0, 1)[None] for x in packed.split((k.shape[-1], v.shape[-1]), dim=-1))
    metadata = VarlenMetadata(needed.cu_seq_q, needed.cu_seq_k, needed.max_q, needed.max_k)
    n_rows, _, n_tokens, _ = q.shape
    out = _varlen(
        _pack(q),
        _pack(k),
        _pack(v),
        metadata,
        scale,
        window if needed.window is None else needed.window,
        return_lse,
    )
    return _each(out, lambda x: x.unflatten(0, (n_rows, n_tokens)))


def _each(
    outputs: Tensor | tuple[Tensor, Tensor], change: Callable[[Tensor], Tensor]
) -> Tensor | tuple[Tensor, Tensor]:
    """Change the output, and the log-sum-exp if there is one."""
    if isinstance(outputs, tuple):
        return change(outputs[0]), change(outputs[1])
    return change(outputs)


def _check_mask_type(attn_type: str, masks: Any, wanted: type) -> None:
    if not isinstance(masks, wanted):
        what = "no attention_masks" if wanted is type(None) else f"a {wanted.__name__}"
        raise TypeError(
            f"attn_type {attn_type!r} takes {what}, got {type(masks).__name__}; build them with "
            "the model's get_attention_masks, or change model.attn_type"
        )
