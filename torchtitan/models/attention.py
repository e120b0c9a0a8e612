"""The attention kernels, with masks for packed documents, on CPU and accelerators.

B rows, T tokens per row, N = B * T packed tokens, H query heads, K key/value heads, D head size.
Kernels get queries [B, H, T, D] and keys, values [B, K, T, D]. Layers pass a `DocumentMask`, lowered
once per batch to what the kernel takes: a bool tensor or nothing (sdpa), a `BlockMask` (flex) or a
`VarlenMetadata` (varlen). torch trains flex and varlen on accelerators only, so on the CPU their
wrappers run `attention_cpu`. Importing torch's modules for flex and varlen loads the compiler, so
`tools.compiler` delays the import.
"""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, Union

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan.batch.documents import (
    document_ids_from_token,
    document_starts,
    read_document_ids,
)
from torchtitan.batch.mask import DocumentMask, VarlenMetadata, check_window
from torchtitan.distributed.context_parallel import NeededKeys
from torchtitan.models import attention_cpu  # registers operators
from torchtitan.tools.compiler import compiled_on_first_call, load_flex_attention, load_varlen
from torchtitan.tools.utils import get_device_type

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# "BlockMask" is a string because its module takes most of a second to import; sdpa never needs it.
AttentionMasksType: TypeAlias = Union[  # noqa: UP007
    dict[str, "BlockMask"], dict[str, VarlenMetadata], "BlockMask", VarlenMetadata
]
"""The result of `get_attention_masks`. `Decoder.forward` also takes a padding mask [B, T]."""

MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(b, h, q_idx, kv_idx) -> bool tensor: True where the query sees the key."""


# ---- masks that clients compose ----


def get_causal_mask_mod() -> MaskMod:
    """Return a mask in which a query sees itself and the tokens before it."""

    def causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    return causal_mask


def get_document_mask_mod(
    batch: Tensor | None = None,
    eos_id: int | None = None,
    *,
    positions: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> MaskMod:
    """Return a mask in which a query sees its whole document; combine it with a causal mask.

    batch, positions and document_ids: [B, T], or [T] for one row. `read_document_ids` reads the documents
    from document_ids if given, else from positions, else from batch and eos_id.
    Raises ValueError if none of them is given, or if `batch` is given without eos_id.
    """
    sources = {"input": batch, "positions": positions, "document_ids": document_ids}
    sources = {name: torch.atleast_2d(x) for name, x in sources.items() if x is not None}
    if not sources or (sources.keys() == {"input"} and eos_id is None):
        raise ValueError(
            "get_document_mask_mod needs document_ids [B, T], positions [B, T], or tokens [B, T] with "
            f"eos_id, got {', '.join(sources) or 'none of them'}; give one"
        )
    # If `batch` is None, any of the tensors can serve as "input": only its shape is used.
    tokens = next(iter(sources.values()))
    mask_type = "block_causal" if positions is None else "position_block_causal"
    eos_id = None if batch is None else eos_id
    starts = document_starts(read_document_ids({"input": tokens} | sources, mask_type, eos_id))

    def document_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return starts[b, q_idx] == starts[b, kv_idx]

    return document_mask


def get_fixed_block_mask_mod(fixed_block_size: int) -> MaskMod:
    """Return a mask in which a query sees its own chunk of `fixed_block_size` tokens."""

    def blocked_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx // fixed_block_size == kv_idx // fixed_block_size

    blocked_mask.__name__ = f"blocked_mask_mod_fixed_block_size_{fixed_block_size}"
    return blocked_mask


def get_sliding_window_mask_mod(window_size: int) -> MaskMod:
    """Return a mask in which a query sees itself and the `window_size - 1` tokens before it.

    Raises ValueError if window_size < 1.
    """
    check_window(window_size)

    def sliding_window_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < window_size)

    sliding_window_mask.__name__ = f"sliding_window_mod_window_size_{window_size}"
    return sliding_window_mask


def create_attention_mask(
    mask_mod: Callable,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> "BlockMask":
    """torch's `create_block_mask` with the same arguments, compiled unless the device is the CPU.

    Evaluates mask_mod for every query and key. device: None means the accelerator, if there is one.
    """
    if device is None:
        device = get_device_type()
    # On a CPU, compiling takes most of a minute and saves only seconds.
    on_cpu = torch.device(device).type == "cpu"
    create = load_flex_attention().create_block_mask if on_cpu else _compiled_create_block_mask
    return create(mask_mod, B, H, Q_LEN, KV_LEN, device, **kwargs)


def create_varlen_metadata_for_document(input_batch: Tensor, eos_id: int) -> VarlenMetadata:
    """Return cumulative document lengths for tokens [B, T]; documents end at `eos_id` or at a row's end."""
    document_ids = document_ids_from_token(input_batch, eos_id)
    return DocumentMask.from_documents(document_ids).lower("varlen").lowered


# ---- compiling on first use ----


_compiled_flex_attention = compiled_on_first_call(
    load_flex_attention,
    "flex_attention",
    options={
        # Makes each region one opaque operator, which selective checkpointing can save by name.
        "wrap_inductor_compiled_regions": True,
        "max_autotune": True,
        "coordinate_descent_tuning": True,
        "triton.cudagraphs": False,
    },
)
_compiled_varlen_attention = compiled_on_first_call(
    load_varlen, "varlen_attn", mode="max-autotune-no-cudagraphs"
)
_compiled_create_block_mask = compiled_on_first_call(load_flex_attention, "create_block_mask")


# ---- kernels ----


def _tiles(
    forward: tuple[int, int, int, int], backward: tuple[int, int, int, int]
) -> dict[str, int]:
    """Return flex attention's options. forward, backward: (tile size in queries, in keys, stages, warps)."""
    names = ("BLOCK_M", "BLOCK_N", "num_stages", "num_warps")
    options = {f"fwd_{name}": value for name, value in zip(names, forward, strict=True)}
    queries, keys, stages, warps = backward
    # M1 and N1 are tile sizes for the gradients of keys, M2 and N2 for the gradients of queries.
    options |= {f"bwd_BLOCK_{name}": queries for name in ("M1", "N2")}
    options |= {f"bwd_BLOCK_{name}": keys for name in ("N1", "M2")}
    return options | {"bwd_num_stages": stages, "bwd_num_warps": warps}


# (query head size, value head size) -> flex attention's options for 16-bit inputs on H100 and H200. Of all
# options measured on an H200, these were the fastest (benchmarks/LOG.md).
_HOPPER_KERNEL_OPTIONS: Mapping[tuple[int, int], dict[str, int]] = MappingProxyType(
    {
        (64, 64): _tiles(forward=(64, 64, 3, 4), backward=(64, 64, 2, 4)),
        (128, 128): _tiles(forward=(64, 64, 3, 4), backward=(64, 64, 2, 4)),
        (192, 128): _tiles(forward=(128, 64, 3, 8), backward=(32, 128, 3, 8)),
    }
)


class ScaledDotProductAttentionWrapper(nn.Module):
    """torch's scaled dot product attention, by the fastest backend that accepts the inputs."""

    attn_type: ClassVar[str] = "sdpa"
    batch_invariant = False  # True: use the reduction order of `numerics.batch_invariant`
    sdpa_backends: ClassVar[list[SDPBackend]] = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,  # this backend stores T * T scores of every head
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
        (n_rows, _, seq_len, _), n_keys = q.shape, k.shape[2]
        if q.device.type == "cpu" and is_causal and attn_mask is None and seq_len == n_keys:
            is_split = attention_cpu.SHORTEST_SPLIT <= seq_len <= attention_cpu.LONGEST_SPLIT
            if self.batch_invariant or is_split:
                ends = torch.arange(0, n_rows * seq_len + 1, seq_len, dtype=torch.int32)
                how = VarlenMetadata(ends, ends, seq_len, seq_len), scale, None, False
                out = _varlen(*map(_pack, (q, k, v)), *how, self.batch_invariant)
                return out.unflatten(0, (n_rows, seq_len)).transpose(1, 2)
        is_for_flash = attn_mask is None and q.dtype.itemsize == 2
        if enable_gqa and q.device.type != "cpu" and not is_for_flash:
            # The memory-efficient kernel does not group heads; with enable_gqa only "math" is left.
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
    """torch's flex attention, compiled; on the CPU, the functions of `attention_cpu`."""

    attn_type: ClassVar[str] = "flex"
    batch_invariant = False
    # Read from the class, never from an instance: `set_determinism` replaces the class attribute.
    _compiled_flex_attn: ClassVar[Callable[..., Any]] = _compiled_flex_attention
    # (query head size, value head size) -> flex attention's options inside a compiled block. There torch
    # does not search for the fastest options.
    kernel_options: Mapping[tuple[int, int], dict[str, int]] = MappingProxyType({})

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
            mask = None if block_mask is None else block_mask.mask_mod
            if score_mod is not None or not isinstance(mask, DocumentMask) or mask.lengths is None:
                return attention_cpu.block_mask_attention(
                    q, k, v, block_mask, score_mod=score_mod, scale=scale, return_lse=return_lse
                )
            how = mask.lengths, scale, mask.window, return_lse, self.batch_invariant
            results = _varlen(*_packed(mask.lengths, q, k, v), *how)
            rows = (q.shape[0], q.shape[2])
            return _each(results, lambda x: x.unflatten(0, rows).transpose(1, 2))
        flex = load_flex_attention()
        options = {
            "score_mod": score_mod,
            "block_mask": block_mask,
            "scale": scale,
            # torch's argument `return_lse` warns, and the warning changes a global that the compiler guards on.
            "return_aux": flex.AuxRequest(lse=True) if return_lse else None,
            "enable_gqa": enable_gqa,
        }
        if torch.compiler.is_compiling():  # the surrounding graph is being compiled already
            if q.dtype.itemsize == 2:
                options["kernel_options"] = self.kernel_options.get((q.shape[-1], v.shape[-1]))
            results = flex.flex_attention(q, k, v, **options)
        else:
            results = FlexAttentionWrapper._compiled_flex_attn(q, k, v, **options)
        return (results[0], results[1].lse) if return_lse else results


def choose_kernel_options(model: nn.Module) -> None:
    """Set flex attention's options for this process's accelerator, for use inside compiled blocks."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        for module in model.modules():
            if isinstance(module, FlexAttentionWrapper):
                module.kernel_options = _HOPPER_KERNEL_OPTIONS


class VarlenAttentionWrapper(nn.Module):
    """Causal attention over packed tokens whose documents are given by cumulative lengths."""

    attn_type: ClassVar[str] = "varlen"
    batch_invariant = False
    # Read from the class, like `FlexAttentionWrapper._compiled_flex_attn`.
    _compiled_varlen_attn: ClassVar[Callable[..., Any]] = _compiled_varlen_attention

    def forward(
        self,
        xq: Tensor,
        xk: Tensor,
        xv: Tensor,
        attention_masks: VarlenMetadata | NeededKeys,
        scale: float | None = None,
        window: int | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """xq: [B, H, T, D]; xk, xv: [B, K, T, D]. Returns [N, H, Dv], packed.

        window: a query sees itself and the window - 1 tokens before it.
        return_lse: also return the log-sum-exp of the scores [N, H]; only on the CPU.
        """
        how = attention_masks, scale, window, return_lse, self.batch_invariant
        return _varlen(*_packed(attention_masks, xq, xk, xv), *how)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: VarlenMetadata | NeededKeys,
    scale: float | None,
    window: int | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the result of `VarlenAttentionWrapper` for packed queries and keys.

    q: [N, H, D]; k: [M, K, D]; v: [M, K, Dv]; N packed queries, M packed keys.
    """
    # The kernels want one head size. Appending zeros to queries and keys doesn't change their dot
    # products, and zeros appended to values become output columns that are cut off below.
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    value_size = v.shape[-1]
    width = max(q.shape[-1], value_size)
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    if q.device.type == "cpu":
        kernel = attention_cpu.document_attention
        if batch_invariant:
            if isinstance(metadata, NeededKeys):
                raise ValueError(
                    "batch-invariant attention (rl.generator.exact) has no kernel for trees of documents, got "
                    "a batch with 'parent_ids'; set rl.batch.share_prefixes to false"
                )
            kernel = attention_cpu.batch_invariant_document_attention
        out, lse = kernel(q, k, v, metadata.cu_seq_q, metadata.cu_seq_k, scale, window)
        out = out[..., :value_size]
        return (out, lse) if return_lse else out
    # torch's log-sum-exp has no gradient; `config.checks.device` refuses models that need the gradient.
    assert not return_lse, "attn_type 'varlen' gives no log-sum-exp on an accelerator"
    varlen_attn = load_varlen().varlen_attn
    extra = {}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            extra["enable_gqa"] = True
        else:  # torch < 2.13 has no grouped heads
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if not torch.compiler.is_compiling():
        varlen_attn = VarlenAttentionWrapper._compiled_varlen_attn
    out = varlen_attn(
        q,
        k,
        v,
        metadata.cu_seq_q,
        metadata.cu_seq_k,
        metadata.max_q,
        metadata.max_k,
        scale=scale,
        # how many keys before the query (-1: all) and after it are visible
        window_size=(-1 if window is None else window - 1, 0),
        **extra,
    )
    return out[..., :value_size]


def _pack(x: Tensor) -> Tensor:
    """[B, heads, T, D] -> [B * T, heads, D]; a view if the memory layout is [B, T, heads, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def _packed(lengths: VarlenMetadata | NeededKeys, *qkv: Tensor) -> list[Tensor]:
    """Return q, k and v packed. With `NeededKeys`, k and v are also gathered by its `index`."""
    q, *keys = map(_pack, qkv)
    if isinstance(lengths, NeededKeys):
        keys = [x.index_select(0, lengths.index) for x in keys]
    return [q, *keys]


def _each(results: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to an attention output, and to the log-sum-exp if there is one."""
    return tuple(map(change, results)) if isinstance(results, tuple) else change(results)


# ---- what a model's attention layer calls ----

_WRAPPERS: dict[str, type[nn.Module]] = {
    wrapper.attn_type: wrapper
    for wrapper in (ScaledDotProductAttentionWrapper, FlexAttentionWrapper, VarlenAttentionWrapper)
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
    mask: Any,
    scale: float | None = None,
    window: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Lower the mask and run a kernel wrapper; q [B, H, T, D], k, v [B, K, T, D] -> [B, T, H, Dv].

    mask: any mask that `DocumentMask.from_mask` accepts. If the mask has a `part`, the T tokens are this
        rank's part of rows that are split over context-parallel ranks.
    window: a query sees itself and the window - 1 tokens before it; used if the mask has no window.
        flex ignores it, because a BlockMask contains the window.
    return_lse: also return the log-sum-exp of the scores [B, T, H].
    Raises TypeError if the wrapper takes another kind of mask.
    """
    mask = DocumentMask.from_mask(mask)
    window = window if mask.window is None else mask.window
    rows, part = (q.shape[0], q.shape[2]), mask.part
    if part is not None and part.rotate_method == "allgather":
        # The gathered keys come with cumulative lengths, so varlen's kernel serves every attn_type.
        part = part if part.gathering is not None else part.start_gathering(k, v)
        k, v = part.gathered_keys().split((k.shape[-1], v.shape[-1]), dim=-1)
        results = _varlen(_pack(q), k, v, part.keys, scale, window, return_lse)
        return _each(results, lambda x: x.unflatten(0, rows))

    if part is not None:  # all-to-all: this rank gets whole rows of some heads
        repeats = part.repeats_of_kv_heads(q.shape[1], k.shape[1])
        k, v = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (k, v))
        q, k, v = (part.tokens_to_heads(x) for x in (q, k, v))
        rows = (q.shape[0], q.shape[2])
    attn_type = inner_attention.attn_type
    # `Decoder.forward` has lowered its masks already; other callers may not have.
    options = _kernel_options(attn_type, mask.lower(attn_type), window, return_lse)
    if attn_type == "varlen":
        results = inner_attention(q, k, v, scale=scale, **options)
        results = _each(results, lambda x: x.unflatten(0, rows))
    else:
        # In compiled code the comparison is a SymBool; the branch turns it into a bool.
        enable_gqa = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210
        results = inner_attention(q, k, v, scale=scale, enable_gqa=enable_gqa, **options)
        results = _each(results, lambda x: x.transpose(1, 2))
    if part is None:
        return results
    return _each(results, lambda x: part.heads_to_tokens(x.transpose(1, 2)).transpose(1, 2))


def _kernel_options(
    attn_type: str, mask: DocumentMask, window: int | None, return_lse: bool
) -> dict[str, Any]:
    """Return the mask and its options as keyword arguments of the wrapper's forward."""
    lowered = mask.lowered
    if attn_type == "sdpa":
        if window is not None or return_lse:
            raise ValueError(
                "attn_type 'sdpa' has no sliding window and returns no log-sum-exp, which this "
                "model needs; set model.attn_type to 'flex' or 'varlen'"
            )
        fits = lowered is None or (isinstance(lowered, Tensor) and mask.starts is not None)
        expected = "a DocumentMask or no attention_masks"
        options = {"attn_mask": lowered}
    elif attn_type == "varlen":
        fits = isinstance(lowered, VarlenMetadata | NeededKeys)
        expected = "a VarlenMetadata"
        options = {"attention_masks": lowered, "window": window, "return_lse": return_lse}
    else:  # "flex", or "cache" of `generation.kv_cache`: the mask already contains the window
        is_block_mask = isinstance(lowered, load_flex_attention().BlockMask)
        fits = is_block_mask or attn_type == "cache"  # "cache" takes a bool tensor
        expected = "a BlockMask"
        options = {"block_mask": lowered, "return_lse": return_lse}
    if not fits:
        raise TypeError(
            f"attn_type {attn_type!r} takes {expected}, got {type(lowered).__name__}; give a mask of "
            "this type (the model's get_attention_masks returns masks for flex and varlen), or change "
            "model.attn_type"
        )
    return options
