"""qwen3 on the shared decoder: sizes, names, initial weights, weights of Hugging Face."""

import copy

import pytest
import torch

from torchtitan.config import ConfigManager
from torchtitan.config.job_config import Compile
from torchtitan.models.parallelize import apply_compile
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs, Qwen3StateDictAdapter, qwen3_args

pytestmark = pytest.mark.long

# (parameters, FLOPs per token at sequence length 2048)
KNOWN_SIZES = {
    "debugmodel": (31_463_680, 591_435_264),
    "0.6B": (440_467_456, 4_052_090_880),
    "1.7B": (1_409_410_048, 9_865_746_432),
    "4B": (3_633_511_936, 25_424_950_272),
    "8B": (8_190_735_360, 49_034_311_680),
    "14B": (14_768_307_200, 88_975_534_080),
    "32B": (32_762_123_264, 204_790_167_552),
}
# Parameters including the embedding, in billions, as Qwen publishes them.
QWEN2_BILLIONS = {
    "Qwen2-0.5B": 0.49,
    "Qwen2.5-3B": 3.09,
    "Qwen2.5-7B": 7.61,
    "Qwen2.5-14B": 14.7,
    "Qwen2.5-32B": 32.5,
}


def meta_model(args):
    with torch.device("meta"):
        return Qwen3Model(args)


def tiny_args(**changes):
    sizes = {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "vocab_size": 64,
        "head_dim": 16,
        "hidden_dim": 48,
        "max_seq_len": 64,
    }
    return Qwen3ModelArgs(**sizes | changes)


def test_dense_flavors_are_the_known_ones():
    dense = [flavor for flavor, args in qwen3_args.items() if not args.moe_enabled]
    dense = [flavor for flavor in dense if not flavor.startswith("tiny")]  # other tests add these
    assert dense == [*KNOWN_SIZES, *QWEN2_BILLIONS]


@pytest.mark.parametrize("flavor", KNOWN_SIZES)
def test_flavor_has_its_known_size_and_flops(flavor):
    args = qwen3_args[flavor]
    assert args.get_nparams_and_flops(meta_model(args), 2048) == KNOWN_SIZES[flavor]
    assert (args.head_dim, args.norm_eps, args.rope_theta) == (128, 1e-6, 1e6)
    assert args.enable_weight_tying == (flavor in ("debugmodel", "0.6B", "1.7B", "4B"))


@pytest.mark.parametrize("flavor", QWEN2_BILLIONS)
def test_qwen2_flavor_has_its_published_size(flavor):
    billions = sum(p.numel() for p in meta_model(qwen3_args[flavor]).parameters()) / 1e9
    assert float(f"{billions:.3g}") == pytest.approx(QWEN2_BILLIONS[flavor], rel=0.01)


def test_names_and_order_of_the_state_dict_are_fixed():
    block = [
        *(f"attention.{name}.weight" for name in ("q_norm", "k_norm", "wq", "wk", "wv", "wo")),
        *(f"feed_forward.{name}.weight" for name in ("w1", "w2", "w3")),
        "attention_norm.weight",
        "ffn_norm.weight",
    ]
    names = ["tok_embeddings.weight"]
    names += [f"layers.{i}.{name}" for i in range(8) for name in block]
    names += ["norm.weight", "output.weight"]
    model = meta_model(qwen3_args["debugmodel"])
    assert list(model.state_dict()) == names and len(names) == 91
    assert len(list(model.parameters())) == 90
    assert [name for name, _ in model.named_buffers()] == ["rope_cache"]
    assert model.rope_cache.shape == (4096, 256) and model.rope_cache.dtype == torch.float32


def test_attributes_that_clients_read():
    args = qwen3_args["4B"]
    model = meta_model(args)
    assert (model.vocab_size, model.n_layers, model.head_dim) == (151936, 36, 128)
    assert model.model_args is args and model.enable_weight_tying


def test_qwen2_has_biases_and_no_norms_in_attention():
    args = tiny_args(qk_norm=False, qkv_bias=True)
    names = [name for name, _ in meta_model(args).layers["0"].attention.named_parameters()]
    assert names == [f"{w}.{kind}" for w in ("wq", "wk", "wv") for kind in ("weight", "bias")] + [
        "wo.weight"
    ]


def test_meta_model_becomes_the_model_built_at_once():
    models = [meta_model(tiny_args()).to_empty(device="cpu"), Qwen3Model(tiny_args())]
    for model in models:
        torch.manual_seed(3)
        with torch.no_grad():
            model.init_weights()
    assert torch.equal(models[0].rope_cache, models[1].rope_cache)
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b), name
        assert "norm" not in name or torch.all(a == 1)


@pytest.mark.parametrize(
    "there, here",
    [({}, {"qk_norm": False, "qkv_bias": True}), ({"qk_norm": False, "qkv_bias": True}, {})],
)
def test_qwen2_weights_in_a_qwen3_model_are_named_and_the_reverse(there, here):
    state = meta_model(tiny_args(**there)).state_dict()
    files = Qwen3StateDictAdapter(tiny_args(**there), None).to_hf(state)
    other = Qwen3StateDictAdapter(tiny_args(**here), None)
    odd_one = "q_norm.weight" if there == {} else "q_proj.bias"
    with pytest.raises(ValueError, match=rf"model.layers.1.self_attn.{odd_one}"):
        other.from_hf(files)
    with pytest.raises(ValueError, match=r"layers.1.attention.(q_norm|wq.bias)"):
        other.to_hf(state)


def test_tied_files_have_no_head_and_reading_gives_one_tensor_twice():
    args = tiny_args(enable_weight_tying=True)
    adapter = Qwen3StateDictAdapter(args, None)
    state = Qwen3Model(args).state_dict()
    files = adapter.to_hf(state)
    assert "lm_head.weight" not in files and len(files) == len(state) - 1
    back = adapter.from_hf(files)
    assert back.keys() == state.keys()
    assert back["output.weight"] is back["tok_embeddings.weight"]
    untied = Qwen3StateDictAdapter(tiny_args(), None)
    assert "lm_head.weight" in untied.to_hf(state)


@pytest.mark.parametrize(
    "attn_type",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("sdpa", "flex")), "varlen"],
)
def test_debug_preset_learns(attn_type, tmp_path):
    from torchtitan.trainer import Trainer

    mask_type = "causal" if attn_type == "sdpa" else "block_causal"
    trainer = Trainer(
        ConfigManager().parse_args(
            [
                "--job.config_file=torchtitan/models/qwen3/train_configs/debug_model.toml",
                f"--job.dump_folder={tmp_path}",
                "--training.steps=5",
                "--training.seq_len=64",
                "--training.local_batch_size=1",
                f"--model.attn_type={attn_type}",
                f"--model.attn_mask_type={mask_type}",
            ]
        )
    )
    losses = []
    trainer.metrics_processor.log = lambda step, loss, *others, **more: losses.append(loss)
    trainer.train()
    trainer.close()
    # Losses fall from log(2048) = 7.6. Each step has new text, so compare only first and last.
    assert len(losses) == 5 and losses[0] == pytest.approx(7.8, abs=0.4)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow  # CI compiles the blocks of llama3 and gpt_oss
def test_compiled_blocks_give_the_same_loss_and_gradients():
    torch.manual_seed(0)
    model = Qwen3Model(tiny_args(enable_weight_tying=True))
    with torch.no_grad():
        model.init_weights()
    compiled = copy.deepcopy(model)
    apply_compile(compiled, Compile(enable=True, backend="aot_eager"))
    tokens = torch.randint(0, 64, (2, 12))
    positions = torch.tensor([[*range(12)], [*range(5), *range(7)]])
    losses = [one(tokens, positions=positions).pow(2).sum() for one in (model, compiled)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1])
    for a, b in zip(model.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_normed_queries_and_keys_have_the_dtype_of_values():
    model = Qwen3Model(tiny_args())
    with torch.no_grad():
        model.init_weights()
    attention = model.layers["0"].attention
    seen = []

    def look(module, args, kwargs):
        seen.extend(x.dtype for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))

    attention.inner_attention.register_forward_pre_hook(look, with_kwargs=True)
    for norm in (attention.q_norm, attention.k_norm):  # as autocast on CUDA computes norms
        norm.register_forward_hook(lambda module, args, output: output.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randint(0, 64, (1, 8)))
    assert len(seen) == 3 and set(seen) == {torch.bfloat16}
