"""A decoder defined only by its args, which set how each kind of layer differs from Llama's.

A Hugging Face family without formulas of its own is a table of args; see `models.families`. RoPE rotates
dimensions i and i + D/2 of a head together. B rows, T tokens, M model dim, H query heads, K key/value heads,
D head size.
"""

import functools
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtitan.batch.mask import DocumentMask, Masks
from torchtitan.config.job_config import ParameterGroup
from torchtitan.models.decoder import Attention, Decoder
from torchtitan.models.gated_delta import GatedDeltaNet
from torchtitan.models.moe import MoEDecoderArgs
from torchtitan.models.norm import head_norm, whole_norm
from torchtitan.models.rope import (
    RoPEArgs,
    apply_rotary_emb_to_halves,
    query_factors,
    rotate_columns,
)
from torchtitan.models.utils import get_moe_model_nparams_and_flops
from torchtitan.numerics import delta_rule_fla
from torchtitan.numerics.delta_rule import multiplications_per_token


@dataclass(frozen=True)
class LayerKind:
    """The args that all layers of one kind share.

    rope: None for layers without RoPE. window: a token sees itself and the window - 1 tokens before it.
    mixer: "gated_delta" for linear attention, see `models.gated_delta`.
    head_dim, n_kv_heads: None means the value in `CausalLMArgs`. values_from_keys: see `Attention`.
    """

    rope: RoPEArgs | None = RoPEArgs()
    window: int | None = None
    mixer: Literal["attention", "gated_delta"] = "attention"
    head_dim: int | None = None
    n_kv_heads: int | None = None
    values_from_keys: bool = False


FULL_ATTENTION = "full_attention"


@dataclass
class CausalLMArgs(MoEDecoderArgs):
    """The args of a `CausalLM`; the defaults are Llama's.

    hidden_dim, moe_inter_dim: hidden size of a dense feed-forward, and of one expert.
    qkv_bias, output_bias, mlp_bias: biases in wq, wk and wv, in wo, and in dense feed-forwards.
    qk_norm: True: normalise each head of queries and keys before RoPE; "whole": all heads at once.
    v_norm: normalise each head of values, without weights.
    softmax_scale: the factor on attention scores; None: head_dim ** -0.5.
    attention_gate: see `Attention.has_gate`.
    query_scale, query_scale_length: multiply the query at position p of its document by
        1 + query_scale * ln(1 + floor(p / query_scale_length)), after RoPE.
    layer_kinds: name -> `LayerKind`. layer_types: the name of each layer's kind; empty: all layers are of
        the first kind.
    linear_*: sizes of `GatedDeltaNet`, for layer kinds with mixer "gated_delta".
    moe_enabled: layers have experts, except the `dense_layers`.
    hf_type: model_type in Hugging Face's config.json.
    """

    n_kv_heads: int = 8
    head_dim: int = 128
    hidden_dim: int = 11008
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool | Literal["whole"] = False
    v_norm: bool = False
    softmax_scale: float | None = None
    attention_gate: bool = False
    query_scale: float = 0.0
    query_scale_length: int = 1
    layer_kinds: dict[str, LayerKind] = field(default_factory=lambda: {FULL_ATTENTION: LayerKind()})
    layer_types: tuple[str, ...] = ()
    linear_key_heads: int = 16
    linear_value_heads: int = 32
    linear_key_dim: int = 128
    linear_value_dim: int = 128
    linear_conv_width: int = 4
    moe_enabled: bool = False
    moe_inter_dim: int = 768
    dense_layers: tuple[int, ...] = ()
    hf_type: str = ""

    def kind_of(self, layer_id: int) -> tuple[str, LayerKind]:
        """Return the kind of a layer: its name and its `LayerKind`."""
        name = self.layer_types[layer_id] if self.layer_types else next(iter(self.layer_kinds))
        return name, self.layer_kinds[name]

    def head_dim_of(self, kind: LayerKind) -> int:
        return kind.head_dim or self.head_dim

    @property
    def all_kv_heads(self) -> int:
        """The greatest common divisor of all layer kinds' numbers of key/value heads."""
        return math.gcd(*(k.n_kv_heads or self.n_kv_heads for k in self.layer_kinds.values()))

    @property
    def n_linear_layers(self) -> int:
        """The number of layers with linear attention."""
        kinds = (self.kind_of(n)[1] for n in range(self.n_layers))
        return sum(kind.mixer == "gated_delta" for kind in kinds)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        kinds = [self.kind_of(n)[1] for n in range(self.n_layers)]
        sizes = [self.head_dim_of(kind) for kind in kinds if kind.mixer == "attention"]
        products = self.n_heads * 2 * sum(sizes) * seq_len
        each = multiplications_per_token(self.linear_key_dim, self.linear_value_dim)
        products += self.n_linear_layers * self.linear_value_heads * each
        return get_moe_model_nparams_and_flops(self, model, self.head_dims, seq_len, products)

    def check(self) -> None:
        """Raise ValueError for inconsistent layer_types or n_kv_heads, and for sliding windows with sdpa."""
        if self.layer_types and len(self.layer_types) != self.n_layers:
            raise ValueError(
                f"layer_types must name the kind of each of the {self.n_layers} layers, got "
                f"{len(self.layer_types)} names; correct layer_types or n_layers"
            )
        if unknown := {*self.layer_types} - {*self.layer_kinds}:
            raise ValueError(
                f"layer_types has {', '.join(sorted(unknown))}, but layer_kinds has only "
                f"{', '.join(self.layer_kinds)}; add the kind to layer_kinds"
            )
        if self.n_heads % self.all_kv_heads:
            raise ValueError(
                f"n_kv_heads of every kind in layer_kinds must divide n_heads = {self.n_heads}; "
                "correct n_kv_heads or n_heads"
            )
        if self.attn_type == "sdpa" and any(kind.window for kind in self.layer_kinds.values()):
            raise ValueError(
                "attn_type 'sdpa' has no sliding windows, which this model needs; set model.attn_type to "
                "'flex' or 'varlen'"
            )


class CausalLM(Decoder):
    """The decoder of `CausalLMArgs`. Raises ValueError like `CausalLMArgs.check`.

    The RoPE table fp32 [L, ...] has the columns of each kind of layer side by side. With a query_scale, the
    last column is the queries' factor at each position. If a kind has a window, masks are a dict: the name
    of a kind -> its mask.
    """

    model_args: CausalLMArgs
    rope_buffer_name = "rope_cache"

    def __init__(self, model_args: CausalLMArgs):
        model_args.check()
        super().__init__(model_args)

    @property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """The groups of a model with linear attention, for `optim.groups`.

        Norms, A_log and dt_bias have no weight decay; convolutions are not trained by Muon.
        """
        if not self.model_args.n_linear_layers:
            return ()
        return (
            ParameterGroup(pattern=r"norm\.weight$|\.(A_log|dt_bias)$", weight_decay=0.0),
            ParameterGroup(pattern=r"\.conv_[qkv]$", muon=False),
        )

    def is_moe_layer(self, layer_id: int) -> bool:
        return self.model_args.moe_enabled and layer_id not in self.model_args.dense_layers

    def build_attention(self, layer_id: int) -> nn.Module:
        args = self.model_args
        name, kind = args.kind_of(layer_id)
        if kind.mixer == "gated_delta":
            return GatedDeltaNet(
                args.dim,
                args.linear_key_heads,
                args.linear_value_heads,
                args.linear_key_dim,
                args.linear_value_dim,
                args.linear_conv_width,
                args.norm_eps,
            )
        norm = {False: None, True: head_norm, "whole": whole_norm}[args.qk_norm]
        attention = Attention(
            args.dim,
            args.n_heads,
            kind.n_kv_heads or args.n_kv_heads,
            args.head_dim_of(kind),
            attn_type=args.attn_type,
            qkv_bias=args.qkv_bias,
            output_bias=args.output_bias,
            qk_norm=norm and functools.partial(norm, args),
            values_from_keys=kind.values_from_keys,
            apply_rope=self._rotation_of(name, kind),
            mask_name=name,
            softmax_scale=args.softmax_scale,
            window=kind.window,
            has_gate=args.attention_gate,
        )
        if args.v_norm:
            size = (attention.head_dim,)
            attention.v_norm = functools.partial(
                F.rms_norm, normalized_shape=size, eps=args.norm_eps
            )
        return attention

    def _rotation_of(self, name: str, kind: LayerKind) -> Any:
        columns, query_scale = self._rope_columns(), self.model_args.query_scale
        first, size = columns.get(name, (0, None))
        if len(columns) == 1 and size == self.model_args.head_dim_of(kind) and not query_scale:
            return apply_rotary_emb_to_halves  # the layer uses all columns of the table
        if size is None and not query_scale:
            return None
        scale_column = -1 if query_scale else None
        return functools.partial(rotate_columns, first=first, size=size, scale_column=scale_column)

    def _rope_columns(self) -> dict[str, tuple[int, int]]:
        """Return kind -> (its first column in the RoPE table, the `RoPEArgs.size` R), for kinds with RoPE."""
        columns, first = {}, 0
        for name, kind in self.model_args.layer_kinds.items():
            if kind.rope is not None:
                size = kind.rope.size(self.model_args.head_dim_of(kind))
                columns[name] = first, size
                first += 2 * size
        return columns

    def build_rope_table(self, length: int) -> Tensor:
        args = self.model_args
        how = length, args.rope_theta, args.max_seq_len
        parts = [
            kind.rope.table(args.head_dim_of(kind), *how)
            for kind in args.layer_kinds.values()
            if kind.rope is not None
        ]
        if args.query_scale:
            positions = torch.arange(length)
            parts.append(query_factors(positions, args.query_scale, args.query_scale_length))
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def check_rows(self, attention_masks: Any, row_len: int) -> None:
        if not self.model_args.n_linear_layers:
            return
        masks = attention_masks.values() if isinstance(attention_masks, dict) else [attention_masks]
        of_rows = [DocumentMask.from_mask(m) for m in masks if m is not None]
        if any(m.depths is not None or m.boundaries(row_len) is None for m in of_rows):
            raise ValueError(
                "linear attention needs document boundaries, which a mask of trees or a custom mask does not "
                "have; give a mask from the model's get_attention_masks"
            )

    def layer_masks(self, documents: DocumentMask) -> Masks:
        kinds = self.model_args.layer_kinds
        if self.model_args.n_linear_layers and documents.depths is not None:
            raise ValueError(
                "linear attention has one state per document and cannot use trees of documents, got a "
                "batch with 'parent_ids'; give each branch its own copy of its ancestors' tokens"
            )
        starts, is_whole = documents.starts, documents.rows_are_documents
        if self.model_args.n_linear_layers and starts is not None and not is_whole:
            if delta_rule_fla.is_available(starts.device):
                documents = documents.with_lengths()
        if not any(kind.window for kind in kinds.values()):
            return documents
        # Kinds with the same window share a mask, so that it is lowered once.
        masks = {kind.window: documents.with_window(kind.window) for kind in kinds.values()}
        return {name: masks[kind.window] for name, kind in kinds.items()}
