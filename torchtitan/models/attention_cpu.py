"""Attention for packed documents on the CPU, where torch trains neither flex nor varlen.

N packed tokens, H query heads, K key/value heads (H a multiple of K), D head size, S documents.
A document may have more keys than queries (as under context parallelism). Then there are M packed
keys, and a document's last query sees its last key.

The cost of `document_attention` is proportional to the sum of squared document lengths, or with a window
to the sum of length times window. It is a torch operator: torch.compile and activation checkpointing see
a single node. `block_mask_attention` takes any mask, and is slower.
"""

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import functional as F

from torchtitan.numerics.batch_invariant import KEYS, attend_to_visible
from torchtitan.tools import torch_parts

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_library = Library("torchtitan", "DEF")
_library.define(
    "document_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seq_q, Tensor cu_seq_k,"
    " float scale, int? window) -> (Tensor, Tensor)"
)
_library.define(
    "document_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v,"
    " Tensor out, Tensor lse, Tensor cu_seq_q, Tensor cu_seq_k, float scale, int? window)"
    " -> (Tensor, Tensor, Tensor)"
)

# With a sliding window, each kernel call has this many queries, and this many keys plus the window.
_WINDOW_QUERIES = 64
# torch's kernel computes whole blocks of 512 keys, even if causal. Documents of 257 to 512 keys are
# split into calls of 128 queries, each with the keys up to its last query. This computes about half of
# the scores, and saves 6 to 10 % of a small model's step with documents of 512 tokens. Documents with fewer
# queries than keys are split, too: the kernel aligns the first query with the first key, and a document's
# last query must be aligned with its last key.
SHORTEST_SPLIT, LONGEST_SPLIT, _SPLIT_QUERIES = 257, 512, 128


def _lone_tokens(cu_seq_q: Tensor, cu_seq_k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of queries whose document has a single key, and the indices of these keys."""
    is_lone = (cu_seq_k.diff() == 1) & (cu_seq_q.diff() > 0)
    return cu_seq_q[:-1][is_lone].long(), cu_seq_k[:-1][is_lone].long()


def _calls(
    cu_seq_q: Tensor, cu_seq_k: Tensor, window: int | None, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield (queries, keys, mask) of each call of the kernel, for documents of two or more keys.

    mask: [queries, keys], added to the scores. None: the call is causal, with as many queries as keys.
    """
    bounds = zip(*(pairwise(x.tolist()) for x in (cu_seq_q, cu_seq_k)), strict=True)
    for (start, end), (first_key, end_key) in bounds:
        if end == start or end_key - first_key < 2:
            continue
        n_keys = end_key - first_key
        is_windowed = window is not None and n_keys > window
        is_split = end - start < n_keys or SHORTEST_SPLIT <= n_keys <= LONGEST_SPLIT
        if not is_windowed and not is_split:
            yield slice(start, end), slice(first_key, end_key), None
            continue
        reach = window if is_windowed else n_keys
        size = _WINDOW_QUERIES if is_windowed else _SPLIT_QUERIES
        # Masks of long documents are large and used only once, so they are not cached.
        make_mask = _cached_mask if is_windowed or n_keys <= LONGEST_SPLIT else _window_mask
        for last in range(end, start, -size):
            first = max(last - size, start)
            last_key = end_key - (end - last)
            seen_from = max(first_key, last_key - (last - first) - reach + 1)
            mask = make_mask(last - first, last_key - seen_from, reach, dtype)
            yield slice(first, last), slice(seen_from, last_key), mask


def _window_mask(n_queries: int, n_keys: int, window: int, dtype: torch.dtype) -> Tensor:
    """Return [queries, keys]: 0 where the query sees the key, else -inf.

    The last query and the last key are the same token.
    """
    query = torch.arange(n_keys - n_queries, n_keys, device="cpu")[:, None]
    distance = query - torch.arange(n_keys, device="cpu")
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))


_cached_mask = functools.lru_cache(maxsize=32)(_window_mask)


def _kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp32 for bf16 and fp16: the kernel then rounds only once, and is almost twice as fast."""
    return torch.promote_types(dtype, torch.float32)


def _as_kernel_input(x: Tensor, n_rows: int) -> Tensor:
    """[N, heads, D] -> [n_rows, heads, N / n_rows, D], the layout of the kernel; a view."""
    return x.unflatten(0, (n_rows, -1)).transpose(1, 2)


def _as_rows(cu_seq_q: Tensor, cu_seq_k: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return (number of equal rows for one call of the kernel, cu_seq_q and cu_seq_k of one row).

    If the document lengths repeat with some period, as in rows without packing, each period is a
    row. Otherwise all documents are one row.
    """
    lengths = torch.stack((cu_seq_q.diff(), cu_seq_k.diff()))
    n_documents = lengths.shape[1]
    for n in range(1, n_documents // 2 + 1):
        repeats = n_documents % n == 0 and torch.equal(lengths[:, n:], lengths[:, :-n])
        if repeats and cu_seq_q[n] > 0 and cu_seq_k[n] > 0:
            return n_documents // n, cu_seq_q[: n + 1], cu_seq_k[: n + 1]
    return 1, cu_seq_q, cu_seq_k


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Causal attention within each document.

    q: [N, H, D]; k, v: [M, K, D], all of one dtype. cu_seq_q, cu_seq_k: int [S + 1], the cumulative
    lengths from 0 to N and from 0 to M. window: a query sees itself and the window - 1 tokens before it.
    Returns the output [N, H, D] and the log-sum-exp of each query's scores [N, H], which is fp32
    (fp64 for fp64 inputs). Raises ValueError if a document has fewer keys than queries, or if
    cu_seq_q does not end at N or cu_seq_k not at M.
    """
    if cu_seq_q[-1] != len(q) or cu_seq_k[-1] != len(k):
        raise ValueError(
            f"the documents of the mask cover {int(cu_seq_q[-1])} tokens and the batch has "
            f"{len(q)}; build the mask from this batch"
        )
    if (cu_seq_k.diff() < cu_seq_q.diff()).any():
        raise ValueError("a document of the mask has fewer keys (cu_seq_k) than queries (cu_seq_q)")
    out = torch.empty(q.shape, dtype=q.dtype)
    dtype = _kernel_dtype(q.dtype)
    lse = torch.empty(q.shape[:2], dtype=dtype)
    lone, lone_keys = _lone_tokens(cu_seq_q, cu_seq_k)
    if len(lone):
        # With one key the softmax is 1 and the output is the value. Most of these queries are padding;
        # a kernel call for each of them would take longer than the calls for all other documents.
        out[lone] = _for_queries(v[lone_keys], q.shape[1])
        keys = _for_queries(k[lone_keys], q.shape[1]).to(dtype)
        lse[lone] = (q[lone].to(dtype) * keys).sum(dim=-1) * scale
    n_rows, *ends = _as_rows(cu_seq_q, cu_seq_k)
    packed = q, k, v, out, lse.unsqueeze(-1)
    qs, ks, vs, outs, lses = (_as_kernel_input(x, n_rows) for x in packed)
    for queries, keys, mask in _calls(*ends, window, dtype):
        # `F.scaled_dot_product_attention` also calls `flash_on_cpu`, but does not return the
        # log-sum-exp.
        operands = qs[:, :, queries], ks[:, :, keys], vs[:, :, keys]
        outs[:, :, queries], lses[:, :, queries, 0] = torch_parts.flash_on_cpu(
            *(x.to(dtype) for x in operands), 0.0, mask is None, attn_mask=mask, scale=scale
        )
    return out, lse


def _for_queries(x: Tensor, n_heads: int) -> Tensor:
    """[n, K, D] -> [n, H, D]: the key or value of each query head."""
    return x.repeat_interleave(n_heads // x.shape[1], dim=1)


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, shaped like them; see `_forward`.

    With P the probabilities, the kernel's gradient of the scores is P * (grad_out . v - delta),
    where delta = grad_out . out; the log-sum-exp adds P * grad_lse. To make the kernel add
    P * grad_lse, each head gets one more dimension: 1 in v, grad_lse in grad_out, and 0 in out.
    """
    lone, lone_keys = _lone_tokens(cu_seq_q, cu_seq_k)
    # Several calls may see the same key, and bf16 is too coarse for the sum of its gradients.
    grads = [torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v)]
    n_kv_heads = k.shape[1]
    if len(lone):
        grads[2][lone_keys] = grad_out[lone].unflatten(1, (n_kv_heads, -1)).sum(dim=2).to(lse.dtype)
        if grad_lse is not None:
            factor = grad_lse[lone].unsqueeze(-1) * scale
            grads[0][lone] = (factor * _for_queries(k[lone_keys], q.shape[1])).to(lse.dtype)
            to_keys = (factor * q[lone]).unflatten(1, (n_kv_heads, -1)).sum(dim=2)
            grads[1][lone_keys] = to_keys.to(lse.dtype)
    packed = grad_out, q, k, v, out, lse.unsqueeze(-1)
    n_rows, *ends = _as_rows(cu_seq_q, cu_seq_k)
    go, qs, ks, vs, outs, lses = (_as_kernel_input(x, n_rows) for x in packed)
    if grad_lse is not None:
        grad_lses = _as_kernel_input(grad_lse.unsqueeze(-1), n_rows)
    targets = [_as_kernel_input(x, n_rows) for x in grads]
    head_dim = q.shape[-1]
    for queries, keys, mask in _calls(*ends, window, lse.dtype):
        g_part, q_part, o_part = (x[:, :, queries].to(lse.dtype) for x in (go, qs, outs))
        k_part, v_part = (x[:, :, keys].to(lse.dtype) for x in (ks, vs))
        if grad_lse is not None:
            q_part, k_part, o_part = (F.pad(x, (0, 1)) for x in (q_part, k_part, o_part))
            v_part = F.pad(v_part, (0, 1), value=1.0)
            g_part = torch.cat((g_part, grad_lses[:, :, queries]), dim=-1)
        operands = g_part, q_part, k_part, v_part, o_part, lses[:, :, queries, 0]
        parts = torch_parts.flash_on_cpu_backward(
            *operands, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        for target, part, place in zip(targets, parts, (queries, keys, keys), strict=True):
            target[:, :, place] += part[..., :head_dim]
    grad_q, grad_k, grad_v = (x.to(q.dtype) for x in grads)
    return grad_q, grad_k, grad_v


class DocumentAttention(torch.autograd.Function):
    """Attention within documents. The caller passes the forward kernel; backward is `_backward`."""

    @staticmethod
    def forward(ctx, kernel, q, k, v, cu_seq_q, cu_seq_k, scale, window):
        out, lse = kernel(q, k, v, cu_seq_q, cu_seq_k, scale, window)
        ctx.save_for_backward(q, k, v, out, lse, cu_seq_q, cu_seq_k)
        ctx.scale, ctx.window = scale, window
        # Backward gets None for an unused log-sum-exp instead of zeros, and is faster then.
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        q, k, v, out, lse, *cu_seqlens = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grads = torch.ops.torchtitan.document_attention_backward(
            grad_out, grad_lse, q, k, v, out, lse, *cu_seqlens, ctx.scale, ctx.window
        )
        return None, *grads, None, None, None, None


def _kernel_of_device(*arguments):
    # Skips the "Autograd" kernel, which calls this function.
    with torch_parts.below_autograd():
        return torch.ops.torchtitan.document_attention(*arguments)


_library.impl("document_attention", _forward, "CPU")
_library.impl(
    "document_attention",
    lambda q, *_: (q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=_kernel_dtype(q.dtype))),
    "Meta",
)
_library.impl(
    "document_attention", functools.partial(DocumentAttention.apply, _kernel_of_device), "Autograd"
)
_library.impl("document_attention_backward", _backward, "CPU")
_library.impl(
    "document_attention_backward",
    lambda grad_out, grad_lse, *qkv: tuple(x.new_empty(x.shape) for x in qkv[:3]),
    "Meta",
)


# (q, k, v, cu_seq_q, cu_seq_k, scale, window) -> (output, log-sum-exp), both differentiable; see
# `_forward`.
document_attention = torch.ops.torchtitan.document_attention


def batch_invariant_document_attention(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """`document_attention` in tiles, as in `numerics.batch_invariant`.

    Each document must have as many queries as keys.
    """
    with torch.autocast(q.device.type, enabled=False):
        return DocumentAttention.apply(_batch_invariant_forward, q, *arguments)


def _batch_invariant_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    _ends_of_keys: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """As `_forward`, with k and v [N, K, D]. ends: the cumulative document lengths, int [S + 1]."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    starts, lengths = ends[:-1].long(), ends.diff().long()
    n_tiles = -(-lengths // KEYS)
    # Documents with the same number of key tiles are computed together; their queries are padded to the
    # longest document. n_tiles = 0 marks documents of one token, such as padding; they get one query.
    n_tiles[lengths == 1] = 0
    for n in n_tiles.unique().tolist():
        of_size = n_tiles == n
        width = 1 if n == 0 else int(lengths[of_size].max())
        columns = torch.arange(max(n, 1) * KEYS)
        places = starts[of_size, None] + columns  # [documents, keys]
        is_token = columns < lengths[of_size, None]
        places = places.clamp(max=len(q) - 1)
        distance = columns[:width, None] - columns
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        keys, values = (x[places].float().transpose(1, 2) for x in (k, v))
        queries = q[places[:, :width]].transpose(1, 2)
        results = attend_to_visible(queries, keys, values, visible[None], scale)
        into = places[:, :width][is_token[:, :width]]
        for target, result in zip((out, lse), results, strict=True):
            target[into] = result.transpose(1, 2)[is_token[:, :width]].to(target.dtype)
    return out, lse


def block_mask_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: "BlockMask | None",
    *,
    score_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Differentiable attention with any BlockMask; the mask of all T * T' pairs is stored.

    q: [B, H, T, D]; k, v: [B, K, T', D]. Returns [B, H, T, Dv] and with `return_lse` the
    log-sum-exp of the scores, fp32 [B, H, T]. A query that sees nothing gets zeros.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x if group == 1 else x.repeat_interleave(group, dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tokens = [torch.arange(x.shape[2]) for x in (q, k)]
    allowed = None
    if block_mask is not None:
        listed = block_mask.to_dense() > 0  # [B or 1, H or 1, query blocks, key blocks]
        allowed = _over_indices(block_mask.mask_mod)(*map(torch.arange, listed.shape[:2]), *tokens)
        for dim, size in zip((2, 3), block_mask.BLOCK_SIZE, strict=True):
            listed = listed.repeat_interleave(size, dim).narrow(dim, 0, len(tokens[dim - 2]))
        allowed = allowed & listed
    if score_mod is None and not return_lse:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale)
    # Step by step in fp32: torch's kernel takes no score_mod and returns no log-sum-exp.
    scores = (q.float() @ k.float().transpose(-2, -1)) * scale
    if score_mod is not None:
        rows_and_heads = map(torch.arange, scores.shape[:2])
        scores = _over_indices(score_mod, n_leading=1)(scores, *rows_and_heads, *tokens)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    # exp(-inf - -inf) would be nan where a query sees nothing
    probabilities = (scores - lse.masked_fill(lse == float("-inf"), 0).unsqueeze(-1)).exp()
    out = (probabilities @ v.float()).to(v.dtype)
    return (out, lse) if return_lse else out


def _over_indices(mod: Callable[..., Tensor], n_leading: int = 0) -> Callable[..., Tensor]:
    """Return a mask_mod or score_mod that is vectorised over 1-D tensors of indices b, h, q and kv.

    The result has 4 dimensions, one per index, as do the `n_leading` arguments before b.
    """
    for axis in reversed(range(4)):
        in_dims = [0 if i == axis else None for i in range(4)]
        mod = torch.vmap(mod, in_dims=(0,) * n_leading + tuple(in_dims))
    return mod
