"""A cache of keys and values, or of the states of linear attention, so each new token needs a forward pass
over one token only.

B rows, T tokens in one call, S used slots of the cache (slot = the token's place in its row), H query
heads, K key/value heads, D head size of queries and keys, Dv head size of values, V vocabulary, L MoE layers,
k experts per token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan.batch.mask import DocumentMask, map_masks
from torchtitan.models.decoder import Decoder
from torchtitan.models.gated_delta import DeltaRule, in_heads
from torchtitan.numerics.batch_invariant import KEYS, attend_to_visible
from torchtitan.numerics.delta_rule import end_rows, gated_delta_rule, gated_delta_step
from torchtitan.numerics.document_conv import conv_tail, document_conv


class _Store:
    """Cached tensors [B, ...] from which rows continue; allocated in the first call.

    Before each call, the caller sets `slots` [1 or B, T], the slots of the new tokens; `end`, the number of
    filled slots after the call; and `counts` [B], the number of new tokens of each row, without padding.
    max_length: size of dim 2, which has an entry per cached token; 0 if the tensors have no such dim.
    """

    max_length = 0
    # A plain list, because buffers would appear in the model's state dict.
    stored: list[Tensor]
    slots: Tensor
    counts: Tensor
    end = 0

    def put_rows(self, places: Tensor, other: "_Store", rows: Tensor) -> None:
        """Overwrite the rows at `places` with `rows` of another store; allocate this store first if empty."""
        self.stored = self.stored or [
            x.new_zeros(len(places), x.shape[1], self.max_length or x.shape[2], *x.shape[3:])
            for x in other.stored
        ]
        for stored, given in zip(self.stored, other.stored, strict=True):
            stored[places, :, : given.shape[2]] = given[rows]
        self.end = max(self.end, other.end)

    def keep_rows(self, rows: Tensor) -> None:
        self.stored = [x[rows] for x in self.stored]


class CachedAttention(_Store, nn.Module):
    """Replaces a layer's attention kernel: queries also see the tokens of all earlier calls."""

    attn_type: ClassVar[str] = "cache"

    def __init__(self, max_length: int, batch_invariant: bool):
        super().__init__()
        self.max_length = -(-max_length // KEYS) * KEYS if batch_invariant else max_length
        self.batch_invariant, self.stored = batch_invariant, []

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        block_mask: Tensor,
        scale: float | None = None,
        return_lse: bool = False,
        enable_gqa: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return [B, H, T, Dv], and with `return_lse` the log-sum-exp of the scores [B, H, T].

        q: [B, H, T, D]; k: [B, K, T, D]; v: [B, K, T, Dv]. block_mask: a bool tensor [1 or B, 1, T, S], not a
        BlockMask: True for the slots that a token sees.
        """
        # Allocate in the first call, when shapes, dtype and device are known.
        if not self.stored:
            self._allocate(k, v)
        for stored, new in zip(self.stored, (k, v), strict=True):
            # All rows write to the same slots.
            if len(self.slots) == 1:
                stored[:, :, self.end - new.shape[2] : self.end] = new
            else:
                index = self.slots[:, None, :, None].expand_as(new)
                stored.scatter_(2, index, new.to(stored.dtype))
        if self.batch_invariant:
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            visible = F.pad(block_mask[:, 0], (0, -self.end % KEYS))
            k, v = (x[:, :, : visible.shape[-1]] for x in self.stored)
            with torch.autocast(q.device.type, enabled=False):
                return attend_to_visible(q, k, v, visible, scale)[0].to(q.dtype)
        k, v = (x[:, :, : self.end] for x in self.stored)
        if not return_lse:
            with torch.autocast(q.device.type, enabled=False):
                out = F.scaled_dot_product_attention(
                    q.to(k.dtype), k, v, attn_mask=block_mask, scale=scale, enable_gqa=enable_gqa
                )
            return out.to(q.dtype)
        group = q.shape[1] // k.shape[1]
        # Explicit attention in fp32, because torch's kernel does not return the log-sum-exp.
        k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
        scores = q.float() @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(~block_mask, -torch.inf)
        return (scores.softmax(dim=-1) @ v).to(q.dtype), scores.logsumexp(dim=-1)

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        # On CPUs an fp32 cache rounds less and is faster: with bf16, every step would cast all keys.
        in_fp32 = self.batch_invariant or k.device.type == "cpu"
        dtype = torch.promote_types(k.dtype, torch.float32) if in_fp32 else k.dtype
        self.stored = [
            x.new_zeros(*x.shape[:2], self.max_length, x.shape[3], dtype=dtype) for x in (k, v)
        ]


class CachedDeltaRule(_Store, DeltaRule):
    """Replaces a layer's `DeltaRule`: rows continue from the state and the convolution's last inputs.

    stored: the state of the delta rule, and the last inputs of the three convolutions, [B, ...] each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stored = []

    def forward(
        self,
        inputs: tuple[Tensor, ...],
        taps: tuple[Tensor, ...],
        g: Tensor,
        beta: Tensor,
        key_dim: int,
        mask: DocumentMask,
    ) -> Tensor:
        widths, (n_rows, n_tokens) = [w.shape[1] for w in taps], g.shape[:2]
        # The initial state is zero.
        if not self.stored:
            n_values, n_heads = inputs[2].shape[-1], g.shape[-1]
            sizes = n_rows, n_heads, key_dim, n_values // n_heads
            dtype = torch.promote_types(g.dtype, torch.float32)
            tails = [
                x.new_zeros(n_rows, w - 1, x.shape[-1]) for x, w in zip(inputs, widths, strict=True)
            ]
            self.stored = [g.new_zeros(sizes, dtype=dtype), *tails]
        state, *tails = self.stored
        continued = torch.full((1, 1), -1, device=g.device).expand(n_rows, n_tokens)
        mixed, parts = [], zip(inputs, taps, widths, tails, strict=True)
        for i, (x, w, width, tail) in enumerate(parts, start=1):
            mixed.append(document_conv(x, w, continued, tail))
            self.stored[i] = conv_tail(x, continued, self.counts, width, tail)
        q, k, v = in_heads(mixed, key_dim, g)
        if n_tokens == 1:
            step = gated_delta_step(*(x[:, 0] for x in (q, k, v, g, beta)), state)
            is_new = self.counts[:, None, None, None] > 0
            self.stored[0] = torch.where(is_new, step[1], state)
            return step[0].unsqueeze(1)
        ended = end_rows(self.counts, g, beta, continued)
        out, self.stored[0] = gated_delta_rule(q, k, v, *ended, state, return_state=True)
        return out


class ExpertRecord(_Store):
    """The expert indices of cached tokens, int16 [B, L, max_length, k].

    The entries for layers of other pipeline stages are 0.
    """

    def __init__(self, parts: Sequence[Decoder], max_length: int):
        moe_layers = parts[0].moe_layers
        assert moe_layers, "a dense model has no experts to record"
        self._routers = {
            moe_layers.index(int(name)): layer.moe.router
            for part in parts
            for name, layer in part.layers.items()
            if layer.moe_enabled
        }
        self.max_length, self.stored = max_length, []
        self._sizes = (len(moe_layers), max_length, parts[0].model_args.moe_args.top_k)

    @contextmanager
    def recording(self, n_rows: int) -> Iterator[None]:
        """Record the expert indices of the tokens at `slots` while the model runs inside the context."""
        if not self.stored:
            self.stored = [self.slots.new_zeros(n_rows, *self._sizes, dtype=torch.int16)]
        (stored,), rows = self.stored, torch.arange(n_rows, device=self.slots.device)[:, None]

        def record_in(number: int, router: nn.Module) -> Any:
            def record(_module: nn.Module, _inputs: Any, outputs: tuple[Tensor, ...]) -> None:
                experts = outputs[1].view(n_rows, self.slots.shape[1], -1)
                stored[rows, number, self.slots] = experts.to(stored.dtype)

            return router.register_forward_hook(record)

        with ExitStack() as hooks:
            for number, router in self._routers.items():
                hooks.callback(record_in(number, router).remove)
            yield

    def of_row(self, place: int, length: int) -> Tensor:
        """Return a copy of the expert indices of a row's first `length` tokens, [length, L, k]."""
        return self.stored[0][place, :, :length].transpose(0, 1).clone()


class CachedForward:
    """The forward pass that `kv_cache` yields. lengths: the number of tokens in each row so far."""

    def __init__(
        self,
        parts: Sequence[Decoder],
        layers: Sequence[nn.Module],
        max_length: int,
        run: Callable[..., Tensor | None],
        records_experts: bool = False,
    ):
        self.lengths: list[int] = []
        self.max_length = max_length
        # If another cache has replaced the model's kernels, these are the other cache's kernels.
        kernels = [layer.inner_attention for layer in layers]
        invariant = any(getattr(kernel, "batch_invariant", False) for kernel in kernels)
        self.kernels = [
            CachedDeltaRule()
            if isinstance(kernel, DeltaRule)
            else CachedAttention(max_length, invariant)
            for kernel in kernels
        ]
        self.experts = ExpertRecord(parts, max_length) if records_experts else None
        self._stores: list[Any] = [*self.kernels, *filter(None, [self.experts])]
        self._parts, self._layers, self._run = parts, layers, run
        self._device = getattr(parts[0], parts[0].rope_buffer_name).device
        row = DocumentMask.from_rows(1, max_length, self._device)
        self._masks = parts[0].layer_masks(row)

    def __call__(
        self, tokens: Tensor, n_tokens: Sequence[int] | None = None, *, last_only: bool = False
    ) -> Any:
        """Return the result of `run`: logits [B, T, V] of new tokens [B, T], which continue the rows.

        n_tokens: the number of new tokens in each row, T by default; the rest is padding, whose logits
            are undefined.
        last_only: return only the logits of each row's last new token, [B, 1, V].
        Raises ValueError if a row gets longer than the cache.
        """
        n_rows, width = tokens.shape
        starts = self.lengths or [0] * n_rows
        counts = [width] * n_rows if n_tokens is None else n_tokens
        end = max(starts) + width
        if end > self.max_length:
            raise ValueError(
                f"the cache holds {self.max_length} tokens per row, got {end}; raise max_length"
            )
        slots = torch.arange(end - width, end, device=self._device)[None]
        if min(starts) != end - width:
            starts_of_rows = torch.tensor(starts, device=self._device)
            slots = starts_of_rows[:, None] + torch.arange(width, device=self._device)
        # Masks depend only on slots, so evaluate them for the slots of the new tokens.
        keys = torch.arange(end, device=self._device)
        zero = torch.zeros((), dtype=torch.int64, device=self._device)
        masks = map_masks(
            lambda mask: replace(mask, lowered=mask(zero, zero, slots[:, None, :, None], keys)),
            self._masks,
        )
        n_new = torch.full((n_rows,), width, device=self._device)
        if n_tokens is not None:
            n_new = torch.tensor(counts, device=self._device)
        for store in self._stores:
            store.slots, store.end, store.counts = slots, end, n_new
        for layer, kernel in zip(self._layers, self.kernels, strict=True):
            # If another cache of this model ran in between, it has replaced this cache's kernels.
            if layer.inner_attention is not kernel:
                layer.inner_attention = kernel
        self.lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        with ExitStack() as hooks:
            if last_only and width > 1 and self._parts[-1].output is not None:
                hooks.callback(self._only_last(n_new - 1).remove)
            if self.experts is not None:
                hooks.enter_context(self.experts.recording(n_rows))
            return self._run(tokens, attention_masks=masks, positions=slots)

    def aside(self, max_length: int) -> "CachedForward":
        """Return the forward pass of a second, empty cache for the same model."""
        records = self.experts is not None
        return CachedForward(self._parts, self._layers, max_length, self._run, records)

    def put_rows(self, places: Sequence[int], other: "CachedForward", rows: Sequence[int]) -> None:
        """Overwrite the rows at `places` with `rows` of another cache; a row may be used repeatedly.

        The first call on an empty cache sets its number of rows.
        """
        at, index = torch.tensor([places, rows], device=self._device)
        self.lengths = self.lengths or [0] * len(places)
        for place, row in zip(places, rows, strict=True):
            self.lengths[place] = other.lengths[row]
        for store, given in zip(self._stores, other._stores, strict=True):
            store.put_rows(at, given, index)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order; a row may be repeated."""
        index = torch.tensor(rows, device=self._device)
        self.lengths = [self.lengths[row] for row in rows]
        for store in self._stores:
            store.keep_rows(index)

    def _only_last(self, last: Tensor) -> Any:
        """Pass only each row's last hidden state to the output, because logits of all tokens are large."""

        def keep_last(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            h, *head = args
            return h[torch.arange(len(h), device=h.device), last][:, None], *head

        return self._parts[-1].output.register_forward_pre_hook(keep_last)


@contextmanager
def kv_cache(
    model: Decoder | Sequence[Decoder],
    max_length: int,
    run: Callable[..., Tensor | None] | None = None,
    records_experts: bool = False,
) -> Iterator[CachedForward]:
    """Yield a forward pass with a cache: new tokens [B, T] -> their logits [B, T, V].

    A row is one document, masked by the model's `layer_masks`, so every family and every attn_type
    works. Inside the context, call the model only through the yielded object.

    model: a model, or this rank's parts of a model that is split into pipeline stages.
    max_length: the longest row, in tokens.
    run: called instead of the model, as run(tokens, attention_masks=..., positions=...); required
        for pipeline stages.
    records_experts: keep the experts of all tokens, see `ExpertRecord`.
    Raises ValueError for models without an attention kernel to replace or with a value head, and for
    max_length beyond the RoPE table.
    """
    parts = [model] if isinstance(model, nn.Module) else list(model)
    layers = []
    for part in parts:
        attentions = [module for module in part.modules() if hasattr(module, "inner_attention")]
        if not isinstance(part, Decoder) or len(attentions) != len(part.layers):
            raise ValueError(
                f"generation needs a model on torchtitan.models.decoder.Decoder whose layers have "
                f"an inner_attention each, got {type(part).__name__}"
            )
        if part.model_args.value_head:
            raise ValueError(
                "generation draws tokens from logits, and a model with a value head returns none; "
                "give the policy's model"
            )
        layers += attentions
    n_positions = getattr(parts[0], parts[0].rope_buffer_name).shape[0]
    if max_length > n_positions:
        raise ValueError(
            f"prompt and new tokens together are {max_length} tokens, and the model's RoPE table "
            f"holds {n_positions} positions; lower max_new_tokens, shorten the prompt, or raise "
            "training.seq_len, which sets the table's length"
        )
    kernels = [layer.inner_attention for layer in layers]
    try:
        yield CachedForward(parts, layers, max_length, run or parts[0], records_experts)
    finally:
        for layer, kernel in zip(layers, kernels, strict=True):
            layer.inner_attention = kernel
