"""gpt_oss against Hugging Face's GptOssForCausalLM on the same weights, fp32."""

import pytest
import torch
from safetensors.torch import load_file

from torchtitan.models.gpt_oss import GptOssModel, GptOssModelArgs, GptOssStateDictAdapter
from torchtitan.models.moe import MoEArgs

transformers = pytest.importorskip("transformers")

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 96, 32, 4, 4, 2, 16, 48
EXPERTS, TOP_K, WINDOW, LIMIT = 8, 4, 8, 1.5


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    hf_model().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def hf_model():
    config = transformers.GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=HIDDEN,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        sliding_window=WINDOW,
        swiglu_limit=LIMIT,
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 256,
        },
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).float().eval()
    with torch.no_grad():  # away from ones and zeros, and large enough to reach the limit
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name or "sinks" in name or "router" in name:
                parameter.copy_(("norm" in name) + 0.5 * torch.randn_like(parameter))
            elif "experts" in name:
                parameter.mul_(10)
    return model


def our_args(**changes):
    sizes = {
        "dim": DIM,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "n_kv_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "head_dim": HEAD_DIM,
        "moe_inter_dim": HIDDEN,
        "sliding_window_size": WINDOW,
        "swiglu_limit": LIMIT,
        "rope_theta": 1000.0,
        "rope_factor": 8.0,
        "original_seq_len": 256,
        "max_seq_len": 64,
        "moe_args": MoEArgs(
            num_experts=EXPERTS,
            num_shared_experts=0,
            score_func="softmax",
            route_norm=True,
            gate_bias=True,
            score_before_experts=False,
            top_k=TOP_K,
        ),
    }
    return GptOssModelArgs(**sizes | changes)


def loaded(args, hf_state_dict):
    """Our model with these weights, every one of them accounted for."""
    model = GptOssModel(args)
    adapter = GptOssStateDictAdapter(args, None)
    missing, unexpected = model.load_state_dict(adapter.from_hf(hf_state_dict), strict=False)
    assert not unexpected and all(name.endswith("expert_bias") for name in missing)
    return model, adapter


def random_tokens(*shape):
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(1))


def logits_of(model, tokens):
    return model(tokens, attention_masks=model.get_attention_masks(tokens, None))


@pytest.mark.parametrize("use_grouped_mm", [True, False])
def test_logits_and_export_equal_hugging_face(files, use_grouped_mm):
    args = our_args()
    args.moe_args.use_grouped_mm = use_grouped_mm
    model, adapter = loaded(args, files)
    tokens = random_tokens(2, 40)
    with torch.no_grad():
        ours, theirs = logits_of(model, tokens), hf_model()(tokens).logits
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() <= 2e-5

    exported = adapter.to_hf(model.state_dict())
    assert set(exported) == set(files)
    for name, tensor in files.items():
        assert torch.equal(exported[name], tensor), name


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
def test_packed_documents_have_the_log_probs_of_documents_alone(files, attn_type):
    args = our_args(attn_type=attn_type, attn_mask_type="position_block_causal")
    model, _ = loaded(args, files)
    reference = hf_model()
    # Two rows with boundaries of their own; documents shorter and longer than the window.
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


def test_three_adamw_steps_have_the_losses_of_hugging_face(files):
    reference = hf_model()
    model, _ = loaded(our_args(), {name: tensor.clone() for name, tensor in files.items()})
    batch = random_tokens(2, 33)
    losses, first_gradients = [], []
    for one in (reference, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        for step in range(3):
            inputs = batch[:, :-1]
            logits = one(inputs).logits if one is reference else logits_of(one, inputs)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            if step == 0:
                first_gradients.append({name: p.grad for name, p in one.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[2] < losses[0]
    assert losses[3:] == pytest.approx(losses[:3], abs=1e-4)

    theirs, ours = first_gradients
    ours = GptOssStateDictAdapter(our_args(), None).to_hf(ours)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=2e-5, msg=name)
