"""gpt-oss: attention sinks, windows in even layers, rotate-half RoPE with YaRN, MoE in all layers.

Letters as in `models.decoder` and, for experts, in `models.moe.moe`. Initialisation differs from the
decoder's table: all weights of a block, and the biases and sinks of attention and experts, have the std
of attention.wo. The router's bias starts at 0.
"""
# ruff: noqa: F401 (names of torchtitan 0.2.x)

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from torchtitan.batch.mask import DocumentMask, Masks
from torchtitan.distributed.dtensor import local_parameter
from torchtitan.distributed.seeded_init import trunc_normal_
from torchtitan.models import decoder
from torchtitan.models import hf_fields as hf
from torchtitan.models.attention import attend
from torchtitan.models.decoder import Decoder, TransformerBlock
from torchtitan.models.family import add_old_paths, build_decoder_train_spec
from torchtitan.models.hf_adapter import Fused, HFAdapter, HFKeyMap, block_hf_key_map
from torchtitan.models.moe import MoE, MoEArgs, MoEDecoderArgs
from torchtitan.models.moe.moe import StackedExperts
from torchtitan.models.parallelize import parallelize_decoder as parallelize_gptoss
from torchtitan.models.rope import RoPEArgs, YaRNArgs, yarn_mscale
from torchtitan.models.rope import apply_rotary_emb_to_halves as apply_rotary_emb
from torchtitan.protocols.train_spec import TrainSpec


@dataclass
class GptOssModelArgs(MoEDecoderArgs):
    """gpt-oss (arXiv:2508.10925).

    max_batch_size, dtype: not read, accepted for compatibility.
    moe_inter_dim: hidden size of one expert. swiglu_limit: the bound in `swiglu`.
    sliding_window_size: number of tokens that a token of an even layer sees, itself included.
    rope_theta: the base of RoPE's frequencies. rope_factor, original_seq_len, ntk_beta, ntk_alpha: factor,
        original_seq_len, beta_fast and beta_slow of `YaRNArgs`.
    """

    max_batch_size: int = 8
    max_seq_len: int = 131072
    dtype: Literal["bf16", "fp8"] = "bf16"
    vocab_size: int = 201088
    dim: int = 2880
    moe_inter_dim: int = 2880
    n_layers: int = 24
    norm_eps: float = 1e-5
    swiglu_limit: float = 7.0
    head_dim: int = 64
    n_heads: int = 64
    n_kv_heads: int = 8
    sliding_window_size: int = 128
    attn_mask_type: str = "causal"
    attn_type: str = "flex"
    original_seq_len: int = 4096
    rope_theta: float = 150000.0
    rope_factor: float = 32
    ntk_alpha: float = 1.0
    ntk_beta: float = 32.0


def swiglu(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """gate * sigmoid(alpha * gate) * (linear + 1); x: [..., 2 H] -> [..., H].

    The gate (even columns) is clamped to at most limit, the linear part (odd columns) to [-limit, limit].
    """
    gate = x[..., ::2].clamp(max=limit)
    linear = x[..., 1::2].clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + 1)


def feed_forward(
    linear: Callable[..., Tensor],
    x: Tensor,
    mlp1: Tensor,
    mlp2: Tensor,
    bias1: Tensor,
    bias2: Tensor,
    limit: float,
) -> Tensor:
    """The two layers of all experts, with `swiglu` between them; see `run_for_loop`."""
    return linear(swiglu(linear(x, mlp1, bias1), limit=limit), mlp2, bias2)


class GptOssGroupedExperts(StackedExperts):
    """Experts with weights mlp1 [E, 2 H, D], rows alternating gate and linear part, and mlp2 [E, D, H]."""

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        swiglu_limit: float,
        use_grouped_mm: bool,
    ):
        super().__init__(num_experts, use_grouped_mm, partial(feed_forward, limit=swiglu_limit))
        self.mlp1_weight = nn.Parameter(torch.empty(num_experts, 2 * hidden_dim, dim))
        self.mlp1_bias = nn.Parameter(torch.empty(num_experts, 2 * hidden_dim))
        self.mlp2_weight = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.mlp2_bias = nn.Parameter(torch.empty(num_experts, dim))

    def local_parameters(self) -> tuple[Tensor, ...]:
        return (
            local_parameter(self.mlp1_weight),
            local_parameter(self.mlp2_weight),
            local_parameter(self.mlp1_bias),
            # If ranks split the hidden units, their outputs are summed, so only one rank adds the bias.
            local_parameter(self.mlp2_bias, added_once=True),
        )

    def init_weights(self, init_std: float) -> None:
        for parameter in self.parameters():
            trunc_normal_(parameter, mean=0.0, std=init_std)


class GptOssMoE(MoE):
    """The mixture of experts of `models.moe.moe` with gpt-oss' experts."""

    def __init__(self, model_args: GptOssModelArgs, dim: int, hidden_dim: int):
        args = model_args.moe_args
        experts = GptOssGroupedExperts(
            dim, hidden_dim, args.num_experts, model_args.swiglu_limit, args.use_grouped_mm
        )
        super().__init__(args, dim, hidden_dim, experts)


def precompute_rope_cache(
    dim: int,
    max_seq_len: int,
    base: float = 1_000_000.0,
    rope_factor: float = 1.0,
    ntk_alpha: float = 1.0,
    ntk_beta: float = 32.0,
    original_seq_len: int = 4096,
) -> Tensor:
    """Return the table fp32 [max_seq_len, 2 * dim] of `models.rope` for heads of size `dim`."""
    return _yarn(rope_factor, original_seq_len, ntk_beta, ntk_alpha).table(
        dim, max_seq_len, base, max_seq_len
    )


def _yarn(*sizes: Any) -> RoPEArgs:
    """Return YaRN with truncate = False. sizes: the first fields of `YaRNArgs`."""
    return RoPEArgs(scaling=YaRNArgs(*sizes, truncate=False), magnitude=yarn_mscale(sizes[0]))


def _rope(args: GptOssModelArgs) -> RoPEArgs:
    return _yarn(args.rope_factor, args.original_seq_len, args.ntk_beta, args.ntk_alpha)


class Attention(decoder.Attention):
    """Attention with a sink in each head: one more key with a learnt score and value zero.

    use_sliding_attention: a query sees only the sliding window.
    """

    reads_local_parameters: ClassVar[bool] = True
    needs_log_sum_exp: ClassVar[bool] = True

    def __init__(self, model_args: GptOssModelArgs, use_sliding_attention: bool):
        super().__init__(
            model_args.dim,
            model_args.n_heads,
            model_args.n_kv_heads,
            model_args.head_dim,
            attn_type=model_args.attn_type,
            qkv_bias=True,
            output_bias=True,
            apply_rope=apply_rotary_emb,
            mask_name="sliding_window_mask" if use_sliding_attention else "basic_mask",
            window=model_args.sliding_window_size if use_sliding_attention else None,
        )
        self.sinks = nn.Parameter(torch.empty(model_args.n_heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: DocumentMask) -> Tensor:
        """See `decoder.Attention.attend`."""
        out, lse = attend(self.inner_attention, q, k, v, mask, window=self.window, return_lse=True)
        # The keys' share of the softmax with the sink: exp(lse) / (exp(lse) + exp(sink)).
        share = torch.sigmoid(lse - local_parameter(self.sinks).float())
        return (out * share.unsqueeze(-1)).to(out.dtype)

    def init_weights(self, init_std: float) -> None:
        for parameter in self.parameters():
            trunc_normal_(parameter, mean=0.0, std=init_std)


class GptOssModel(Decoder):
    """gpt-oss: sinks, windows in even layers, rotate-half RoPE with YaRN, experts in every layer."""

    model_args: GptOssModelArgs
    rope_buffer_name = "rope_cache"

    def __init__(self, model_args: GptOssModelArgs):
        if model_args.attn_type == "sdpa":
            raise ValueError(
                "attn_type 'sdpa' has no sliding windows and no attention sinks, which gpt-oss "
                "needs; set model.attn_type to 'flex' or 'varlen'"
            )
        super().__init__(model_args)

    def build_attention(self, layer_id: int) -> Attention:
        return Attention(self.model_args, use_sliding_attention=layer_id % 2 == 0)

    def is_moe_layer(self, layer_id: int) -> bool:
        return True

    def build_feed_forward(self, layer_id: int) -> GptOssMoE:
        return GptOssMoE(self.model_args, self.model_args.dim, self.model_args.moe_inter_dim)

    def build_rope_table(self, length: int) -> Tensor:
        args = self.model_args
        return _rope(args).table(args.head_dim, length, args.rope_theta, args.max_seq_len)

    def layer_masks(self, documents: DocumentMask) -> Masks:
        window = documents.with_window(self.model_args.sliding_window_size)
        return {"basic_mask": documents, "sliding_window_mask": window}


def _expert_names(hf_name: str, name: str) -> HFKeyMap:
    hf, ours = f"model.layers.{{}}.mlp.experts.{hf_name}", f"layers.{{}}.moe.experts.{name}"
    return {
        hf: Fused((f"{ours}_weight",), transposed=True),
        f"{hf}_blocks": f"{ours}_weight",
        f"{hf}_scales": None,  # `MXFP4Reader` has already multiplied the blocks by their scales
        f"{hf}_bias": f"{ours}_bias",
    }


class GptOssStateDictAdapter(HFAdapter):
    """Writes unquantized files, which transformers loads; reads unquantized and MXFP4 files.

    Experts' weights are [E, in, out] in unquantized files, and [E, out, in], as in our model, when
    dequantized from MXFP4.
    """

    quantized_format = "mxfp4"
    own_names = {
        **block_hf_key_map({f"self_attn.{n}_proj": f"attention.w{n}" for n in "qkvo"}, "bias"),
        **block_hf_key_map({"mlp.router": "moe.router.gate"}, "weight", "bias"),
        "model.layers.{}.self_attn.sinks": "layers.{}.attention.sinks",
        **_expert_names("gate_up_proj", "mlp1"),
        **_expert_names("down_proj", "mlp2"),
    }


def _experts(num_experts: int) -> MoEArgs:
    router = {"score_func": "softmax", "route_norm": True, "gate_bias": True, "top_k": 4}
    return MoEArgs(num_experts, num_shared_experts=0, score_before_experts=False, **router)


# Sizes of a flavor for CPUs: a vocabulary of 2,048, and experts as wide as the model.
_SMALL = {"vocab_size": 2048, "moe_inter_dim": 256, "n_heads": 8, "n_kv_heads": 2}
_SMALL |= {"sliding_window_size": 32}
gptoss_configs: dict[str, GptOssModelArgs] = {
    "debugmodel": GptOssModelArgs(dim=256, n_layers=4, moe_args=_experts(8)),
    "debugmodel_small": GptOssModelArgs(dim=256, n_layers=4, moe_args=_experts(8), **_SMALL),
    "20b": GptOssModelArgs(moe_args=_experts(32)),
    "120b": GptOssModelArgs(n_layers=36, moe_args=_experts(128)),
}


_LAYERS = ("sliding_attention", "full_attention")
_ROWS = (
    hf.KV_HEADS,
    hf.Field("num_local_experts", "moe_args.num_experts"),
    hf.TOP_K,
    hf.Field("head_dim", "head_dim"),
    hf.Field("intermediate_size", "moe_inter_dim"),
    hf.Field("sliding_window", "sliding_window_size", hf.COUNT),
    hf.Field("swiglu_limit", "swiglu_limit", float, 7.0),
    hf.SILU,
    hf.Must("attention_bias", True, "its projections have biases"),
    hf.Must("swiglu_alpha", 1.702, "the activation's slope is fixed"),
    hf.Must("layer_types", hf.each_layer(lambda args, n: _LAYERS[n % 2])),
    hf.RoPE(
        _rope,
        kind="yarn",
        ours={
            "factor": "rope_factor",
            "original_seq_len": "original_seq_len",
            "beta_fast": "ntk_beta",
            "beta_slow": "ntk_alpha",
        },
        unscaled={"rope_factor": 1.0},
        theta=150000.0,
    ),
)
_ROUTER = hf.SOFTMAX_ROUTER | {"moe_args.route_norm": True, "moe_args.gate_bias": True}
hf_types = {"gpt_oss": hf.HFType("GptOss", _ROWS, _ROUTER | hf.NO_SHARED_EXPERTS)}


def get_train_spec() -> TrainSpec:
    return build_decoder_train_spec(GptOssModel, gptoss_configs, GptOssStateDictAdapter)


add_old_paths(__name__)
