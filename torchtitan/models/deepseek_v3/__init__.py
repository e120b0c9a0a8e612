"""DeepSeek-V2 and V3: flavors, and the train spec."""
# ruff: noqa: F401 (names of the reference)

from typing import Any

from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model
from torchtitan.models.deepseek_v3.model.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.moe import MoEArgs
from torchtitan.models.parallelize import parallelize_decoder as parallelize_deepseekv3
from torchtitan.models.train_spec import build_decoder_train_spec
from torchtitan.protocols.train_spec import TrainSpec


def _debug_model(**fields: Any) -> DeepSeekV3ModelArgs:
    return DeepSeekV3ModelArgs(
        vocab_size=2048,
        dim=256,
        inter_dim=1024,
        moe_inter_dim=256,
        n_layers=6,
        mscale=0.70,
        moe_args=_v2_experts(8, top_k=3),
        **fields,
    )


def _v2_experts(num_experts: int, **fields: Any) -> MoEArgs:
    return MoEArgs(
        num_experts=num_experts,
        num_shared_experts=2,
        score_func="softmax",
        score_before_experts=False,
        **fields,
    )


_PACKED = {"attn_type": "flex", "attn_mask_type": "block_causal"}

deepseekv3_args: dict[str, DeepSeekV3ModelArgs] = {
    "debugmodel": _debug_model(),
    "debugmodel_flex_attn": _debug_model(**_PACKED),
    "16B": DeepSeekV3ModelArgs(mscale=0.70, moe_args=_v2_experts(64, top_k=6), **_PACKED),
    "236B": DeepSeekV3ModelArgs(
        dim=5120,
        inter_dim=12288,
        moe_inter_dim=1536,
        n_layers=60,
        n_heads=128,
        q_lora_rank=1536,
        moe_args=_v2_experts(
            160,
            top_k=6,
            num_expert_groups=8,
            num_limited_groups=3,
            group_score="max",
            route_scale=16.0,
        ),
        **_PACKED,
    ),
    "671B": DeepSeekV3ModelArgs(
        vocab_size=129280,
        dim=7168,
        inter_dim=18432,
        moe_inter_dim=2048,
        n_layers=61,
        n_dense_layers=3,
        n_heads=128,
        q_lora_rank=1536,
        moe_args=MoEArgs(
            num_experts=256,
            top_k=8,
            num_expert_groups=8,
            num_limited_groups=4,
            route_norm=True,
            route_scale=2.5,
            score_before_experts=False,
        ),
        **_PACKED,
    ),
}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(DeepSeekV3Model, deepseekv3_args, DeepSeekV3StateDictAdapter)
