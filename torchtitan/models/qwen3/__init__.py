"""Qwen 3 (dense and MoE), Qwen 2 and 2.5: rotate-half RoPE, SwiGLU or experts."""
# ruff: noqa: F401 (names of torchtitan 0.2.x)

from dataclasses import dataclass
from functools import partial
from typing import Any

from torchtitan.models import hf_fields as hf
from torchtitan.models.decoder import Attention, Decoder, FeedForward, TransformerBlock
from torchtitan.models.family import add_old_paths, build_decoder_train_spec
from torchtitan.models.hf_adapter import HFAdapter
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

    def hidden_dim(self, layer_id: int) -> int:
        args = self.model_args
        return args.moe_inter_dim if args.moe_enabled else args.hidden_dim


class Qwen3StateDictAdapter(HFAdapter):
    """Renames to Hugging Face's Qwen3ForCausalLM and Qwen2ForCausalLM."""


def _qwen3(dim: int, n_layers: int, n_heads: int, hidden_dim: int, **fields: Any) -> Qwen3ModelArgs:
    return Qwen3ModelArgs(
        dim=dim, n_layers=n_layers, n_heads=n_heads, hidden_dim=hidden_dim, **fields
    )


def _experts(num_experts: int, moe_inter_dim: int, top_k: int = 8) -> dict[str, Any]:
    moe_args = MoEArgs(
        num_experts=num_experts,
        num_shared_experts=0,
        top_k=top_k,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
    )
    return {"moe_enabled": True, "moe_inter_dim": moe_inter_dim, "moe_args": moe_args}


def _qwen2(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, hidden_dim: int, **fields: Any
) -> Qwen3ModelArgs:
    fields |= {"head_dim": dim // n_heads, "max_seq_len": 32768, "qk_norm": False, "qkv_bias": True}
    return _qwen3(dim, n_layers, n_heads, hidden_dim, n_kv_heads=n_kv_heads, **fields)


_TIED = {"enable_weight_tying": True}
# Larger Qwen 2.5 models pad the vocabulary, so that it splits evenly over more ranks.
_PADDED = {"vocab_size": 152064}

qwen3_args: dict[str, Qwen3ModelArgs] = {
    "debugmodel": _qwen3(256, 8, 16, 3072, vocab_size=2048, **_TIED),
    "0.6B": _qwen3(1024, 28, 16, 3072, **_TIED),
    "1.7B": _qwen3(2048, 28, 16, 6144, **_TIED),
    "4B": _qwen3(2560, 36, 32, 9728, **_TIED),
    "8B": _qwen3(4096, 36, 32, 12288),
    "14B": _qwen3(5120, 40, 40, 17408),
    "32B": _qwen3(5120, 64, 64, 25600),
    "debugmodel_moe_small": _qwen3(256, 4, 8, 3072, vocab_size=2048, **_experts(8, 256, top_k=2)),
    "debugmodel_moe": _qwen3(256, 8, 16, 3072, vocab_size=2048, **_experts(64, 768)),
    "30B-A3B": _qwen3(2048, 48, 32, 6144, n_kv_heads=4, max_seq_len=262144, **_experts(128, 768)),
    "235B-A22B": _qwen3(
        4096, 94, 64, 12288, n_kv_heads=4, rope_theta=5_000_000, **_experts(128, 1536)
    ),
    "Qwen2-0.5B": _qwen2(896, 24, 14, 2, 4864, **_TIED),
    "Qwen2.5-3B": _qwen2(2048, 36, 16, 2, 11008, **_TIED),
    "Qwen2.5-7B": _qwen2(3584, 28, 28, 4, 18944, **_PADDED),
    "Qwen2.5-14B": _qwen2(5120, 48, 40, 8, 13824, norm_eps=1e-5, **_PADDED),
    "Qwen2.5-32B": _qwen2(5120, 64, 40, 8, 27648, norm_eps=1e-5, **_PADDED),
}


_NO_WINDOWS = "qwen models have no sliding windows here"
_ROWS = (
    hf.KV_HEADS,
    hf.Field("intermediate_size", "hidden_dim"),
    hf.SILU,
    hf.Must("use_sliding_window", False, _NO_WINDOWS),
    hf.Must("layer_types", lambda args: ["full_attention"] * args.n_layers, _NO_WINDOWS),
    hf.RoPE(),
)
_HEAD_DIM_OF_QWEN2 = hf.Field(
    "head_dim", "head_dim", default=lambda c: c["hidden_size"] // c["num_attention_heads"]
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
_QWEN3_ARGS = {"qk_norm": True, "qkv_bias": False}
hf_types = {
    "qwen2": hf.HFType("Qwen2", (*_ROWS, _HEAD_DIM_OF_QWEN2), _QWEN2_ARGS),
    "qwen3": hf.HFType("Qwen3", _QWEN3_ROWS, _QWEN3_ARGS | {"moe_enabled": False}),
    "qwen3_moe": hf.HFType(
        "Qwen3Moe",
        _QWEN3_ROWS + _EXPERT_ROWS,
        _QWEN3_ARGS | {"moe_enabled": True} | hf.SOFTMAX_ROUTER | hf.NO_SHARED_EXPERTS,
    ),
}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(Qwen3Model, qwen3_args, Qwen3StateDictAdapter)


add_old_paths(__name__)
