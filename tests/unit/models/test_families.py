"""What every family has: flavors of known sizes, names in a fixed order, blocks that can be compiled."""

import copy
import dataclasses
import itertools

import pytest
import torch

from tests.distributed.layout_matrix import FAMILIES
from tests.unit.models.tiny import filled, on_meta
from torchtitan.config import JobConfig
from torchtitan.config.job_config import Compile
from torchtitan.models.parallelize import apply_compile
from torchtitan.protocols.train_spec import get_train_spec

# family -> flavor -> (parameters, FLOPs per token at sequence length 2048)
KNOWN_SIZES = {
    "llama3": {
        **dict.fromkeys(
            ("debugmodel", "debugmodel_flex_attn", "debugmodel_varlen_attn"),
            (6_163_712, 71_585_280),
        ),
        "1B": (973_146_112, 6_644_183_040),
        **dict.fromkeys(("8B", "8B_flex", "8B_varlen"), (8_030_261_248, 48_250_773_504)),
        "70B": (70_553_706_496, 433_124_327_424),
        "405B": (405_853_388_800, 2_473_246_556_160),
    },
    "qwen3": {
        "debugmodel": (31_463_680, 591_435_264),
        "0.6B": (440_467_456, 4_052_090_880),
        "1.7B": (1_409_410_048, 9_865_746_432),
        "4B": (3_633_511_936, 25_424_950_272),
        "8B": (8_190_735_360, 49_034_311_680),
        "14B": (14_768_307_200, 88_975_534_080),
        "32B": (32_762_123_264, 204_790_167_552),
        "debugmodel_moe_small": (11_545_856, 138_481_152),
        "debugmodel_moe": (315_758_848, 708_613_632),
        "30B-A3B": (30_532_122_624, 23_083_044_864),
        "235B-A22B": (235_093_634_560, 148_335_301_632),
    },
    "deepseek_v3": {
        **dict.fromkeys(("debugmodel", "debugmodel_flex_attn"), (33_014_016, 542_934_528)),
        "16B": (15_706_484_224, 16_407_303_168),
        "236B": (235_741_434_880, 155_308_062_720),
        "671B": (671_026_404_352, 250_455_926_784),
    },
    "llama4": {
        **dict.fromkeys(("debugmodel", "debugmodel_irope"), (15_017_216, 75_161_088)),
        **dict.fromkeys(("17bx16e", "17bx16e_irope"), (107_769_861_120, 102_870_251_520)),
        **dict.fromkeys(("17bx128e", "17bx128e_irope"), (400_711_848_960, 102_941_030_400)),
    },
    "gpt_oss": {
        "debugmodel": (183_397_920, 981_255_360),
        "20b": (20_914_757_184, 24_065_762_688),
        "120b": (116_829_156_672, 34_420_975_488),
    },
    "qwen3_5": {
        "debugmodel": (4_444_624, 31_435_488),
        "debugmodel_moe": (5_633_488, 24_412_896),
        "0.8B": (498_113_344, 3_432_227_712),
        "2B": (1_373_265_728, 8_683_142_016),
        "4B": (3_570_052_096, 22_603_106_304),
        "9B": (8_953_803_264, 48_802_900_992),
        "27B": (26_895_998_464, 157_295_981_568),
        "35B-A3B": (34_660_610_688, 19_157_069_568),
        "122B-A10B": (122_111_526_912, 57_599_078_400),
        "397B-A17B": (396_346_350_336, 102_427_009_536),
        "Next-80B-A3B": (79_674_391_296, 23_156_777_472),
    },
}
# Parameters including the embedding, in billions, as published.
BILLIONS = {
    "qwen3": {
        "Qwen2-0.5B": 0.49, "Qwen2.5-3B": 3.09, "Qwen2.5-7B": 7.61, "Qwen2.5-14B": 14.7,
        "Qwen2.5-32B": 32.5,
    },
    "mistral": {
        "7B-v0.3": 7.25, "Nemo-12B": 12.2, "Small-24B": 23.6, "Mixtral-8x7B": 46.7,
        "Mixtral-8x22B": 141,
    },
    "olmo": {
        "OLMo-2-1B": 1.48, "OLMo-2-7B": 7.30, "OLMo-2-13B": 13.7, "OLMo-2-32B": 32.2,
        "OLMo-3-7B": 7.30, "OLMo-3-32B": 32.2, "OLMoE-1B-7B": 6.92,
    },
    "gemma3": {"270M": 0.268, "1B": 1.00, "4B": 3.88, "12B": 11.8, "27B": 27.0},
    "gemma4": {"31B": 30.7},
}  # fmt: skip
WITHOUT_KNOWN_SIZE = {"qwen3": [*BILLIONS["qwen3"]], "gpt_oss": ["debugmodel_small"]}
WITH_EXPERTS = ("qwen3", "deepseek_v3", "llama4", "gpt_oss", "qwen3_5")


def args_of(family, flavor):
    return get_train_spec(family).model_args[flavor]


def meta_model(family, args):
    return on_meta(get_train_spec(family).model_cls, args)


# ---- sizes ----


@pytest.mark.parametrize("family", KNOWN_SIZES)
def test_flavors_are_the_known_ones_and_have_their_known_size_and_flops(family):
    # Other tests of the process add tiny ones.
    flavors = {f for f in get_train_spec(family).model_args if not f.startswith("tiny")}
    assert flavors == {*KNOWN_SIZES[family], *WITHOUT_KNOWN_SIZE.get(family, [])}
    for flavor, known in KNOWN_SIZES[family].items():
        args = args_of(family, flavor)
        assert args.get_nparams_and_flops(meta_model(family, args), 2048) == known, flavor


@pytest.mark.parametrize(
    "family, flavor", [(family, flavor) for family in BILLIONS for flavor in BILLIONS[family]]
)
def test_flavor_has_its_published_size(family, flavor):
    model = meta_model(family, args_of(family, flavor))
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    assert float(f"{billions:.3g}") == pytest.approx(BILLIONS[family][flavor], rel=0.01)


# (family, flavors whose names contain this) -> what is published of them and no size shows
PUBLISHED = [
    ("llama3", "", {"rope_theta": 500000}),
    ("llama3", "flex", {"attn_type": "flex", "attn_mask_type": "block_causal"}),
    ("llama3", "varlen", {"attn_type": "varlen", "attn_mask_type": "block_causal"}),
    ("llama3", "1B", {"attn_type": "sdpa", "attn_mask_type": "causal"}),
    ("qwen3", "debugmodel", {"norm_eps": 1e-6, "rope_theta": 1e6}),
    ("qwen3", "1.7B", {"max_seq_len": 4096}),
    ("qwen3", "30B", {"rope_theta": 1e6, "max_seq_len": 262144}),
    ("qwen3", "235B", {"rope_theta": 5e6, "max_seq_len": 4096}),
    ("deepseek_v3", "", {"norm_eps": 1e-6, "score_before_experts": False}),
    ("deepseek_v3", "B", {"attn_type": "flex", "attn_mask_type": "block_causal"}),
    # DeepSeek-V2 ranks groups by their best expert, V3 by the sum of the two best.
    ("deepseek_v3", "16B", {"num_expert_groups": None}),
    ("deepseek_v3", "236B", {"num_expert_groups": 8, "group_score": "max"}),
    ("deepseek_v3", "671B", {"num_expert_groups": 8, "group_score": "top2_sum"}),
    ("llama4", "16e", {"max_seq_len": 10485760}),
    ("llama4", "128e", {"max_seq_len": 1048576, "rope_scaling_args": None}),
    ("llama4", "irope", {"every_n_layers_nope": 4, "attn_type": "flex"}),
    ("llama4", "17bx16e", {"fixed_attn_block_size": 8192}),
    ("gpt_oss", "0b", {"n_heads": 64, "n_kv_heads": 8, "head_dim": 64}),
]


@pytest.mark.parametrize("family, part, published", PUBLISHED)
def test_flavors_have_the_published_settings(family, part, published):
    flavors = [flavor for flavor in KNOWN_SIZES[family] if part in flavor]
    assert flavors
    for args in (args_of(family, flavor) for flavor in flavors):
        for name, value in published.items():
            owner = args if hasattr(args, name) else args.moe_args
            assert getattr(owner, name) == value, (args, name)


# ---- names ----


def weights(module, *names):
    return [f"{module}.{name}.weight" for name in names]


NORMS = ["attention_norm.weight", "ffn_norm.weight"]
GQA = weights("attention", "wq", "wk", "wv", "wo")
MLP = weights("feed_forward", "w1", "w2", "w3")
EXPERTS = ["moe.expert_bias", *(f"moe.experts.w{i}" for i in (1, 2, 3)), "moe.router.gate.weight"]
SHARED = weights("moe.shared_experts", "w1", "w2", "w3")
QK_NORMS = weights("attention", "q_norm", "k_norm")
LATENT = weights("attention", "wq", "wkv_a", "kv_norm", "wkv_b", "wo")
KINDS = ("weight", "bias")
QKV = [f"attention.{w}.{kind}" for w in ("wq", "wk", "wv") for kind in KINDS]
BIASED_QKV = [*QKV, "attention.wo.weight"]
GPT_OSS = [
    *("attention.sinks", *QKV, *(f"attention.wo.{kind}" for kind in KINDS)),
    "moe.expert_bias",
    *(f"moe.experts.{mlp}_{kind}" for mlp in ("mlp1", "mlp2") for kind in KINDS),
    *(f"moe.router.gate.{kind}" for kind in KINDS),
]
# (family, flavor) -> names of each block
BLOCKS = {
    ("llama3", "debugmodel"): [GQA + MLP] * 6,
    ("qwen3", "debugmodel"): [QK_NORMS + GQA + MLP] * 8,
    ("qwen3", "30B-A3B"): [QK_NORMS + GQA + EXPERTS] * 48,
    ("qwen3", "Qwen2.5-7B"): [BIASED_QKV + MLP] * 28,
    ("deepseek_v3", "debugmodel"): [LATENT + MLP] + [LATENT + EXPERTS + SHARED] * 5,
    ("llama4", "debugmodel"): [GQA + MLP, GQA + EXPERTS + SHARED] * 3,
    ("gpt_oss", "debugmodel"): [GPT_OSS] * 4,
}


@pytest.mark.parametrize("family, flavor", BLOCKS)
def test_names_and_order_of_the_state_dict_are_fixed(family, flavor):
    names = ["tok_embeddings.weight"]
    for i, block in enumerate(BLOCKS[family, flavor]):
        names += [f"layers.{i}.{name}" for name in block + NORMS]
    model = meta_model(family, args_of(family, flavor))
    assert list(model.state_dict()) == [*names, "norm.weight", "output.weight"]


# ---- small models ----

TINY = ["llama3", "qwen3", "deepseek_v3", "llama4", "gpt_oss"]
KINDS = ["sdpa", "flex", "varlen"]
QUICK = [*(("llama3", kind) for kind in KINDS), ("qwen3_5 MoE", "varlen")]


def tiny_args(family, **changes):
    """Return the args of the matrix of layouts."""
    name, flavor, sizes = FAMILIES[family]
    return dataclasses.replace(args_of(name, flavor), **sizes | {"max_seq_len": 64} | changes)


@pytest.mark.parametrize("family", TINY)
def test_meta_model_becomes_the_model_built_at_once(family):
    args = tiny_args(family)
    model = filled(meta_model(family, args).to_empty(device="cpu"))
    other = filled(get_train_spec(FAMILIES[family][0]).model_cls(args))
    state, tensors = other.state_dict() | dict(other.named_buffers()), dict(model.named_buffers())
    for name, tensor in (model.state_dict() | tensors).items():
        assert torch.equal(tensor, state[name]), name
        assert "norm" not in name or torch.all(tensor == 1), name


@pytest.mark.parametrize(
    "family, attn_type",
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product([*TINY, "qwen3_5 MoE"], KINDS)
        # These have windows, sinks or chunks.
        if case not in [("llama4", "sdpa"), ("gpt_oss", "sdpa")]
    ],
)
def test_compiled_blocks_give_the_same_loss_and_gradients(family, attn_type):
    mask_type = "causal" if attn_type == "sdpa" else "position_block_causal"
    args = tiny_args(family, attn_type=attn_type, attn_mask_type=mask_type)
    model = filled(get_train_spec(FAMILIES[family][0]).model_cls(args))
    compiled = copy.deepcopy(model)
    apply_compile(compiled, Compile(enable=True, backend="aot_eager"))
    tokens = torch.randint(0, 64, (2, 12))
    positions = torch.tensor([[*range(12)], [*range(5), *range(7)]])
    masks = None
    if attn_type != "sdpa":
        masks = model.get_attention_masks(tokens, None, {"positions": positions})
    losses = []
    for one in (model, compiled):
        losses.append(one(tokens, attention_masks=masks, positions=positions).pow(2).sum())
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1])
    for a, b in zip(model.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


# ---- config and spec ----


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_config_reaches_the_model_and_no_shared_flavor(family):
    config = JobConfig()
    config.training.seq_len = 128
    config.debug.moe_force_load_balance = True
    flavors = {"qwen3": "debugmodel_moe_small", "qwen3_5": "debugmodel_moe"}
    shared = args_of(family, flavors.get(family, "debugmodel"))
    before, args = copy.deepcopy(shared), copy.copy(shared)
    args.update_from_config(config)
    assert args.max_seq_len == 128 and args.moe_args._debug_force_load_balance
    kinds = (before.attn_type, before.attn_mask_type)
    assert (args.attn_type, args.attn_mask_type) == kinds != ("varlen", "position_block_causal")
    config.model.attn_type, config.model.attn_mask_type = "varlen", "position_block_causal"
    args.update_from_config(config)
    assert (args.attn_type, args.attn_mask_type) == ("varlen", "position_block_causal")
    assert shared == before and args.moe_args.num_experts == before.moe_args.num_experts
    blocks = meta_model(family, args).layers.values()
    routers = [block.moe.router for block in blocks if block.moe_enabled]
    assert routers and all(router._debug_force_load_balance for router in routers)
