"""Llama 4, text: flavors, and the train spec."""
# ruff: noqa: F401 (names of the reference)

from typing import Any

from torchtitan.models.llama4.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.models.llama4.model.model import Transformer
from torchtitan.models.llama4.model.state_dict_adapter import Llama4StateDictAdapter
from torchtitan.models.moe import MoEArgs
from torchtitan.models.parallelize import parallelize_decoder as parallelize_llama
from torchtitan.models.train_spec import build_decoder_train_spec
from torchtitan.protocols.train_spec import TrainSpec

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


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(Transformer, llama4_args, Llama4StateDictAdapter)
