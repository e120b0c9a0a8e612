"""Llama 2, 3, 3.1 and 3.2: grouped-query attention, RoPE on neighbouring pairs, SwiGLU."""
# ruff: noqa: F401 (names of torchtitan 0.2.x)

from dataclasses import dataclass, field
from typing import Any

from torchtitan.models import hf_fields as hf
from torchtitan.models.args import DecoderArgs
from torchtitan.models.decoder import Attention, Decoder, FeedForward, TransformerBlock
from torchtitan.models.family import add_old_paths, build_decoder_train_spec
from torchtitan.models.hf_adapter import HFAdapter
from torchtitan.models.parallelize import parallelize_decoder as parallelize_llama
from torchtitan.models.rope import (
    RoPEScalingArgs,
    apply_rotary_emb,
    precompute_freqs_cis,
    reshape_for_broadcast,
)
from torchtitan.protocols.train_spec import TrainSpec


@dataclass
class TransformerModelArgs(DecoderArgs):
    """Llama 3. The last five fields are for other models with Llama's architecture.

    n_kv_heads: None means n_heads.
    multiple_of, ffn_dim_multiplier: the feed-forward's hidden size is 8/3 dim, times
        ffn_dim_multiplier if given, rounded up to a multiple of multiple_of.
    hidden_dim: the feed-forward's hidden size, in place of this formula.
    head_dim: None means dim / n_heads.
    attention_bias: wq, wk, wv and wo have biases; mlp_bias: w1, w2 and w3 have biases.
    rope_scaling_args: None for Llama 2 and 3.0, whose frequencies are not stretched.
    """

    n_kv_heads: int | None = None
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    rope_scaling_args: RoPEScalingArgs | None = field(default_factory=RoPEScalingArgs)
    hidden_dim: int | None = None
    head_dim: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def ffn_hidden_dim(self) -> int:
        """The hidden size of the feed-forward."""
        return self.hidden_dim_by_rule() if self.hidden_dim is None else self.hidden_dim

    def hidden_dim_by_rule(self, n_shares: int = 1) -> int:
        """Return the hidden size by the formula for multiple_of and ffn_dim_multiplier.

        n_shares: divide the size by this number of experts before it is rounded up.
        """
        hidden = int(8 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            hidden = int(self.ffn_dim_multiplier * hidden)
        hidden //= n_shares
        return -(-hidden // self.multiple_of) * self.multiple_of


class Transformer(Decoder):
    """Llama 3 on the shared decoder."""

    model_args: TransformerModelArgs

    def attention_options(self, layer_id: int) -> dict[str, Any]:
        bias = self.model_args.attention_bias
        return {"qkv_bias": bias, "output_bias": bias}

    def hidden_dim(self, layer_id: int) -> int:
        return self.model_args.ffn_hidden_dim

    @property
    def rope_scaling(self) -> RoPEScalingArgs | None:
        return self.model_args.rope_scaling_args


class Llama3StateDictAdapter(HFAdapter):
    """Renames to Hugging Face's LlamaForCausalLM, whose RoPE rotates dimensions i and i + D/2 together."""

    @property
    def rotated_heads(self) -> dict[str, int]:
        args = self.model_args
        heads = {"wq": args.n_heads, "wk": args.n_kv_heads or args.n_heads}
        return {
            f"layers.{{}}.attention.{name}.{kind}": n
            for name, n in heads.items()
            for kind in ("weight", "bias")
        }


def _sizes(dim: int, n_layers: int, n_heads: int, multiplier: float, multiple_of: int) -> dict:
    sizes = {"dim": dim, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": 8}
    return sizes | {"ffn_dim_multiplier": multiplier, "multiple_of": multiple_of}


_FLEX = {"attn_type": "flex", "attn_mask_type": "block_causal"}
_VARLEN = {"attn_type": "varlen", "attn_mask_type": "block_causal"}
_DEBUG = {"dim": 256, "n_layers": 6, "n_heads": 16, "vocab_size": 2048}
_1B = _sizes(2048, 16, 32, 1.5, 256) | {  # Llama 3.2
    "rope_scaling_args": RoPEScalingArgs(scaling_factor=32.0),
    "enable_weight_tying": True,
}
_8B = _sizes(4096, 32, 32, 1.3, 1024)

llama3_args: dict[str, TransformerModelArgs] = {
    flavor: TransformerModelArgs(rope_theta=500000, **sizes)
    for flavor, sizes in {
        "debugmodel": _DEBUG,
        "debugmodel_flex_attn": _DEBUG | _FLEX,
        "debugmodel_varlen_attn": _DEBUG | _VARLEN,
        "1B": _1B,
        "8B": _8B,
        "8B_flex": _8B | _FLEX,
        "8B_varlen": _8B | _VARLEN,
        "70B": _sizes(8192, 80, 64, 1.3, 4096),
        "405B": _sizes(16384, 126, 128, 1.2, 4096),
    }.items()
}


hf_types = {
    "llama": hf.HFType(
        "Llama",
        (
            hf.KV_HEADS,
            hf.Field("intermediate_size", "hidden_dim"),
            hf.Field("head_dim", "head_dim", default=None),
            hf.Field("attention_bias", "attention_bias", bool, False),
            hf.Field("mlp_bias", "mlp_bias", bool, False),
            hf.SILU,
            hf.LLAMA3_ROPE,
        ),
    )
}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(
        Transformer, llama3_args, Llama3StateDictAdapter, balance_experts=False
    )


add_old_paths(__name__)
