"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) for rows of packed documents.

B rows, T tokens per row, Hk key heads, Hv value heads (value head h uses key head h // (Hv / Hk)), Dk and
Dv their sizes. Each token updates and reads the state S [Dk, Dv] of its row and value head:

    S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  o = S^T q

and a document's first token starts from S = 0. Keys and queries are divided by their L2 norm, and queries
by sqrt(Dk). All sums are in fp32 (fp64 for fp64 inputs).

Tokens are computed in chunks of C (the paper's section 3.3). G_i is the sum of g over the tokens of i's
document in the chunk, up to and including i but without the document's first token. With a sum over all
documents of the chunk, a document's rounding would depend on the other documents. All decays are exponentials
of differences G_i - G_j <= 0:

    D_ij = exp(G_i - G_j)   if j <= i and both belong to one document, else 0
    c_i  = exp(G_i)         if i's document began before the chunk, else 0
    e_j  = D_Cj             the decay to the chunk's end

    A = strictly lower part of beta (K K^T * D);    T = (I + A)^-1
    U = T (beta V) - W S                            the written values; W = T (beta c K)
    O = c Q S + (Q K^T * D) U
    S' = c_C S + (e K)^T U                          the state after the chunk

Only U, O and S' need the state, so that everything else is computed for many chunks at a time. Forward
keeps the state before every 16th chunk; backward computes everything else again.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, library
from torch.nn import functional as F

from torchtitan.numerics import delta_rule_fla as fla

_GROUP = 16  # chunks that are computed together; forward keeps one state for each group
_LEAST_EXPONENT = -80.0  # exp(-80) = 1e-35 is lost in the rounding of sums
_EPS = 1e-6  # inside the root of the L2 norm

_library = library.Library("torchtitan", "FRAGMENT")
_library.define(
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor starts, Tensor? state,"
    " int chunk) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "gated_delta_rule_backward(Tensor grad_out, Tensor? grad_state, Tensor q, Tensor k, Tensor v, Tensor g,"
    " Tensor beta, Tensor starts, Tensor states, int chunk)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: Tensor,
    state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    return_state: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs [B, T, Hv, Dv] in v's dtype, and the state after the last token [B, Hv, Dk, Dv].

    q, k: [B, T, Hk, Dk]; v: [B, T, Hv, Dv]; g (logarithms of the decays) and beta: [B, T, Hv].
    starts: int [B, T], the column where each token's document begins, as in `DocumentMask`; negative if the
        document began before these tokens and continues from `state`.
    state: fp32 [B, Hv, Dk, Dv] (fp64 for fp64 inputs); None means zeros.
    cu_seqlens: `VarlenMetadata.cu_seq_q` of the same documents. With it, flash-linear-attention is used
        where it is supported (see `numerics.delta_rule_fla`), unless a state is given or returned.
    return_state: if False, None is returned in place of the state.
    chunk: tokens per chunk, a power of two; None means 64, and on CPUs the fastest number: 16, or 32 for
        Dk > 64.
    """
    if cu_seqlens is not None and state is None and not return_state and fla.is_supported(q, v):
        return fla.gated_delta_rule(q, k, v, g, beta, cu_seqlens), None
    if chunk is None:
        chunk = 64 if q.device.type != "cpu" else 16 if q.shape[-1] <= 64 else 32
    out, last, _ = torch.ops.torchtitan.gated_delta_rule(q, k, v, g, beta, starts, state, chunk)
    return out, last if return_state else None


def end_rows(
    lengths: Tensor, g: Tensor, beta: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return new g, beta and starts, with which padding after a row's last token does not change the state.

    lengths: int [B], the number of tokens before a row's padding. Outputs at padding are undefined.
    """
    columns = torch.arange(g.shape[1], device=g.device)
    is_padding = columns >= lengths.unsqueeze(1)
    starts_of_last = starts.gather(1, (lengths - 1).clamp(min=0).long().unsqueeze(1))
    starts_of_last = starts_of_last.masked_fill(lengths.unsqueeze(1) == 0, -1)
    g, beta = (x.masked_fill(is_padding.unsqueeze(2), 0) for x in (g, beta))
    return g, beta, torch.where(is_padding, starts_of_last, starts)


def gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output [B, Hv, Dv] of one more token of each row, and the next state [B, Hv, Dk, Dv].

    q, k: [B, Hk, Dk]; v: [B, Hv, Dv]; g and beta: [B, Hv].
    """
    heads = v.shape[1] // k.shape[1]
    q, k = (x.to(state.dtype).repeat_interleave(heads, dim=1) for x in (q, k))
    q, k = q * _norms(q), k * _norms(k)
    state = state * g.to(state.dtype).exp()[..., None, None]
    read = (k.unsqueeze(-2) @ state).squeeze(-2)
    written = beta.unsqueeze(-1) * (v - read)
    state = state + k.unsqueeze(-1) * written.unsqueeze(-2)
    out = (q.unsqueeze(-2) @ state).squeeze(-2) * q.shape[-1] ** -0.5
    return out.to(v.dtype), state


def multiplications_per_token(key_dim: int, value_dim: int, chunk: int = 64) -> int:
    """Return the number of multiplications of the chunked rule, per token and value head."""
    # K K^T and Q K^T; the triangular inverse times keys and values; the outputs; the state's three products.
    in_chunk = 2 * chunk * key_dim + chunk * (key_dim + value_dim) // 2 + chunk * value_dim
    return in_chunk + 3 * key_dim * value_dim


def scratch_bytes(k: Tensor, v: Tensor, is_backward: bool, chunk: int = 64) -> int:
    """Return the approximate scratch memory of the operator in bytes. k, v: see `gated_delta_rule`."""
    n = min(_GROUP, -(-v.shape[1] // chunk)) * v.shape[0] * v.shape[2]
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    # Measured numbers of tensors [C, C], of tensors [C, Dk] and [C, Dv], and of states.
    pairs, wide, states = (10, 10, 2) if is_backward else (4, 4, 1)
    each = (pairs * chunk + wide * (key_dim + value_dim)) * chunk + states * key_dim * value_dim
    return n * each * _dtype(v).itemsize


# ---- parts of a chunk ----


def _norms(x: Tensor) -> Tensor:
    """Return the factors [..., 1] that divide x [..., D] by its L2 norm."""
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _inverse(lower: Tensor) -> Tensor:
    """Return (I + L)^-1 [..., C, C], where L is the strictly lower part of [..., C, C].

    The inverses of two neighbouring diagonal blocks give the inverse of the block that holds both:
    [[a, 0], [l, b]]^-1 = [[a^-1, 0], [-b^-1 l a^-1, b^-1]].
    """
    size = lower.shape[-1]
    rows = torch.arange(size, device=lower.device).unsqueeze(1)
    eye = torch.eye(size, dtype=lower.dtype, device=lower.device)
    # Begin with blocks of two. Contiguous, because the copy below writes through views of `inverse`.
    is_left = (rows % 2 == 1) & (rows == rows.mT + 1)
    inverse = torch.where(is_left, -lower, eye).contiguous()
    width = 2
    while width < size:

        def blocks(x: Tensor, row: int, column: int, width: int = width) -> Tensor:
            pairs = x.unflatten(-1, (-1, 2, width)).unflatten(-4, (-1, 2, width))
            # [..., pairs of rows, 2, width, pairs of columns, 2, width] -> [..., width, width, pairs]
            return pairs.select(-2, column).select(-4, row).diagonal(dim1=-4, dim2=-2)

        first, left, second = (
            blocks(x, i, j).movedim(-1, -3)
            for x, i, j in ((inverse, 0, 0), (lower, 1, 0), (inverse, 1, 1))
        )
        blocks(inverse, 1, 0).copy_((second @ (left @ first)).neg_().movedim(-3, -1))
        width *= 2
    return inverse


class _Documents(NamedTuple):
    """How n chunks of C tokens lie in their documents.

    pairs: bool [n, B, C, C], True at [i, j] if j <= i and both tokens are in the same document.
    is_first: bool [n, B, C], True at a document's first token.
    is_carried: bool [n, B, C], True where the document began before the chunk.
    """

    pairs: Tensor
    is_first: Tensor
    is_carried: Tensor


def _documents(starts: Tensor, chunk: int) -> _Documents:
    """Return `_Documents`. starts: [n, B, C], where in the chunk a token's document begins, or negative."""
    places = torch.arange(chunk, device=starts.device)
    pairs = (starts.unsqueeze(-1) <= places) & (places <= places.unsqueeze(-1))
    return _Documents(pairs, starts == places, starts < 0)


def _decays(g: Tensor, documents: _Documents) -> tuple[Tensor, Tensor]:
    """Return the decays between the tokens of a chunk and since its start (D and c in the module docstring).

    g: [n, B, Hv, C], log-decays. D: [n, B, Hv, C, C]. c: [n, B, Hv, C].
    """
    g = g.masked_fill(documents.is_first.unsqueeze(2), 0)
    # g of other documents is multiplied by 0, and adding 0 changes no bit.
    sums = (documents.pairs.to(g.dtype) @ g.mT).mT  # G
    gaps = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    # Masked before exp, which would overflow for j > i. Clamped, because CPUs are slow at subnormal results.
    pairs = documents.pairs.unsqueeze(2)
    decays = gaps.masked_fill_(~pairs, 0).clamp_(min=_LEAST_EXPONENT).exp_().mul_(pairs)
    return decays, sums.masked_fill(~documents.is_carried.unsqueeze(2), -math.inf).exp()


class _Chunks(NamedTuple):
    """The parts of n chunks that do not depend on the state. h = B * Hv, G = Hv / Hk."""

    documents: _Documents
    rows: Tensor  # [n, B, Hk, 2 C, Dk]: normalised queries, then keys
    norms: Tensor  # [n, B, Hk, 2 C, 1]: 1 / the norms of queries, then of keys
    values: Tensor  # [n, B, Hk, G, C, Dv]
    beta: Tensor  # [n, B, Hk, G, C]; c has the same shape
    c: Tensor
    decays: Tensor  # D [n, B, Hk, G, C, C]
    scores: Tensor  # Q K^T * D [n, B, Hk, G, C, C]
    system: Tensor  # K K^T * D, in the same shape; only the strictly lower part is used
    inverse: Tensor  # T [n, h, C, C]
    carried_q: Tensor  # c Q [n, h, C, Dk]
    carried_k: Tensor  # beta c K [n, h, C, Dk]
    ending_k: Tensor  # e K [n, h, C, Dk]
    kept: Tensor  # c_C [n, h, 1, 1]


def _cut(x: Tensor, first: int, n: int, chunk: int, dtype: torch.dtype) -> Tensor:
    """Cut x [B, T, heads, ...] from column `first` on into [n, B, heads, C, ...], padded with zeros."""
    x = x[:, first : first + n * chunk].to(dtype)
    missing = n * chunk - x.shape[1]
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing)) if missing else x
    return x.unflatten(1, (n, chunk)).transpose(0, 1).transpose(2, 3)


def _join(x: Tensor, length: int) -> Tensor:
    """The inverse of `_cut`, for `length` tokens."""
    return x.transpose(2, 3).transpose(0, 1).flatten(1, 2)[:, :length]


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor, first: int, chunk: int
) -> _Chunks:
    """Return up to `_GROUP` chunks from column `first` on; see `gated_delta_rule` for the inputs."""
    n_rows, length, n_key_heads, key_size = q.shape
    n = min(_GROUP, -(-(length - first) // chunk))
    dtype = _dtype(q)
    q, k, v, g, beta = (_cut(x, first, n, chunk, dtype) for x in (q, k, v, g, beta))
    begins = starts[:, first : first + n * chunk]
    # Padding after the end belongs to the last document, so its zeros keep the state.
    begins = torch.cat((begins, begins[:, -1:].expand(-1, n * chunk - begins.shape[1])), dim=1)
    begins = begins.unflatten(1, (n, chunk)).transpose(0, 1)
    documents = _documents(
        begins - torch.arange(first, first + n * chunk, chunk, device=q.device)[:, None, None],
        chunk,
    )
    by_key_head = (n_key_heads, -1)
    decays, c = (x.unflatten(2, by_key_head) for x in _decays(g, documents))
    beta = beta.unflatten(2, by_key_head)
    rows = torch.cat((q, k), dim=-2)
    norms = _norms(rows)
    rows *= norms
    q, k = rows.unsqueeze(3).chunk(2, dim=-2)
    products = torch.bmm(rows.flatten(0, 2), k.flatten(0, 3).mT).view(
        n, n_rows, n_key_heads, 1, -1, chunk
    )
    scores = products[..., :chunk, :] * decays
    system = products[..., chunk:, :] * decays

    def scaled(x: Tensor, factor: Tensor) -> Tensor:
        return (x * factor.unsqueeze(-1)).flatten(1, 3)

    return _Chunks(
        documents,
        rows,
        norms,
        v.unflatten(2, by_key_head),
        beta,
        c,
        decays,
        scores,
        system,
        _inverse((system * beta.unsqueeze(-1)).flatten(1, 3)),
        scaled(q, c),
        scaled(k, beta * c),
        scaled(k, decays[..., -1, :]),
        c[..., -1].flatten(1)[..., None, None],
    )


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """[n, h, M, K] times [n, h, K, N]."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


def _scan(chunks: _Chunks, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return U [n, h, C, Dv] and the states before and after each chunk [n + 1, h, Dk, Dv]."""
    written = _bmm(chunks.inverse, (chunks.values * chunks.beta.unsqueeze(-1)).flatten(1, 3))
    weights = _bmm(chunks.inverse, chunks.carried_k)
    states = state.new_empty(len(written) + 1, *state.shape)
    states[0] = state
    steps = (weights, written, chunks.kept, chunks.ending_k.mT, states[:-1], states[1:])
    for weight, values, kept, keys, before, after in zip(*(x.unbind() for x in steps), strict=True):
        values.baddbmm_(weight, before, alpha=-1)
        torch.mul(before, kept, out=after)
        after.baddbmm_(keys, values)
    return written, states


# ---- the operators ----


def _dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: Tensor,
    state: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `gated_delta_rule`, but also returns the states before each group [groups, B, Hv, Dk, Dv]."""
    out, last, states = _outputs(q, v, chunk)
    last.copy_(state) if state is not None else last.zero_()
    current = last.flatten(0, 1)
    with _full_precision(q):
        for group, first in enumerate(range(0, q.shape[1], _GROUP * chunk)):
            states[group] = current.view_as(last)
            chunks = _chunks(q, k, v, g, beta, starts, first, chunk)
            written, inner = _scan(chunks, current)
            reads = _bmm(chunks.carried_q, inner[:-1]).flatten(0, 1)
            scale = q.shape[-1] ** -0.5
            reads.baddbmm_(
                chunks.scores.flatten(0, 3), written.flatten(0, 1), beta=scale, alpha=scale
            )
            n = len(written)
            reads = reads.view(n, q.shape[0], v.shape[2], chunk, -1)
            out[:, first : first + n * chunk] = _join(reads, q.shape[1] - first)
            current = inner[-1].clone()
            del chunks, written, inner, reads  # free them before the next group
    return out, current.view_as(last), states


def _outputs(q: Tensor, v: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    n_rows, length, n_heads, value_size = v.shape
    state = q.new_empty(n_rows, n_heads, q.shape[-1], value_size, dtype=_dtype(q))
    n_groups = -(-length // (_GROUP * chunk))
    return v.new_empty(v.shape), state, state.new_empty(n_groups, *state.shape)


def _backward(
    grad_out: Tensor,
    grad_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: Tensor,
    states: Tensor,
    chunk: int,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g, beta and the initial state."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta)]
    grad_state = torch.zeros_like(states[0]) if grad_state is None else grad_state
    current = grad_state.flatten(0, 1)
    with _full_precision(q):
        for group in reversed(range(len(states))):
            first = group * _GROUP * chunk
            chunks = _chunks(q, k, v, g, beta, starts, first, chunk)
            n = len(chunks.rows)
            grad = _cut(grad_out, first, n, chunk, _dtype(q)).flatten(1, 2) * q.shape[-1] ** -0.5
            parts, current = _chunks_backward(chunks, states[group].flatten(0, 1), grad, current)
            for target, part in zip(grads, parts, strict=True):
                target[:, first : first + n * chunk] = _join(part, q.shape[1] - first)
            current = current.clone()
            del chunks, grad, parts, part  # free them before the next group
    return *grads, current.view_as(grad_state)


def _scan_backward(chunks: _Chunks, grad: Tensor, grad_state: Tensor) -> tuple[Tensor, Tensor]:
    """Return U' and the gradients of the states before and after each chunk; see `_chunks_backward`."""
    weights = _bmm(chunks.inverse, chunks.carried_k)
    grad_written = _bmm(chunks.scores.flatten(1, 3).mT, grad)
    grad_states = grad_state.new_empty(len(grad) + 1, *grad_state.shape)
    grad_states[-1] = grad_state
    torch.bmm(
        chunks.carried_q.flatten(0, 1).mT, grad.flatten(0, 1), out=grad_states[:-1].flatten(0, 1)
    )
    tensors = (
        weights.mT,
        grad_written,
        chunks.kept,
        chunks.ending_k,
        grad_states[:-1],
        grad_states[1:],
    )
    steps = list(zip(*(x.unbind() for x in tensors), strict=True))
    for weight, values, kept, keys, before, after in reversed(steps):
        values.baddbmm_(keys, after)
        before.addcmul_(after, kept).baddbmm_(weight, values, alpha=-1)
    return grad_written, grad_states


def _chunks_backward(
    chunks: _Chunks, state: Tensor, grad: Tensor, grad_state: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the gradients of q, k, v, g and beta [n, B, heads, C, ...], and of the state before the chunks.

    state: [h, Dk, Dv] before the chunks. grad: [n, h, C, Dv], of O; grad_state: [h, Dk, Dv], of the state
    after the chunks. With ' for gradients, and X = T^T U':

        U' = (Q K^T * D)^T O' + e K S'_next;    (beta V)' = X;     (beta c K)' = -X S^T;    A' = -X U^T
        S' = c_C S'_next + (c Q)^T O' - W^T U'
    """
    written, states = _scan(chunks, state)
    grad_written, grad_states = _scan_backward(chunks, grad, grad_state)
    size = grad.shape[2]
    solved = _bmm(chunks.inverse.mT, grad_written)  # X

    # Gradients of the scores and of A, and of c Q and beta c K.
    both = torch.cat((grad, -solved), dim=2)
    grad_pairs = _bmm(both, written.mT)
    grad_carried = _bmm(both, states[:-1].mT)
    grad_ending = _bmm(written, grad_states[1:].mT)

    shape = chunks.decays.shape[:4]  # n, B, Hk, G
    n, n_rows = shape[:2]
    solved, grad_ending = (x.unflatten(1, shape[1:]) for x in (solved, grad_ending))
    grad_q, grad_k = grad_carried.unflatten(1, shape[1:]).split(size, dim=-2)
    grad_scores, grad_system = grad_pairs.unflatten(1, shape[1:]).split(size, dim=-2)
    q, k = chunks.rows.unsqueeze(3).split(size, dim=-2)
    decays, c, beta = chunks.decays, chunks.c, chunks.beta
    ends = decays[..., -1, :]

    # Gradients of the decays' exponents (each decay's gradient times the decay): of D, of e, and of c.
    grad_system = grad_system.tril(-1)
    of_system = grad_system * chunks.system
    of_pairs = (grad_scores * chunks.scores).addcmul_(of_system, beta.unsqueeze(-1))
    of_pairs[..., -1, :] += ends * (grad_ending * k).sum(-1)
    # Drop the diagonal. Its terms cancel below, but they are large and would leave rounding errors.
    of_pairs.tril_(-1)
    from_k = c * (grad_k * k).sum(-1)
    of_carried = c * (grad_q * q).sum(-1) + beta * from_k
    of_states = (grad_states[1:] * states[:-1]).sum((-1, -2)).unflatten(1, shape[1:])
    of_carried[..., -1] += c[..., -1] * of_states
    grad_sums = (of_pairs.sum(-1) - of_pairs.sum(-2) + of_carried).flatten(2, 3)
    grad_g = (chunks.documents.pairs.mT.to(grad.dtype) @ grad_sums.mT).mT
    grad_g = grad_g.masked_fill(chunks.documents.is_first.unsqueeze(2), 0)
    grad_beta = (solved * chunks.values).sum(-1) + from_k + of_system.sum(-1)

    # Gradients of Q K^T and K K^T [2 C, C], of all value heads of a key head.
    of_products = torch.cat((grad_scores, grad_system * beta.unsqueeze(-1)), dim=-2)
    of_products = (
        (of_products.unflatten(-2, (2, size)) * decays.unsqueeze(-3)).flatten(-3, -2).sum(3)
    )
    grad_rows = of_products @ chunks.rows[..., size:, :]
    grad_rows[..., :size, :] += (grad_q * c.unsqueeze(-1)).sum(3)
    grad_rows[..., size:, :] += of_products.mT @ chunks.rows
    grad_k = grad_k * (beta * c).unsqueeze(-1) + grad_ending * ends.unsqueeze(-1)
    grad_rows[..., size:, :] += grad_k.sum(3)
    along = (grad_rows * chunks.rows).sum(-1, keepdim=True)
    grad_rows = (grad_rows - chunks.rows * along) * chunks.norms
    grad_v = solved * beta.unsqueeze(-1)
    of_heads = (x.flatten(2, 3) for x in (grad_v, grad_beta))
    grad_v, grad_beta = of_heads
    return (*grad_rows.split(size, dim=-2), grad_v, grad_g, grad_beta), grad_states[0]


@contextlib.contextmanager
def _full_precision(x: Tensor) -> Iterator[None]:
    """A context without autocast and TF32. TF32 is too coarse for the inverse and for sums of logarithms."""
    matmul = torch.backends.cuda.matmul
    with torch.autocast(x.device.type, enabled=False):
        if x.device.type != "cuda":
            yield
            return
        before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = before


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, state, chunk = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.has_state, ctx.chunk = state is not None, chunk
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _autograd(
    ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None, _: None
) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    grad_out = torch.zeros_like(tensors[2]) if grad_out is None else grad_out
    grads = torch.ops.torchtitan.gated_delta_rule_backward(
        grad_out, grad_state, *tensors, ctx.chunk
    )
    return *grads[:5], None, grads[5] if ctx.has_state else None, None


_library.impl("gated_delta_rule", _forward, "CompositeExplicitAutograd")
_library.impl(
    "gated_delta_rule", lambda q, k, v, g, beta, starts, state, chunk: _outputs(q, v, chunk), "Meta"
)
_library.impl("gated_delta_rule_backward", _backward, "CompositeExplicitAutograd")
_library.impl(
    "gated_delta_rule_backward",
    lambda grad_out, grad_state, *inputs: (
        *(x.new_empty(x.shape) for x in inputs[:5]),
        inputs[6].new_empty(inputs[6].shape[1:]),
    ),
    "Meta",
)
library.register_autograd(
    "torchtitan::gated_delta_rule", _autograd, setup_context=_save, lib=_library
)
