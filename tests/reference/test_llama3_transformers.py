"""llama3 against Hugging Face's LlamaForCausalLM on the same random weights, fp32."""

import pytest
import torch
from safetensors.torch import load_file

from torchtitan.models.llama3 import Llama3StateDictAdapter, Transformer, TransformerModelArgs

transformers = pytest.importorskip("transformers")

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, FFN = 96, 32, 2, 4, 2, 48


def hf_model(tied=False, bias=False, head_dim=8):
    """Scaling of RoPE as in Llama 3.1, squeezed so that 40 positions meet all three bands."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=head_dim,
        intermediate_size=FFN,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        attention_bias=bias,
        mlp_bias=bias,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():  # away from ones and zeros, which would hide a mistake
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def our_args(tied=False, bias=False, head_dim=8):
    args = TransformerModelArgs(
        dim=DIM,
        n_layers=LAYERS,
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        vocab_size=VOCAB,
        rope_theta=500000,
        max_seq_len=64,
        hidden_dim=FFN,
        head_dim=head_dim,
        attention_bias=bias,
        mlp_bias=bias,
        enable_weight_tying=tied,
    )
    args.rope_scaling_args.original_max_position_embeddings = 64
    return args


def loaded(args, hf_state_dict):
    """Our model with these weights, every one of them accounted for."""
    model = Transformer(args)
    adapter = Llama3StateDictAdapter(args, None)
    model.load_state_dict(adapter.from_hf(hf_state_dict), strict=True)
    return model, adapter


VARIANTS = [
    {},
    {"tied": True},
    {"bias": True},
    {"head_dim": 16, "tied": True},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_logits_and_export_equal_hugging_face(variant, tmp_path):
    reference = hf_model(**variant)
    reference.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    model, adapter = loaded(our_args(**variant), files)
    tokens = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = model(tokens), reference(tokens).logits
    assert (ours - theirs).abs().max() <= 1e-5  # logits are of order 0.3

    exported = adapter.to_hf(model.state_dict())
    assert set(exported) == set(files)
    for name, tensor in files.items():
        assert torch.equal(exported[name], tensor), name


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
def test_packed_documents_have_the_log_probs_of_documents_alone(attn_type):
    reference = hf_model()
    args = our_args()
    args.attn_type, args.attn_mask_type = attn_type, "position_block_causal"
    model, _ = loaded(args, reference.state_dict())
    lengths = [7, 1, 20, 12]
    tokens = torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        masks = model.get_attention_masks(tokens, None, {"positions": positions})
        ours = model(tokens, attention_masks=masks, positions=positions)
        theirs = [reference(part).logits for part in tokens.split(lengths, dim=1)]
    difference = ours.log_softmax(-1) - torch.cat(theirs, dim=1).log_softmax(-1)
    assert difference.abs().max() <= 5e-6


@pytest.mark.parametrize("tied", [False, True])
def test_three_adamw_steps_have_the_losses_of_hugging_face(tied):
    reference = hf_model(tied=tied)
    model, _ = loaded(
        our_args(tied=tied), {k: v.clone() for k, v in reference.state_dict().items()}
    )
    assert (model.output.weight is model.tok_embeddings.weight) == tied
    batch = torch.randint(0, VOCAB, (2, 33), generator=torch.Generator().manual_seed(1))
    losses = []
    for one in (reference, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
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


def test_rows_are_reordered_as_known():
    args = TransformerModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=4)
    adapter = Llama3StateDictAdapter(args, None)
    rows = torch.arange(16.0)
    ours, theirs = "layers.0.attention.wq", "model.layers.0.self_attn.q_proj"
    to_hf = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    from_hf = [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    for kind, tensor in (("weight", rows[:, None].expand(16, 16)), ("bias", rows)):
        there = adapter.to_hf({f"{ours}.{kind}": tensor})[f"{theirs}.{kind}"]
        back = adapter.from_hf({f"{theirs}.{kind}": tensor})[f"{ours}.{kind}"]
        assert there.view(16, -1)[:, 0].tolist() == to_hf
        assert back.view(16, -1)[:, 0].tolist() == from_hf


def test_unknown_keys_are_listed_on_either_side():
    adapter = Llama3StateDictAdapter(our_args(), None)
    with pytest.raises(ValueError, match=r"2 key.*self_attn.q_norm.weight, model.vision"):
        adapter.from_hf({"model.layers.0.self_attn.q_norm.weight": None, "model.vision": None})
    with pytest.raises(ValueError, match=r"1 key.*layers.0.moe.router.gate.weight"):
        adapter.to_hf({"layers.0.moe.router.gate.weight": None})


def test_stored_rotary_table_is_skipped():
    adapter = Llama3StateDictAdapter(our_args(), None)
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    assert adapter.from_hf({name: torch.ones(4)}) == {}
    assert adapter.ignores_hf_key(name) and not adapter.ignores_hf_key("lm_head.weight")
    assert Llama3StateDictAdapter(our_args(tied=True), None).ignores_hf_key("lm_head.weight")
