"""The forward of one new token per row, for dense llama3 and qwen3 models on one CPU process.

It computes what the model's modules compute, with fewer and larger operations: queries, keys and
values are one product, and so are the two halves of a feed-forward; weights are cast once, and packed
for oneDNN where `numerics.products` prefers it. Nothing is called through a module.

R rows, M model dim, H query heads, K key/value heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan.distributed.dtensor import is_dtensor
from torchtitan.models.decoder import (
    Attention,
    Decoder,
    FeedForward,
    OutputProjection,
    TransformerBlock,
)
from torchtitan.models.rope import rotation, select_positions
from torchtitan.numerics.batch_invariant import batch_invariant_linear
from torchtitan.numerics.linear import Linear, is_slow_product, linear
from torchtitan.numerics.products import packed_linear
from torchtitan.tools import torch_parts
from torchtitan.tools.utils import free_memory

Product = Callable[[Tensor], Tensor]
_PLAIN = (
    (Decoder, ("forward", "layer_masks")),
    (TransformerBlock, ("forward",)),
    (Attention, ("forward", "attend")),
    (FeedForward, ("forward",)),
    (nn.RMSNorm, ("forward",)),
    (nn.Embedding, ("forward",)),
)


def is_plain(parts: Sequence[nn.Module]) -> bool:
    """Return True if `OneTokenForward` computes what these modules compute.

    False for other families, split or wrapped models, and hooks such as adapters', and if a copy of
    the weights in fp32 would take more than half of the free memory.
    """
    if len(parts) != 1 or parts[0].output is None or parts[0].tok_embeddings is None:
        return False
    if parts[0].tok_embeddings.weight.device.type != "cpu":
        return False
    for module in parts[0].modules():
        if torch_parts.forward_hooks(module) or torch_parts.forward_pre_hooks(module):
            return False
        if isinstance(module, nn.Linear):
            is_known = type(module).forward in (Linear.forward, OutputProjection.forward)
            if (
                not is_known
                or hasattr(module, "lora")
                or module.product not in (linear, batch_invariant_linear)
            ):
                return False
            continue
        for kind, methods in _PLAIN:
            if isinstance(module, kind):
                same = all(getattr(type(module), m) is getattr(kind, m) for m in methods)
                if not same or getattr(module, "moe_enabled", False):
                    return False
                break
        else:
            if any(True for _ in module.parameters(recurse=False)):
                return False
    if any(is_dtensor(p) for p in parts[0].parameters()):
        return False
    copied = sum(4 * p.numel() for p in parts[0].parameters())
    return copied <= free_memory(torch.device("cpu")) / 2


class OneTokenForward:
    """Made for a model and its present weights, of which it may hold copies.

    dtype: of the products; None takes the weights' own.
    """

    def __init__(self, model: Any, dtype: torch.dtype | None):
        self._model = model
        self._layers = []
        for block in model.layers.values():
            attention, feed_forward = block.attention, block.feed_forward
            rotate = None if attention.apply_rope is None else rotation(attention.apply_rope)
            qkv = [attention.wq, attention.wk, attention.wv]
            linears = qkv, [attention.wo], [feed_forward.w1, feed_forward.w3], [feed_forward.w2]
            self._layers.append((block, rotate, *(self._product(x, dtype) for x in linears)))
        head = model.output
        if head.in_fp32:
            dtype = torch.promote_types(head.weight.dtype, torch.float32)
        self._head = self._product([head], dtype)

    def _product(self, linears: Sequence[Any], dtype: torch.dtype | None) -> Product:
        """Return the product with the weights of all these layers, one below the other."""
        dtype = dtype or linears[0].weight.dtype
        # Products of other shapes would have other bits.
        if linears[0].product is batch_invariant_linear:
            parts = [
                [None if t is None else t.detach().to(dtype) for t in (layer.weight, layer.bias)]
                for layer in linears
            ]
            return lambda x: torch.cat(
                [batch_invariant_linear(x.to(dtype), *own) for own in parts], dim=-1
            )
        weights = [layer.weight.detach().to(dtype) for layer in linears]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        biases = [layer.bias for layer in linears if layer.bias is not None]
        bias = torch.cat([bias.detach().to(dtype) for bias in biases]) if biases else None
        if not is_slow_product(weight):
            product = packed_linear(weight, bias)
            return lambda x: product(x.to(dtype))
        in_fp32 = packed_linear(weight.float(), None if bias is None else bias.float())
        return lambda x: in_fp32(x.to(dtype).float()).to(dtype)

    def __call__(
        self, tokens: Tensor, positions: Tensor, kernels: Sequence[Any], hidden: Tensor | None
    ) -> Tensor:
        """Return logits [R, 1, V] of tokens [R, 1].

        positions: [1 or R, 1]. kernels: each layer's `CachedAttention`. hidden: bool [R, 1, S], True
            for slots of the cache that a row does not see; None if every row sees all.
        """
        with torch.autocast("cpu", enabled=False):
            return self._logits(tokens, positions, kernels, hidden)[:, None]

    def _logits(
        self, tokens: Tensor, positions: Tensor, kernels: Sequence[Any], hidden: Tensor | None
    ) -> Tensor:
        model = self._model
        h = F.embedding(tokens[:, 0], model.tok_embeddings.weight)
        rope = select_positions(getattr(model, model.rope_buffer_name), positions, 1)
        for (block, rotate, qkv, wo, w13, w2), kernel in zip(self._layers, kernels, strict=True):
            attention = block.attention
            n_heads, n_kv_heads = attention.n_heads, attention.n_kv_heads
            heads = qkv(block.attention_norm.forward(h)).view(len(h), 1, -1, attention.head_dim)
            qk, v = heads[:, :, : n_heads + n_kv_heads], heads[:, 0, n_heads + n_kv_heads :]
            if attention.q_norm is not None:
                q, k = qk.split((n_heads, n_kv_heads), dim=2)
                q, k = attention.q_norm.forward(q), attention.k_norm.forward(k)
                qk = torch.cat((q, k), dim=2).to(heads.dtype)
            qk = qk if rotate is None else rotate(qk, rope)
            seen = kernel.attend_one(qk[:, 0, :n_heads], qk[:, 0, n_heads:], v, hidden)
            h = h + wo(seen.flatten(1))
            gate, up = w13(block.ffn_norm.forward(h)).chunk(2, dim=-1)
            h = h + w2(block.feed_forward.activation(gate) * up)
        return self._head(model.norm.forward(h))
