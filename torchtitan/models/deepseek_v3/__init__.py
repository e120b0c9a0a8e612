"""DeepSeek-V2 and V3: multi-head latent attention; a few dense layers, then layers of experts.

B rows, T tokens, M model dim, H heads, V value head size. A query or key head has N dimensions without
RoPE and R dimensions with RoPE.
"""
# ruff: noqa: F401 (names of torchtitan 0.2.x)

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchtitan.batch.mask import Masks
from torchtitan.models import hf_fields as hf
from torchtitan.models import rope
from torchtitan.models.attention import attend, build_inner_attention
from torchtitan.models.decoder import PROJECTION_STD, Decoder, FeedForward, init_linear
from torchtitan.models.family import add_old_paths, build_decoder_train_spec
from torchtitan.models.hf_adapter import CORRECTION_BIAS, HFAdapter, block_hf_key_map
from torchtitan.models.moe import MoEArgs, MoEDecoderArgs, build_moe
from torchtitan.models.parallelize import parallelize_decoder as parallelize_deepseekv3
from torchtitan.models.rope import RoPEArgs, YaRNArgs, apply_rotary_emb, yarn_mscale
from torchtitan.numerics.linear import Linear
from torchtitan.numerics.norm import RMSNorm
from torchtitan.protocols.state_dict_adapter import to_template
from torchtitan.protocols.train_spec import TrainSpec

# DeepSeek's own code uses this eps for the two latents' norms, independent of `rms_norm_eps`.
LATENT_NORM_EPS = 1e-6


@dataclass
class DeepSeekV3ModelArgs(MoEDecoderArgs):
    """DeepSeek-V2 and V3.

    max_batch_size: not read, accepted for compatibility.
    inter_dim, moe_inter_dim: hidden size of the dense feed-forward and of one expert.
    n_dense_layers: number of first layers, which have no experts.
    q_lora_rank, kv_lora_rank: size of the latent of queries (0: no latent), and of the latent that keys
        and values share.
    qk_nope_head_dim, qk_rope_head_dim: parts of a query and key head without and with RoPE.
    rope_theta: the base of RoPE's frequencies. rope_factor: the factor of `YaRNArgs`.
    original_seq_len, beta_fast, beta_slow: as in `YaRNArgs`.
    mscale: `yarn_mscale`'s argument for the softmax scale, Hugging Face's `mscale_all_dim`.
    rope_mscale: Hugging Face's `mscale`, for the magnitude of RoPE; None: equal to mscale.
    attention_bias: wq_a, wkv_a and wo have biases. hf_type: model_type in Hugging Face's config.json.
    """

    max_batch_size: int = 8
    max_seq_len: int = 4096 * 4
    vocab_size: int = 102400
    dim: int = 2048
    inter_dim: int = 10944
    moe_inter_dim: int = 1408
    n_layers: int = 27
    n_dense_layers: int = 1
    n_heads: int = 16
    norm_eps: float = 1e-6
    expert_parallel_comm_backend: Literal["standard", "deepep"] = "standard"
    q_lora_rank: int = 0
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    original_seq_len: int = 4096
    rope_theta: float = 10000.0
    rope_factor: float = 40
    beta_fast: int = 32
    beta_slow: int = 1
    mscale: float = 1.0
    rope_mscale: float | None = None
    attention_bias: bool = False
    hf_type: str = "deepseek_v3"

    @property
    def head_dims(self) -> int:
        """The query head size plus the value head size."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim


def precompute_freqs_cis(args: DeepSeekV3ModelArgs) -> Tensor:
    """Return the RoPE table complex64 [args.max_seq_len, R / 2], stretched by YaRN."""
    size, length, rope_args = args.qk_rope_head_dim, args.max_seq_len, _rope(args)
    table = rope.precompute_freqs_cis(size, length, args.rope_theta, rope_args.scaling)
    return table if rope_args.magnitude == 1 else table * rope_args.magnitude


def _rope(args: DeepSeekV3ModelArgs) -> RoPEArgs:
    factor, mscale, rope_mscale = args.rope_factor, args.mscale, args.rope_mscale
    yarn = YaRNArgs(factor, args.original_seq_len, args.beta_fast, args.beta_slow)
    magnitude = 1.0
    if rope_mscale is not None:
        magnitude = yarn_mscale(factor, rope_mscale) / yarn_mscale(factor, mscale)
        magnitude = magnitude if rope_mscale and mscale else yarn_mscale(factor)
    return RoPEArgs(scaling=yarn, magnitude=magnitude)


class Attention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    The keys and values of all heads are projected from one latent per token. RoPE rotates R extra
    dimensions of each query head, and one key of R dimensions that all heads share.
    """

    def __init__(self, model_args: DeepSeekV3ModelArgs):
        super().__init__()
        args = model_args
        self.n_heads = args.n_heads
        self.q_lora_rank = args.q_lora_rank
        self.kv_lora_rank = args.kv_lora_rank
        self.qk_nope_head_dim = args.qk_nope_head_dim
        self.qk_rope_head_dim = args.qk_rope_head_dim
        self.qk_head_dim = args.qk_nope_head_dim + args.qk_rope_head_dim
        self.v_head_dim = args.v_head_dim
        mscale = yarn_mscale(args.rope_factor, args.mscale)
        self.softmax_scale = mscale**2 * self.qk_head_dim**-0.5

        q_width = args.n_heads * self.qk_head_dim
        if args.q_lora_rank == 0:
            self.wq = Linear(args.dim, q_width, bias=False)
        else:
            self.wq_a = Linear(args.dim, args.q_lora_rank, bias=args.attention_bias)
            self.q_norm = RMSNorm(args.q_lora_rank, eps=LATENT_NORM_EPS)
            self.wq_b = Linear(args.q_lora_rank, q_width, bias=False)
        kv_width = args.kv_lora_rank + args.qk_rope_head_dim
        self.wkv_a = Linear(args.dim, kv_width, bias=args.attention_bias)
        self.kv_norm = RMSNorm(args.kv_lora_rank, eps=LATENT_NORM_EPS)
        kv_width = args.n_heads * (args.qk_nope_head_dim + args.v_head_dim)
        self.wkv_b = Linear(args.kv_lora_rank, kv_width, bias=False)
        self.wo = Linear(args.n_heads * args.v_head_dim, args.dim, bias=args.attention_bias)
        self.inner_attention = build_inner_attention(args.attn_type)

    def forward(self, x: Tensor, rope: Tensor, attention_masks: Masks | None = None) -> Tensor:
        """x: [B, T, M]; rope: the table's rows [1 or B, T, R / 2]. Returns [B, T, M]."""
        q = self.wq(x) if self.q_lora_rank == 0 else self.wq_b(self.q_norm(self.wq_a(x)))
        # -1: under tensor parallelism a rank holds only some of the heads.
        q = q.unflatten(-1, (-1, self.qk_head_dim))
        q_nope, q_rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.wkv_a(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv = self.wkv_b(self.kv_norm(latent))
        kv = kv.unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
        k_nope, v = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)

        q_rope, k_rope = apply_rotary_emb(q_rope, k_rope.unsqueeze(2), rope)
        q = torch.cat((q_nope, q_rope), dim=-1)  # [B, T, H, N + R]
        k = torch.cat((k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)), dim=-1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = attend(self.inner_attention, q, k, v, attention_masks, self.softmax_scale)
        return self.wo(out.flatten(-2))

    def init_weights(self, init_std: float) -> None:
        for name, module in self.named_children():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                init_linear(module, init_std if name == "wo" else PROJECTION_STD)


class DeepSeekV3Model(Decoder):
    """DeepSeek-V2 or V3: a few dense layers, then layers of experts."""

    model_args: DeepSeekV3ModelArgs

    def build_attention(self, layer_id: int) -> Attention:
        return Attention(self.model_args)

    def is_moe_layer(self, layer_id: int) -> bool:
        return layer_id >= self.model_args.n_dense_layers

    def hidden_dim(self, layer_id: int) -> int:
        args = self.model_args
        return args.moe_inter_dim if self.is_moe_layer(layer_id) else args.inter_dim

    def build_rope_table(self, length: int) -> Tensor:
        return precompute_freqs_cis(replace(self.model_args, max_seq_len=length))


class DeepSeekV3StateDictAdapter(HFAdapter):
    """Renames keys only: RoPE pairs are neighbours in our weights and in Hugging Face's."""

    quantized_format = "fp8"
    own_names = {
        **block_hf_key_map(
            {
                "self_attn.q_a_proj": "attention.wq_a",
                "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
                "self_attn.o_proj": "attention.wo",
            },
            "weight",
            "bias",
        ),
        **block_hf_key_map(
            {
                "self_attn.q_a_layernorm": "attention.q_norm",
                "self_attn.q_b_proj": "attention.wq_b",
                "self_attn.kv_a_layernorm": "attention.kv_norm",
                "self_attn.kv_b_proj": "attention.wkv_b",
            }
        ),
        **CORRECTION_BIAS,  # V2's files lack this bias
    }


def _flavor(
    dim: int, inter_dim: int, moe_inter_dim: int, n_layers: int, n_heads: int, **fields: Any
) -> DeepSeekV3ModelArgs:
    sizes = {"dim": dim, "inter_dim": inter_dim, "moe_inter_dim": moe_inter_dim}
    return DeepSeekV3ModelArgs(**sizes, n_layers=n_layers, n_heads=n_heads, **fields)


def _v2_experts(num_experts: int, top_k: int, **fields: Any) -> dict[str, Any]:
    experts = {"num_experts": num_experts, "num_shared_experts": 2, "top_k": top_k}
    experts |= {"score_func": "softmax", "score_before_experts": False}
    return {"moe_args": MoEArgs(**experts, **fields)}


_PACKED = {"attn_type": "flex", "attn_mask_type": "block_causal"}
_DEBUG = {"vocab_size": 2048, "mscale": 0.70, **_v2_experts(8, 3)}
_V2_GROUPS = {"num_expert_groups": 8, "num_limited_groups": 3, "group_score": "max"}
_V3_EXPERTS = MoEArgs(
    num_experts=256,
    top_k=8,
    num_expert_groups=8,
    num_limited_groups=4,
    route_norm=True,
    route_scale=2.5,
    score_before_experts=False,
)
_16B = {"mscale": 0.70, **_v2_experts(64, 6)}
_236B = {"q_lora_rank": 1536, **_v2_experts(160, 6, route_scale=16.0, **_V2_GROUPS)}
_671B = {"q_lora_rank": 1536, "vocab_size": 129280, "n_dense_layers": 3, "moe_args": _V3_EXPERTS}
deepseekv3_args: dict[str, DeepSeekV3ModelArgs] = {
    "debugmodel": _flavor(256, 1024, 256, 6, 16, **_DEBUG),
    "debugmodel_flex_attn": _flavor(256, 1024, 256, 6, 16, **_DEBUG, **_PACKED),
    "16B": _flavor(2048, 10944, 1408, 27, 16, **_16B, **_PACKED),
    "236B": _flavor(5120, 12288, 1536, 60, 128, **_236B, **_PACKED),
    "671B": _flavor(7168, 18432, 2048, 61, 128, **_671B, **_PACKED),
}


_SAME_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_ROWS = (
    hf.Field("n_routed_experts", "moe_args.num_experts"),
    hf.TOP_K,
    hf.Field("intermediate_size", "inter_dim"),
    hf.Field("moe_intermediate_size", "moe_inter_dim"),
    hf.Field(
        "q_lora_rank", "q_lora_rank", hf.COUNT, 0, to_hf=lambda args: args.q_lora_rank or None
    ),
    *(hf.Field(name, name) for name in _SAME_SIZES),
    hf.Field("n_shared_experts", "moe_args.num_shared_experts", hf.COUNT),
    hf.Field("routed_scaling_factor", "moe_args.route_scale", float),
    *hf.ROUTER_GROUPS,
    hf.SILU,
    hf.Must("num_key_value_heads", lambda args: args.n_heads),
    # transformers reads head_dim as qk_rope_head_dim; published config.json files lack head_dim.
    hf.Must("head_dim", lambda args: args.qk_rope_head_dim, is_written=False),
    hf.Must("mlp_bias", False, "its feed-forwards have no biases", is_written=False),
    hf.Field("attention_bias", "attention_bias", bool, False),
    hf.Must("rope_interleave", True, "pairs that turn together must be neighbours"),
    hf.Must("moe_layer_freq", 1, "every layer above the dense ones has experts"),
    hf.RoPE(
        # If mscale and mscale_all_dim differ, HF also scales cosines and sines: see rope_mscale.
        _rope,
        kind="yarn",
        ours={name: name for name in ("original_seq_len", "beta_fast", "beta_slow")}
        | {"factor": "rope_factor"},
        unscaled={"rope_factor": 1.0},
        rows=(
            hf.Field("mscale_all_dim", "mscale", float, 0),
            hf.Field(
                "mscale",
                "rope_mscale",
                float,
                0,
                from_hf=lambda x, table: None if x and x == table.get("mscale_all_dim") else x,
                to_hf=lambda args: args.mscale if args.rope_mscale is None else args.rope_mscale,
            ),
        ),
    ),
)


def _router(norm_topk_prob: bool, scoring_func: str, method: Any) -> tuple[hf.Row, ...]:
    """Return the rows of the router's fields. method: the only topk_method accepted.

    norm_topk_prob, scoring_func: the defaults of these fields.
    """
    return (
        hf.Field("norm_topk_prob", "moe_args.route_norm", bool, norm_topk_prob),
        hf.Field("scoring_func", "moe_args.score_func", str, scoring_func),
        hf.Must("topk_method", method),
    )


def _v2_method(args: DeepSeekV3ModelArgs) -> str:
    return "greedy" if args.moe_args.num_expert_groups is None else "group_limited_greedy"


def _types(n_dense: int, n_layers: int) -> list[str]:
    return ["dense"] * n_dense + ["sparse"] * (n_layers - n_dense)


def _first_dense(types: Any, config: hf.Config) -> int:
    n_layers = config["num_hidden_layers"]
    if list(types) != _types(n_dense := list(types).count("dense"), n_layers):
        reason = f"it must be the types of {n_layers} layers, the dense ones first"
        raise hf.refusal(config, "mlp_layer_types", reason)
    return n_dense


_FIRST_DENSE = hf.Field("first_k_dense_replace", "n_dense_layers", hf.COUNT)
_LAYER_TYPES = hf.Field(
    "mlp_layer_types",
    "n_dense_layers",
    None,
    1,
    from_hf=_first_dense,
    to_hf=lambda args: _types(args.n_dense_layers, args.n_layers),
    also=("first_k_dense_replace",),
)
_V2_ROUTER, _V3_ROUTER = (
    _router(False, "softmax", _v2_method),
    _router(True, "sigmoid", "noaux_tc"),
)
_V2_ARGS = hf.SOFTMAX_ROUTER | {"moe_args.group_score": "max"}
_V3_ARGS = hf.SIGMOID_ROUTER | {"moe_args.group_score": "top2_sum"}
_KIMI = {"inside": ("kimi_k25",), "aliases": ("kimi_k2",)}
hf_types = {
    "deepseek_v2": hf.HFType("DeepseekV2", (*_ROWS, _FIRST_DENSE, *_V2_ROUTER), _V2_ARGS),
    "deepseek_v3": hf.HFType("DeepseekV3", (*_ROWS, _FIRST_DENSE, *_V3_ROUTER), _V3_ARGS, **_KIMI),
    "glm4_moe_lite": hf.HFType("Glm4MoeLite", (*_ROWS, _LAYER_TYPES, *_V3_ROUTER), _V3_ARGS),
}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(DeepSeekV3Model, deepseekv3_args, DeepSeekV3StateDictAdapter)


add_old_paths(__name__)
