"""Qwen 3, dense and mixtures of experts, Qwen 2 and 2.5: flavors, and the train spec."""
# ruff: noqa: F401 (names of the reference)

from typing import Any

from torchtitan.models.moe import MoEArgs
from torchtitan.models.parallelize import parallelize_decoder as parallelize_qwen3
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import Qwen3Model
from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.models.train_spec import build_decoder_train_spec
from torchtitan.protocols.train_spec import TrainSpec


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
    return _qwen3(
        dim,
        n_layers,
        n_heads,
        hidden_dim,
        n_kv_heads=n_kv_heads,
        head_dim=dim // n_heads,
        max_seq_len=32768,
        qk_norm=False,
        qkv_bias=True,
        **fields,
    )


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


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(Qwen3Model, qwen3_args, Qwen3StateDictAdapter)
