"""gpt-oss: flavors, and the train spec."""
# ruff: noqa: F401 (names of the reference)

from torchtitan.models.gpt_oss.model.args import GptOssModelArgs
from torchtitan.models.gpt_oss.model.model import GptOssModel
from torchtitan.models.gpt_oss.model.state_dict_adapter import GptOssStateDictAdapter
from torchtitan.models.moe import MoEArgs
from torchtitan.models.parallelize import parallelize_decoder as parallelize_gptoss
from torchtitan.models.train_spec import build_decoder_train_spec
from torchtitan.protocols.train_spec import TrainSpec


def _experts(num_experts: int) -> MoEArgs:
    return MoEArgs(
        num_experts=num_experts,
        num_shared_experts=0,
        score_func="softmax",
        route_norm=True,
        gate_bias=True,
        score_before_experts=False,
        top_k=4,
    )


gptoss_configs: dict[str, GptOssModelArgs] = {
    "debugmodel": GptOssModelArgs(dim=256, n_layers=4, moe_args=_experts(8)),
    # "debugmodel" for a CPU: a vocabulary of 2,048, and experts as wide as the model.
    "debugmodel_small": GptOssModelArgs(
        vocab_size=2048,
        dim=256,
        moe_inter_dim=256,
        n_layers=4,
        n_heads=8,
        n_kv_heads=2,
        sliding_window_size=32,
        moe_args=_experts(8),
    ),
    "20b": GptOssModelArgs(moe_args=_experts(32)),
    "120b": GptOssModelArgs(n_layers=36, moe_args=_experts(128)),
}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(GptOssModel, gptoss_configs, GptOssStateDictAdapter)
