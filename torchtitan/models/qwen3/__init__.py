"""Qwen 3 (dense and MoE), Qwen 2 and 2.5: rotate-half RoPE, SwiGLU or experts."""
# ruff: noqa: F401 (names of torchtitan 0.2.x)

from dataclasses import dataclass
from functools import partial
from typing import Any

from torchtitan.models import hf_causal_lm as hf_lm
from torchtitan.models import hf_fields as hf
from torchtitan.models.decoder import Attention, Decoder, FeedForward, TransformerBlock
from torchtitan.models.family import add_old_paths, build_decoder_train_spec
from torchtitan.models.hf_adapter import HFAdapter
from torchtitan.models.hf_config import args_of
from torchtitan.models.moe import MoEArgs, MoEDecoderArgs
from torchtitan.models.norm import head_norm
from torchtitan.models.parallelize import parallelize_decoder as parallelize_qwen3
from torchtitan.models.rope import apply_rotary_emb_to_halves as apply_rotary_emb
from torchtitan.models.rope import precompute_rope_cache
from torchtitan.protocols.train_spec import TrainSpec


@dataclass
class Qwen3ModelArgs(MoEDecoderArgs):
    """Qwen 3; also Qwen 2 and 2.5, with biases and without norms in attention.

    head_dim: the size of an attention head, independent of dim / n_heads.
    hidden_dim: the hidden size of the feed-forward.
    qk_norm: normalise each head of queries and keys before RoPE (False for Qwen 2).
    qkv_bias: wq, wk and wv have biases (True for Qwen 2).
    moe_enabled: every block has experts of hidden size moe_inter_dim; hidden_dim is not used.
    """

    dim: int = 1024
    n_layers: int = 28
    n_heads: int = 16
    n_kv_heads: int = 8
    vocab_size: int = 151936
    head_dim: int = 128
    hidden_dim: int = 3072
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000
    max_seq_len: int = 4096
    eos_id: int = 151645
    qk_norm: bool = True
    qkv_bias: bool = False
    moe_enabled: bool = False
    moe_inter_dim: int = 768


class Qwen3Model(Decoder):
    """Qwen 3 on the shared decoder."""

    model_args: Qwen3ModelArgs
    rope_buffer_name = "rope_cache"

    def attention_options(self, layer_id: int) -> dict[str, Any]:
        args = self.model_args
        norm = partial(head_norm, args) if args.qk_norm else None
        return {"qkv_bias": args.qkv_bias, "qk_norm": norm}

    def is_moe_layer(self, layer_id: int) -> bool:
        return self.model_args.moe_enabled


class Qwen3StateDictAdapter(HFAdapter):
    """Renames to Hugging Face's Qwen3ForCausalLM and Qwen2ForCausalLM."""


_NO_WINDOWS = "qwen models have no sliding windows here"
_ROWS = (
    hf.KV_HEADS,
    hf.Field("intermediate_size", "hidden_dim"),
    hf.SILU,
    hf.Must("use_sliding_window", False, _NO_WINDOWS),
    hf.Must("layer_types", hf.each_layer(lambda args, n: "full_attention"), _NO_WINDOWS),
    hf.RoPE(),
)
_QWEN3_ROWS = (
    *_ROWS,
    hf.Field("head_dim", "head_dim", default=128),
    hf.Must("attention_bias", False, "Qwen 3 blocks have no biases"),
)
_EXPERT_ROWS = (
    hf.Field("num_experts", "moe_args.num_experts"),
    hf.TOP_K,
    hf.Field("moe_intermediate_size", "moe_inter_dim"),
    hf.Field("norm_topk_prob", "moe_args.route_norm", bool, False),
    hf.Must("decoder_sparse_step", 1, "every layer has experts"),
    hf.Must("mlp_only_layers", [], "every layer has experts"),
)
_QWEN2_ARGS = {"qk_norm": False, "qkv_bias": True, "moe_enabled": False}
_QWEN3_ARGS = {"qk_norm": True, "qkv_bias": False, "moe_enabled": False}
_MOE_ARGS = _QWEN3_ARGS | {"moe_enabled": True} | hf.SOFTMAX_ROUTER | hf.NO_SHARED_EXPERTS
hf_types = {
    "qwen2": hf.HFType("Qwen2", (*_ROWS, hf_lm.HEAD_DIM), _QWEN2_ARGS),
    "qwen3": hf.HFType("Qwen3", _QWEN3_ROWS, _QWEN3_ARGS),
    "qwen3_moe": hf.HFType("Qwen3Moe", _QWEN3_ROWS + _EXPERT_ROWS, _MOE_ARGS),
}

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 4096,
}
_QWEN2 = _QWEN3 | {"model_type": "qwen2", "max_position_embeddings": 32768}
_TIED = {"tie_word_embeddings": True}
_SMALL = {"vocab_size": 2048}
# Larger Qwen 2.5 models pad the vocabulary, so that it splits evenly over more ranks.
_PADDED = {"vocab_size": 152064}


def _experts(num_experts: int, moe_inter_dim: int, top_k: int = 8) -> dict[str, Any]:
    sizes = {"num_experts": num_experts, "moe_intermediate_size": moe_inter_dim}
    router = {"num_experts_per_tok": top_k, "norm_topk_prob": True}
    return {"model_type": "qwen3_moe", **sizes, **router}


_30B = {"max_position_embeddings": 262144, **_experts(128, 768)}
_235B = {"rope_theta": 5_000_000, **_experts(128, 1536)}
qwen3_args: dict[str, Qwen3ModelArgs] = {
    flavor: args_of(config, hf_types[config["model_type"]], Qwen3ModelArgs)
    for flavor, config in {
        "debugmodel": _QWEN3 | hf_lm.sizes(256, 8, 3072, 16, 8, **_SMALL, **_TIED),
        "0.6B": _QWEN3 | hf_lm.sizes(1024, 28, 3072, 16, 8, **_TIED),
        "1.7B": _QWEN3 | hf_lm.sizes(2048, 28, 6144, 16, 8, **_TIED),
        "4B": _QWEN3 | hf_lm.sizes(2560, 36, 9728, 32, 8, **_TIED),
        "8B": _QWEN3 | hf_lm.sizes(4096, 36, 12288, 32, 8),
        "14B": _QWEN3 | hf_lm.sizes(5120, 40, 17408, 40, 8),
        "32B": _QWEN3 | hf_lm.sizes(5120, 64, 25600, 64, 8),
        "debugmodel_moe_small": _QWEN3
        | hf_lm.sizes(256, 4, 3072, 8, 8, **_SMALL, **_experts(8, 256, top_k=2)),
        "debugmodel_moe": _QWEN3 | hf_lm.sizes(256, 8, 3072, 16, 8, **_SMALL, **_experts(64, 768)),
        "30B-A3B": _QWEN3 | hf_lm.sizes(2048, 48, 6144, 32, 4, **_30B),
        "235B-A22B": _QWEN3 | hf_lm.sizes(4096, 94, 12288, 64, 4, **_235B),
        "Qwen2-0.5B": _QWEN2 | hf_lm.sizes(896, 24, 4864, 14, 2, **_TIED),
        "Qwen2.5-3B": _QWEN2 | hf_lm.sizes(2048, 36, 11008, 16, 2, **_TIED),
        "Qwen2.5-7B": _QWEN2 | hf_lm.sizes(3584, 28, 18944, 28, 4, **_PADDED),
        "Qwen2.5-14B": _QWEN2 | hf_lm.sizes(5120, 48, 13824, 40, 8, rms_norm_eps=1e-5, **_PADDED),
        "Qwen2.5-32B": _QWEN2 | hf_lm.sizes(5120, 64, 27648, 40, 8, rms_norm_eps=1e-5, **_PADDED),
    }.items()
}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(Qwen3Model, qwen3_args, Qwen3StateDictAdapter)


add_old_paths(__name__)
