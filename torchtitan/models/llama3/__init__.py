"""Llama 3, 3.1 and 3.2: flavors, and the train spec that puts them together with the components."""

from typing import TYPE_CHECKING

from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.models.train_spec import DecoderFamily

if TYPE_CHECKING:
    from torchtitan.models.llama3.model.model import Transformer
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
    from torchtitan.models.parallelize import parallelize_decoder as parallelize_llama

__all__ = [
    "Llama3StateDictAdapter",
    "Transformer",
    "TransformerModelArgs",
    "get_train_spec",
    "llama3_args",
    "parallelize_llama",
]

_FLEX = {"attn_type": "flex", "attn_mask_type": "block_causal"}
_VARLEN = {"attn_type": "varlen", "attn_mask_type": "block_causal"}
_DEBUG = {"dim": 256, "n_layers": 6, "n_heads": 16, "vocab_size": 2048}
_1B = {  # Llama 3.2
    "dim": 2048,
    "n_layers": 16,
    "n_heads": 32,
    "n_kv_heads": 8,
    "ffn_dim_multiplier": 1.5,
    "multiple_of": 256,
    "rope_scaling_args": RoPEScalingArgs(scaling_factor=32.0),
    "enable_weight_tying": True,
}
_8B = {
    "dim": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 8,
    "ffn_dim_multiplier": 1.3,
    "multiple_of": 1024,
}
_70B = {
    "dim": 8192,
    "n_layers": 80,
    "n_heads": 64,
    "n_kv_heads": 8,
    "ffn_dim_multiplier": 1.3,
    "multiple_of": 4096,
}
_405B = {
    "dim": 16384,
    "n_layers": 126,
    "n_heads": 128,
    "n_kv_heads": 8,
    "ffn_dim_multiplier": 1.2,
    "multiple_of": 4096,
}

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
        "70B": _70B,
        "405B": _405B,
    }.items()
}

_family = DecoderFamily(
    __name__,
    llama3_args,
    model="Transformer",
    adapter="Llama3StateDictAdapter",
    parallelize="parallelize_llama",
    balance_experts=False,
)
get_train_spec = _family.get_train_spec
__getattr__ = _family.load_name
