"""Tiny models of every family: configs as in config.json, and transformers' models with random weights.

The truth for packed rows is transformers' model on each document alone, because it does not reset
the state of linear attention between packed documents.

Sizes are odd on purpose: heads are not M / H wide, keys of linear attention are narrower than its
values, windows are shorter than the documents, YaRN's original length is below T, groups of experts
exclude some, a document has one token. No parameter keeps its initial value, which would hide mistakes
in norms, biases and routers.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_config import HFMatch, from_hf_config
from torchtitan.protocols.train_spec import get_train_spec

VOCAB = 97
SEQ_LEN = 38
# One token; others are longer than 4 tokens, which is the original length of a LongRoPE below.
DOCUMENT_LENGTHS = [[13, 1, 19, 5], [5, 26, 1, 6]]

BASE = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=48, max_position_embeddings=256, rms_norm_eps=1e-5,
    tie_word_embeddings=False, bos_token_id=None, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
TIED = {"tie_word_embeddings": True}
WIDE = {"head_dim": 16}


def rope(theta: float = 1000.0, rope_type: str = "default", **fields: Any) -> dict[str, Any]:
    """Return the entry of config.json. theta: small, so that slow pairs turn within a short row, too."""
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **fields}}


# As in Llama 3.1, squeezed so that a short row meets all three bands.
BANDS = rope(
    500000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
YARN_FIELDS = dict(factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=1.0)
EQUAL_MSCALES = {"mscale": 0.7, "mscale_all_dim": 0.7}
LONGROPE = dict(
    rope_type="longrope", short_factor=[1.0, 1.1, 1.2], long_factor=[2.0, 3.0, 4.0],
)  # fmt: skip

LLAMA = BASE | BANDS | dict(model_type="llama", head_dim=8)
QWEN = BASE | rope() | dict(rms_norm_eps=1e-6)
QWEN3_MOE = dict(
    model_type="qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
    norm_topk_prob=True,
)  # fmt: skip
DELTA = BASE | WIDE | rope(1e4, partial_rotary_factor=0.5) | dict(
    num_hidden_layers=4, rms_norm_eps=1e-6, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=8, linear_value_head_dim=12, linear_conv_kernel_dim=4,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
)  # fmt: skip
QWEN_EXPERTS = dict(
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
    shared_expert_intermediate_size=20,
)  # fmt: skip
QWEN35 = DELTA | rope(
    1e4, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True
)  # fmt: skip
# The seventh kind of layer that an interval gives: the full one comes last.
INTERVAL = dict(num_hidden_layers=3, layer_types=None, full_attention_interval=3)
GLM = BASE | WIDE | dict(
    num_hidden_layers=3, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
    n_shared_experts=2, first_k_dense_replace=1, n_group=4, topk_group=2, norm_topk_prob=True,
    routed_scaling_factor=1.7,
)  # fmt: skip
LATENT = {key: value for key, value in GLM.items() if key != "head_dim"} | dict(
    num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=12, v_head_dim=10,
)  # fmt: skip
V3 = LATENT | dict(model_type="deepseek_v3") | rope(1e4, "yarn", **YARN_FIELDS, **EQUAL_MSCALES)
# transformers ignores norm_topk_prob here; the published code does not.
V2 = V3 | dict(
    model_type="deepseek_v2", topk_method="group_limited_greedy", norm_topk_prob=False
)  # fmt: skip
DIRECT = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
# Layers 1 and 3 have experts; layer 2 has no RoPE and sees past the chunks of 8 tokens.
LLAMA4 = BASE | rope() | dict(
    model_type="llama4_text", num_hidden_layers=4, head_dim=8, intermediate_size=24,
    intermediate_size_mlp=64, num_local_experts=4, num_experts_per_tok=1,
    interleave_moe_layer_step=2, no_rope_layers=[1, 1, 0, 1], attention_chunk_size=8,
    use_qk_norm=True, attn_temperature_tuning=False, pad_token_id=None,
)  # fmt: skip
# Small enough that a short row has ten different temperatures.
TUNED = {"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.3}
# The limit is low enough that experts reach it.
GPT_OSS = BASE | WIDE | dict(
    model_type="gpt_oss", num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=4,
    sliding_window=8, swiglu_limit=0.8,
) | rope(
    1000.0, "yarn", factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=16,
)  # fmt: skip
GEMMA3 = BASE | WIDE | TIED | dict(
    model_type="gemma3_text", num_hidden_layers=4, sliding_window=7, query_pre_attn_scalar=24,
    hidden_activation="gelu_pytorch_tanh",
)  # fmt: skip
GEMMA3_PATTERN = GEMMA3 | dict(
    sliding_window_pattern=3, rope_theta=1e5, rope_local_base_freq=1e3,
    rope_scaling={"rope_type": "linear", "factor": 8.0}, final_logit_softcapping=5.0,
)  # fmt: skip
GEMMA3_LAYERS = GEMMA3 | dict(
    num_hidden_layers=3, layer_types=["full_attention", "sliding_attention", "full_attention"],
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
)  # fmt: skip
# As 31B, whose layers with full attention have other heads, and no weights for values.
GEMMA4 = BASE | TIED | dict(
    model_type="gemma4_text", num_hidden_layers=4, num_key_value_heads=4, head_dim=8,
    global_head_dim=16, num_global_key_value_heads=2, attention_k_eq_v=True,
    hidden_size_per_layer_input=0, sliding_window=7, final_logit_softcapping=5.0,
    hidden_activation="gelu_pytorch_tanh",
    layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5
        },
    },
)  # fmt: skip
# The last layer has full attention, whatever the pattern.
GEMMA4_DEFAULTS = {k: v for k, v in GEMMA4.items() if k not in ("layer_types", "rope_parameters")} | dict(
    num_hidden_layers=3, attention_k_eq_v=False, attention_bias=True, final_logit_softcapping=None,
    use_bidirectional_attention="vision",
)  # fmt: skip
OLMO3_ROPE = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 1e3, "attention_factor": 1.2, **YARN_FIELDS
        },
    }
}  # fmt: skip
MISTRAL_EXPERTS = dict(num_local_experts=8, num_experts_per_tok=3)

# name -> config.json
CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, tied": LLAMA | TIED,
    "llama, biased": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama, wide heads": LLAMA | TIED | WIDE,
    "qwen2": QWEN | {"model_type": "qwen2"},
    "qwen2, tied": QWEN | TIED | {"model_type": "qwen2"},
    "qwen3": QWEN | WIDE | {"model_type": "qwen3"},
    "qwen3, tied": QWEN | TIED | WIDE | {"model_type": "qwen3"},
    "qwen3_moe": QWEN | QWEN3_MOE | WIDE,
    "deepseek_v3": V3,
    "deepseek_v3, direct queries": V3 | DIRECT,
    "deepseek_v3, unequal mscales": V3 | DIRECT
    | rope(1e4, "yarn", **YARN_FIELDS, mscale=0.7, mscale_all_dim=0.5),
    "deepseek_v3, biased without YaRN": V3 | rope() | {"attention_bias": True},
    "deepseek_v2": V2,
    "llama4": LLAMA4,
    "llama4, tuned": LLAMA4 | TUNED,
    "llama4, two experts": LLAMA4 | TUNED | {"use_qk_norm": False, "num_experts_per_tok": 2},
    "gpt_oss": GPT_OSS,
    "qwen3_5": QWEN35 | dict(model_type="qwen3_5_text"),
    "qwen3_5, tied": QWEN35 | TIED | INTERVAL | dict(model_type="qwen3_5_text"),
    "qwen3_5_moe": QWEN35 | QWEN_EXPERTS | dict(model_type="qwen3_5_moe_text"),
    "qwen3_next": DELTA | QWEN_EXPERTS
    | dict(model_type="qwen3_next", norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3_next, sparse step": DELTA | QWEN_EXPERTS | INTERVAL
    | dict(model_type="qwen3_next", norm_topk_prob=False, decoder_sparse_step=2),
    "glm4_moe": GLM | dict(model_type="glm4_moe", attention_bias=True, use_qk_norm=False),
    "glm4_moe, normed": GLM | rope(partial_rotary_factor=0.75) | dict(
        model_type="glm4_moe", attention_bias=False, use_qk_norm=True, n_group=1, topk_group=1
    ),
    "glm4_moe_lite": LATENT | rope() | dict(model_type="glm4_moe_lite"),
    "gemma3": GEMMA3_PATTERN,
    "gemma3, layers": GEMMA3_LAYERS,
    "gemma4": GEMMA4,
    "gemma4, defaults": GEMMA4_DEFAULTS,
    "mistral": BASE | WIDE | dict(model_type="mistral", sliding_window=7),
    "mistral, scaled": BASE | BANDS | dict(model_type="mistral", sliding_window=None),
    "ministral3": BASE | WIDE | dict(model_type="ministral3") | rope(
        1e4, "yarn", **YARN_FIELDS, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1
    ),
    "mixtral": BASE | MISTRAL_EXPERTS | dict(model_type="mixtral", sliding_window=None),
    "olmo2": BASE | rope() | dict(model_type="olmo2"),
    "olmo3": BASE | OLMO3_ROPE
    | dict(model_type="olmo3", num_hidden_layers=4, sliding_window=7),
    "smollm3": BASE | TIED | dict(model_type="smollm3", num_hidden_layers=4, rope_theta=2e6),
    "smollm3, windows": BASE | dict(
        model_type="smollm3", use_sliding_window=True, sliding_window=7, no_rope_layer_interval=2
    ),
    "seed_oss": BASE | WIDE
    | dict(model_type="seed_oss", attention_bias=True, attention_out_bias=False),
    "granite": BASE | TIED | dict(
        model_type="granite", attention_multiplier=0.11, embedding_multiplier=12.0,
        residual_multiplier=0.22, logits_scaling=16.0,
    ),
    "phi3": BASE | dict(model_type="phi3", partial_rotary_factor=0.75, sliding_window=7),
    "phi3, short longrope": BASE | TIED | dict(
        model_type="phi3", partial_rotary_factor=0.75, sliding_window=None,
        original_max_position_embeddings=128, rope_theta=1e4, rope_scaling=LONGROPE,
    ),
    "phi3, long longrope": BASE | dict(
        model_type="phi3", partial_rotary_factor=0.75, sliding_window=None,
        original_max_position_embeddings=4, rope_theta=1e4, rope_scaling=LONGROPE,
    ),
    "minimax_m2": BASE | WIDE | MISTRAL_EXPERTS | dict(model_type="minimax_m2", rotary_dim=8),
    "qwen2_moe": BASE | QWEN_EXPERTS | dict(
        model_type="qwen2_moe", norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[0]
    ),
    "qwen2_moe, windows": BASE | QWEN_EXPERTS | dict(
        model_type="qwen2_moe", norm_topk_prob=True, use_sliding_window=True, sliding_window=7,
        max_window_layers=2, num_hidden_layers=3,
    ),
    "olmoe": BASE | dict(
        model_type="olmoe", num_experts=8, num_experts_per_tok=3, norm_topk_prob=False
    ),
}  # fmt: skip


@functools.cache
def hf_model(case: str) -> nn.Module:
    """Return transformers' fp32 model with random weights, which no test may change."""
    model = build_hf_model(CASES[case])
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or "embed_scale" in name or not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("A_log"):
                tensor.copy_(noise * 0.7)
            elif name.endswith(("dt_bias", "sinks")):
                tensor.copy_(noise)
            elif tensor.dim() <= 1 or "bias" in name:
                tensor.add_(noise * 0.2)
            else:
                tensor.copy_(noise * (0.3 if "embed" in name else 0.6 * tensor.shape[-1] ** -0.5))
    return model


@functools.cache
def hf_model_in_fp64(case: str) -> nn.Module:
    """Return `hf_model` with every part in fp64 and the same weights. Not to be called in `casts_to_fp64`."""
    weights = hf_model(case).state_dict()
    with casts_to_fp64():
        model = build_hf_model(CASES[case], torch.float64)
        model.load_state_dict(weights)
    return model


def hf_config(case: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**copy.deepcopy(CASES[case]))


def build_hf_model(content: dict[str, Any], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return transformers' model of a config.json; its kernels for experts would refuse fp64."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**copy.deepcopy(content))
    config._attn_implementation = config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def our_model(
    config: Any, weights: dict[str, Tensor], dtype: torch.dtype = torch.float32, **changes: Any
) -> tuple[Decoder, Any]:
    """Return our model of a config.json with these weights, and their adapter.

    changes: of the args; the default is packed rows with varlen.
    """
    match = from_hf_config(config)
    spec = get_train_spec(match.family)
    args = args_for_rows(match, **changes)
    adapter = spec.state_dict_adapter(args, None).spelled_like(weights)
    ours = adapter.from_hf({name: tensor.to(dtype, copy=True) for name, tensor in weights.items()})
    model = spec.model_cls(args)
    missing, unexpected = model.load_state_dict(ours, strict=False)
    assert not unexpected
    # Only routers with a correction bias have one in files.
    assert all(name.endswith("expert_bias") for name in missing), missing
    for name in missing:
        model.get_buffer(name).zero_()
    return model, adapter


def args_for_rows(match: HFMatch, **changes: Any) -> Any:
    """Return the args for packed rows of SEQ_LEN tokens. changes: further ones."""
    packed = dict(attn_type="varlen", attn_mask_type="position_block_causal", max_seq_len=64)
    return dataclasses.replace(match.model_args, **packed | changes)


def tokens_and_positions() -> tuple[Tensor, Tensor]:
    """Return rows of packed documents, [B, T] each; padding and end-of-text tokens do not occur."""
    tokens = torch.randint(
        2, VOCAB, (len(DOCUMENT_LENGTHS), SEQ_LEN), generator=torch.Generator().manual_seed(1)
    )
    positions = [torch.cat([torch.arange(n) for n in row]) for row in DOCUMENT_LENGTHS]
    return tokens, torch.stack(positions)


def their_logits(model: nn.Module) -> Tensor:
    """Return transformers' logits [B, T, V] of each document alone, joined to rows again."""
    tokens, _ = tokens_and_positions()
    rows = [
        torch.cat(
            [model(document[None], use_cache=False).logits[0] for document in row.split(sizes)]
        )
        for row, sizes in zip(tokens, DOCUMENT_LENGTHS, strict=True)
    ]
    return torch.stack(rows)


def our_logits(model: Decoder) -> Tensor:
    tokens, positions = tokens_and_positions()
    masks = model.get_attention_masks(tokens, None, {"positions": positions})
    return model(tokens, attention_masks=masks, positions=positions)


_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class _CastsToFp64(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.float:
            return args[0].double()

        def widened(x: Any) -> Any:
            return _WIDER.get(x, x) if isinstance(x, torch.dtype) else x

        args = [widened(x) for x in args]
        return func(*args, **{name: widened(x) for name, x in (kwargs or {}).items()})


@contextlib.contextmanager
def casts_to_fp64() -> Iterator[None]:
    """Replace every cast to fp32 by one to fp64, so that models differ only if their formulas do.

    Models have to be built in here, too: their RoPE frequencies are rounded to fp32 otherwise.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _CastsToFp64():
            yield
    finally:
        torch.set_default_dtype(before)
