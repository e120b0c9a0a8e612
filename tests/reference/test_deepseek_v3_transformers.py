"""deepseek_v3 against Hugging Face's DeepseekV3ForCausalLM and DeepseekV2ForCausalLM, fp32."""

import pytest
import torch
from safetensors.torch import load_file

from torchtitan.models.deepseek_v3 import (
    DeepSeekV3Model,
    DeepSeekV3ModelArgs,
    DeepSeekV3StateDictAdapter,
)
from torchtitan.models.moe import MoEArgs

transformers = pytest.importorskip("transformers")

VOCAB, DIM, LAYERS, HEADS, EXPERTS = 96, 32, 3, 4, 8
# What the two sides call one and the same number.
SIZES = {
    "dim": ("hidden_size", DIM),
    "inter_dim": ("intermediate_size", 48),
    "moe_inter_dim": ("moe_intermediate_size", 24),
    "n_layers": ("num_hidden_layers", LAYERS),
    "n_dense_layers": ("first_k_dense_replace", 1),
    "n_heads": ("num_attention_heads", HEADS),
    "vocab_size": ("vocab_size", VOCAB),
    "kv_lora_rank": ("kv_lora_rank", 16),
    "qk_nope_head_dim": ("qk_nope_head_dim", 12),
    "qk_rope_head_dim": ("qk_rope_head_dim", 8),
    "v_head_dim": ("v_head_dim", 10),
}
# The original length is longer than any text here: YaRN holds below it, too.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}
GROUPED = {"num_expert_groups": 4, "num_limited_groups": 2}
VERSIONS = {
    "v3 grouped, latent queries": {
        "hf": {"q_lora_rank": 20, "n_group": 4, "topk_group": 2, "norm_topk_prob": True},
        "moe": {**GROUPED, "route_norm": True},
    },
    "v3 direct queries": {
        "hf": {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        "moe": {},
    },
    "v2 grouped": {
        "hf": {
            "q_lora_rank": 20,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
        },
        "moe": {**GROUPED, "group_score": "max", "score_func": "softmax"},
    },
}


def hf_model(version):
    kind = "V2" if version.startswith("v2") else "V3"
    config = getattr(transformers, f"Deepseek{kind}Config")(
        **dict(SIZES.values()),
        **VERSIONS[version]["hf"],
        num_key_value_heads=HEADS,
        n_routed_experts=EXPERTS,
        n_shared_experts=2,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        rope_parameters=dict(YARN),
        initializer_range=0.1,  # scores of experts that differ, and outputs of order 1
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"Deepseek{kind}ForCausalLM")(config).eval()
    with torch.no_grad():  # away from ones and zeros, which would hide a mistake
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or "correction_bias" in name:
                tensor.add_(0.1 * torch.randn_like(tensor))
    return model


def our_args(version, **changes):
    sizes = {ours: size for ours, (_, size) in SIZES.items()}
    moe_args = MoEArgs(
        num_experts=EXPERTS,
        num_shared_experts=2,
        top_k=3,
        route_scale=2.5,
        score_before_experts=False,
        **VERSIONS[version]["moe"],
    )
    return DeepSeekV3ModelArgs(
        **sizes,
        q_lora_rank=VERSIONS[version]["hf"]["q_lora_rank"] or 0,
        moe_args=moe_args,
        max_seq_len=40,
        rope_theta=YARN["rope_theta"],
        rope_factor=YARN["factor"],
        beta_fast=YARN["beta_fast"],
        beta_slow=YARN["beta_slow"],
        mscale=YARN["mscale_all_dim"],
        original_seq_len=YARN["original_max_position_embeddings"],
        **changes,
    )


def loaded(args, hf_state_dict):
    """Our model with these weights, every one of them accounted for."""
    model = DeepSeekV3Model(args)
    adapter = DeepSeekV3StateDictAdapter(args, None)
    weights = adapter.from_hf(hf_state_dict)
    lacking, surplus = model.load_state_dict(weights, strict=False)
    assert surplus == [] and all("expert_bias" in name for name in lacking)
    return model, adapter


def random_tokens(*shape):
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("version", VERSIONS)
def test_logits_and_export_equal_hugging_face(version, tmp_path):
    reference = hf_model(version)
    reference.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    model, adapter = loaded(our_args(version), files)
    tokens = random_tokens(2, 40)
    with torch.no_grad():
        ours, theirs = model(tokens), reference(tokens).logits
    assert theirs.std() > 0.3
    assert (ours - theirs).abs().max() <= 2e-5

    exported = adapter.spelled_like(files).to_hf(model.state_dict())
    assert set(exported) == set(files)
    for name, tensor in files.items():
        assert torch.equal(exported[name], tensor), name


def test_yarn_and_correction_bias_matter_here():
    """Otherwise the test above would not see them."""
    version = "v3 grouped, latent queries"
    weights, tokens = hf_model(version).state_dict(), random_tokens(2, 40)
    without_bias = {n: t * (0 if "correction" in n else 1) for n, t in weights.items()}
    plain_rope = our_args(version)
    plain_rope.rope_factor = 1
    pairs = [
        (our_args(version), weights),
        (our_args(version), without_bias),
        (plain_rope, weights),
    ]
    with torch.no_grad():
        first, *others = (loaded(args, state)[0](tokens) for args, state in pairs)
    assert all((other - first).abs().max() > 0.01 for other in others)


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
def test_packed_documents_have_the_log_probs_of_documents_alone(attn_type):
    version = "v3 grouped, latent queries"
    reference = hf_model(version)
    args = our_args(version, attn_type=attn_type, attn_mask_type="position_block_causal")
    model, _ = loaded(args, reference.state_dict())
    # Two rows with boundaries of their own, so with positions of their own.
    lengths = [[7, 1, 20, 12], [30, 10]]
    tokens = random_tokens(2, 40)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    with torch.no_grad():
        masks = model.get_attention_masks(tokens, None, {"positions": positions})
        ours = model(tokens, attention_masks=masks, positions=positions)
        theirs = [
            torch.cat([reference(part).logits for part in row[None].split(sizes, dim=1)], dim=1)
            for row, sizes in zip(tokens, lengths, strict=True)
        ]
    difference = ours.log_softmax(-1) - torch.cat(theirs).log_softmax(-1)
    assert difference.abs().max() <= 2e-5


@pytest.mark.parametrize("version", VERSIONS)
def test_three_adamw_steps_have_the_losses_of_hugging_face(version):
    reference = hf_model(version)
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    model, _ = loaded(our_args(version), weights)
    batch = random_tokens(2, 33)
    losses = []
    for one in (reference, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3)
        for _ in range(3):
            out = one(batch[:, :-1])
            logits = out if isinstance(out, torch.Tensor) else out.logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[2] < losses[0]
    assert losses[3:] == pytest.approx(losses[:3], abs=1e-4)
