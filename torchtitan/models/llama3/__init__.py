"""Llama 3, 3.1 and 3.2: flavors, and the train spec."""
# ruff: noqa: F401 (names of the reference)

from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.parallelize import parallelize_decoder as parallelize_llama
from torchtitan.models.train_spec import build_decoder_train_spec
from torchtitan.protocols.train_spec import TrainSpec


def _sizes(dim: int, n_layers: int, n_heads: int, multiplier: float, multiple_of: int) -> dict:
    return {
        "dim": dim,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": 8,
        "ffn_dim_multiplier": multiplier,
        "multiple_of": multiple_of,
    }


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


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(
        Transformer, llama3_args, Llama3StateDictAdapter, balance_experts=False
    )
