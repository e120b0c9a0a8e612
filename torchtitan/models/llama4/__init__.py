"""Llama 4's text model, with experts. RoPE layers attend within chunks, other layers within documents.

B rows, T tokens, H query heads, K key/value heads, D head size.
"""
# ruff: noqa: F401 (names of torchtitan 0.2.x)

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtitan.batch.mask import DocumentMask, Masks
from torchtitan.config import JobConfig
from torchtitan.models import hf_fields as hf
from torchtitan.models import llama3, rope
from torchtitan.models.decoder import Attention, FeedForward, TransformerBlock
from torchtitan.models.family import add_old_paths, build_decoder_train_spec
from torchtitan.models.hf_adapter import (
    Fused,
    HFAdapter,
    block_hf_key_map,
    feed_forward_names,
)
from torchtitan.models.moe import MoEArgs, MoEDecoderArgs, build_moe
from torchtitan.models.parallelize import parallelize_decoder as parallelize_llama
from torchtitan.models.rope import (
    apply_rotary_emb,
    precompute_freqs_cis,
    query_factors,
    reshape_for_broadcast,
)
from torchtitan.protocols.train_spec import TrainSpec


@dataclass
class RoPEScalingArgs(rope.RoPEScalingArgs):
    """Llama 4 Scout's scaling: low frequencies are divided by 16, without a blend."""

    scaling_factor: float = 16.0
    high_freq_factor: float = 1.0


@dataclass
class TransformerModelArgs(llama3.TransformerModelArgs, MoEDecoderArgs):
    """Llama 4's text model: Llama 3 plus layers without RoPE, chunks, and experts.

    every_n_layers_nope: n; the layers of index n - 1, 2 n - 1, ... have no RoPE, and in these layers a
        token attends to its whole document. None: all layers have RoPE.
    fixed_attn_block_size: in layers with RoPE a token attends only to its chunk of this many tokens.
        A document's first chunk begins with the document.
    interleave_moe_layer_step: s; the layers of index s - 1, 2 s - 1, ... have experts; 1 means all.
    auto_scale_hidden_dim: a token's experts together are as wide as one dense feed-forward.
    moe_inter_dim: the hidden size of an expert; auto_scale_hidden_dim is then ignored.
    use_qk_norm: RMS-normalise each head of queries and keys after RoPE, without weights.
    attn_temperature_tuning: in layers without RoPE, multiply the query at position p by
        1 + attn_scale * log(1 + floor((p + 1) / floor_scale)) (arXiv:2501.19399).
    """

    vocab_size: int = 202048
    max_seq_len: int = 1048576
    rope_scaling_args: RoPEScalingArgs | None = None
    every_n_layers_nope: int | None = None
    fixed_attn_block_size: int = 8192
    auto_scale_hidden_dim: bool = True
    interleave_moe_layer_step: int = 2
    moe_inter_dim: int | None = None
    use_qk_norm: bool = False
    attn_temperature_tuning: bool = False
    floor_scale: int = 8192
    attn_scale: float = 0.1

    def is_nope_layer(self, layer_id: int) -> bool:
        """Return True if the layer has no RoPE and sees whole documents."""
        interval = self.every_n_layers_nope
        return interval is not None and (layer_id + 1) % interval == 0

    @property
    def expert_hidden_dim(self) -> int:
        """The hidden size of one expert, routed or shared."""
        if self.moe_inter_dim is not None:
            return self.moe_inter_dim
        per_token = self.moe_args.top_k + self.moe_args.num_shared_experts
        return self.hidden_dim_by_rule(per_token if self.auto_scale_hidden_dim else 1)

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        """Apply the config as `MoEDecoderArgs` does, then call `check_chunks`, which may raise ValueError."""
        super().update_from_config(job_config, **kwargs)
        self.check_chunks(self.max_seq_len)

    def check_layers(self) -> None:
        """Raise ValueError if a layer interval, the chunk size or floor_scale is too small."""
        smallest = {"every_n_layers_nope": 2, "interleave_moe_layer_step": 1}
        smallest |= {"fixed_attn_block_size": 1, "floor_scale": 1}
        for name, least in smallest.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(
                    f"{name} of a Llama 4 flavor must be at least {least}, got {value}; correct it"
                )

    def check_chunks(self, seq_len: int) -> None:
        """Raise ValueError for sdpa, which cannot mask chunks, if rows are longer than a chunk."""
        if self.attn_type == "sdpa" and seq_len > self.fixed_attn_block_size:
            raise ValueError(
                f"attn_type 'sdpa' cannot keep the chunks of {self.fixed_attn_block_size} tokens "
                f"apart, got rows of {seq_len}; set model.attn_type to 'flex' or 'varlen', or "
                f"training.seq_len to at most {self.fixed_attn_block_size}"
            )


class Transformer(llama3.Transformer):
    """Llama 4, with experts. Layers with RoPE attend within chunks, other layers within documents.

    Masks are {"rope": within a chunk, "nope": within a document}. With temperature tuning the RoPE
    table is complex64 [L, D/2 + 1]; the last column is the queries' factor at each position.

    Raises ValueError like `TransformerModelArgs.check_layers`; forward raises ValueError like `check_chunks`.
    """

    model_args: TransformerModelArgs

    def __init__(self, model_args: TransformerModelArgs):
        model_args.check_layers()
        super().__init__(model_args)

    def check_rows(self, attention_masks: Any, row_len: int) -> None:
        # Only a dict of masks separates chunks; with any other mask, a row must fit into one chunk.
        if not isinstance(attention_masks, dict):
            self.model_args.check_chunks(row_len)

    def is_moe_layer(self, layer_id: int) -> bool:
        return (layer_id + 1) % self.model_args.interleave_moe_layer_step == 0

    def build_attention(self, layer_id: int) -> Attention:
        args = self.model_args
        attention = super().build_attention(layer_id)
        if args.is_nope_layer(layer_id):
            attention.mask_name = "nope"
            attention.apply_rope = _scale_queries if args.attn_temperature_tuning else None
        else:
            attention.mask_name = "rope"
            eps = args.norm_eps if args.use_qk_norm else None
            attention.apply_rope = partial(_rotate, norm_eps=eps)
        return attention

    def hidden_dim(self, layer_id: int) -> int:
        args = self.model_args
        return args.expert_hidden_dim if self.is_moe_layer(layer_id) else args.ffn_hidden_dim

    def build_rope_table(self, length: int) -> Tensor:
        args, table = self.model_args, super().build_rope_table(length)
        if not args.attn_temperature_tuning:
            return table
        factors = query_factors(torch.arange(1, length + 1), args.attn_scale, args.floor_scale)
        return torch.cat((table, factors.to(table.dtype)), dim=1)

    def layer_masks(self, documents: DocumentMask) -> Masks:
        chunks = documents.in_chunks(self.model_args.fixed_attn_block_size)
        return {"rope": chunks, "nope": documents}


def _rotate(
    xq: Tensor, xk: Tensor, rows: Tensor, *, norm_eps: float | None
) -> tuple[Tensor, Tensor]:
    """Apply RoPE, then normalise heads unless norm_eps is None; shapes as in `apply_rotary_emb`."""
    xq, xk = apply_rotary_emb(xq, xk, rows[..., : xq.shape[-1] // 2])
    if norm_eps is None:
        return xq, xk
    return _normalise(xq, norm_eps), _normalise(xk, norm_eps)


def _normalise(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


def _scale_queries(xq: Tensor, xk: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply xq [B, T, H, D] by the last column of rows, complex [1 or B, T, D/2 + 1]."""
    factors = torch.view_as_real(rows)[..., -1, 0]
    return (xq * factors[..., None, None]).to(xq.dtype), xk


_MOE, _HF_MOE = "layers.{}.moe", "model.layers.{}.feed_forward"


class Llama4StateDictAdapter(HFAdapter):
    """Renames, and joins w1 and w3 of all experts; RoPE pairs are neighbours in our and in HF's weights.

    Reads the names of Llama4ForCausalLM and of the multimodal Llama4ForConditionalGeneration. Reading
    skips image weights; an export has the multimodal names only if it also has the image weights.
    """

    ignored_hf_keys = (r"vision_model\.", r"multi_modal_projector\.")
    text_prefixes = ("language_model.",)
    own_names = {
        **block_hf_key_map(feed_forward_names("feed_forward", "feed_forward"), "weight", "bias"),
        **block_hf_key_map(feed_forward_names("feed_forward.shared_expert", "moe.shared_experts")),
        f"{_HF_MOE}.router.weight": f"{_MOE}.router.gate.weight",
        f"{_HF_MOE}.experts.gate_up_proj": Fused(
            (f"{_MOE}.experts.w1", f"{_MOE}.experts.w3"), transposed=True
        ),
        f"{_HF_MOE}.experts.down_proj": Fused((f"{_MOE}.experts.w2",), transposed=True),
    }


_DEBUG = {"dim": 256, "n_layers": 6, "n_heads": 16, "vocab_size": 2048}
_17B = {
    "dim": 5120,
    "n_layers": 48,
    "n_heads": 40,
    "n_kv_heads": 8,
    "ffn_dim_multiplier": 1.2,
    "multiple_of": 2048,
}
_SCOUT = _17B | {"max_seq_len": 10485760, "interleave_moe_layer_step": 1}
_IROPE = {"every_n_layers_nope": 4, "attn_type": "flex", "attn_mask_type": "block_causal"}


def _flavor(num_experts: int, stretch_rope: bool, **sizes: Any) -> TransformerModelArgs:
    return TransformerModelArgs(
        rope_theta=500000,
        rope_scaling_args=RoPEScalingArgs() if stretch_rope else None,
        moe_args=MoEArgs(num_experts=num_experts),
        **sizes,
    )


llama4_args: dict[str, TransformerModelArgs] = {
    "debugmodel": _flavor(8, True, **_DEBUG),
    "17bx16e": _flavor(16, True, **_SCOUT),
    "17bx128e": _flavor(128, False, **_17B),
    "debugmodel_irope": _flavor(8, True, fixed_attn_block_size=256, **_DEBUG, **_IROPE),
    "17bx16e_irope": _flavor(16, True, **_SCOUT, **_IROPE),
    "17bx128e_irope": _flavor(128, False, **_17B, **_IROPE),
}


_KINDS = ("chunked_attention", "full_attention")
_INTERVAL = hf.Field("no_rope_layer_interval", "every_n_layers_nope", default=4)
_ROWS = (
    hf.KV_HEADS,
    hf.Field("num_local_experts", "moe_args.num_experts"),
    hf.TOP_K,
    hf.Field("head_dim", "head_dim"),
    hf.Field("intermediate_size", "moe_inter_dim"),
    hf.Field("intermediate_size_mlp", "hidden_dim"),
    hf.Field("attention_chunk_size", "fixed_attn_block_size"),
    hf.Field("interleave_moe_layer_step", "interleave_moe_layer_step", default=1),
    hf.Field("use_qk_norm", "use_qk_norm", bool, True),
    hf.Field(
        "attn_temperature_tuning", "attn_temperature_tuning", None, True, lambda x, _: bool(x)
    ),
    hf.Field("floor_scale", "floor_scale", float, 8192),
    hf.Field("attn_scale", "attn_scale", float, 0.1),
    hf.Field("attention_bias", "attention_bias", bool, False),
    # 1 for a layer with RoPE, else 0.
    hf.Field(
        "no_rope_layers",
        "every_n_layers_nope",
        None,
        default=lambda config: _INTERVAL.read(config)["every_n_layers_nope"],
        from_hf=lambda has_rope, _: has_rope.index(0) + 1 if 0 in has_rope else None,
        also=("no_rope_layer_interval",),
    ),
    hf.Must(
        "no_rope_layers",
        hf.each_layer(lambda args, n: int(not args.is_nope_layer(n))),
        "layers without RoPE must be evenly spaced",
    ),
    hf.Must(
        "layer_types",
        hf.each_layer(lambda args, n: _KINDS[args.is_nope_layer(n)]),
    ),
    hf.Must(
        "moe_layers",
        lambda args: [
            n for n in range(args.n_layers) if (n + 1) % args.interleave_moe_layer_step == 0
        ],
    ),
    hf.NO_JITTER,
    hf.SILU,
    replace(hf.LLAMA3_ROPE, theta=500000.0),
)
_ARGS = {"moe_args.num_shared_experts": 1, "moe_args.score_func": "sigmoid"}
hf_types = {"llama4_text": hf.HFType("Llama4", _ROWS, _ARGS, inside=("llama4",))}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(Transformer, llama4_args, Llama4StateDictAdapter)


add_old_paths(__name__)
