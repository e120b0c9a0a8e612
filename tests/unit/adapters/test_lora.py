"""Adapters beside frozen weights: what trains, what they compute, and what is refused."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.distributed.layout_matrix import SHALLOW, batch_flags, build_engine, global_batch
from tests.unit.models.tiny import Operators
from torchtitan.adapters.lora import adapted_weights, add_adapter, fits
from torchtitan.adapters.multi_lora import MultiLoRA
from torchtitan.config import JobConfig
from torchtitan.config.checks import ConfigError, check_job_config
from torchtitan.distributed.dtensor import is_dtensor
from torchtitan.models.moe import MoE, MoEArgs
from torchtitan.models.moe import moe as moe_module
from torchtitan.rl.generator import LocalGenerator
from torchtitan.tools.errors import RunError

LORA = ["--model.converters=lora", "--lora.rank=4", SHALLOW]


@pytest.fixture
def build(tmp_path):
    """Return an engine of a tiny family with adapters, or without if `flags` are None."""
    engines = []

    def build(family="llama3", flags=(), *, adapters=True):
        flags = [*batch_flags(family, "whole rows"), *(LORA if adapters else [SHALLOW]), *flags]
        engines.append(build_engine(family, flags, str(tmp_path)))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def train(engine, steps=2):
    for step in range(steps):
        backward_of(engine, step)
        engine.optim_step()


def backward_of(engine, step=0, n_rows=8):
    """Run forward and backward on the first rows of a step's batch; return (loss, gradients)."""
    batch, labels = global_batch(step, False)
    arguments = {"input_dict": {"input": batch["input"][:n_rows]}, "labels": labels[:n_rows]}
    loss = engine.forward_backward_step(**arguments, global_valid_tokens=32 * n_rows)
    return loss, [p.grad for p in engine.model_parts[0].parameters() if p.requires_grad]


def logits(engine):
    (out,) = engine.forward_step(global_batch(9, False)[0])
    return out


def trained(engine):
    return {n for n, p in engine.model_parts[0].named_parameters() if p.requires_grad}


def adapted(engine):
    return {one.weight for one in adapted_weights(engine.model_parts)}


# ---- which layers ----


def test_names_of_peft_and_ours_fit():
    for pattern, name in {
        "q_proj": "layers.0.attention.wq",
        "wq": "layers.10.attention.wq",
        "self_attn.o_proj": "layers.0.attention.wo",
        "mlp.down_proj": "layers.1.feed_forward.w2",
        "mlp.experts.gate_proj": "layers.1.moe.experts.w1",
        "layers.1": "layers.1.feed_forward.w2",
    }.items():
        assert fits(pattern, name) and not fits(pattern, "layers.11.attention_norm")


def test_linear_layers_have_adapters_and_nothing_else_trains(build):
    engine = build()
    names = ["attention.wq", "attention.wk", "attention.wv", "attention.wo"]
    names += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]
    weights = {f"layers.{i}.{name}.weight" for i in range(2) for name in names}
    assert adapted(engine) == weights
    ends = ("lora_a", "lora_b")
    assert trained(engine) == {w.replace("weight", end) for w in weights for end in ends}
    before = {n: p.clone() for n, p in engine.model_parts[0].named_parameters()}
    train(engine)
    for name, parameter in engine.model_parts[0].named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in trained(engine)), name
        assert parameter.grad is None or parameter.requires_grad


def test_load_of_experts_is_not_balanced_because_their_bias_is_frozen(build):
    engine = build("deepseek_v3")
    train(engine)
    biases = [b for n, b in engine.model_parts[0].named_buffers() if n.endswith("expert_bias")]
    assert biases and not any(bias.any() for bias in biases)


# ---- what they compute ----


@pytest.mark.parametrize("kernel", ["grouped", "padded groups", "loop"])
def test_models_that_share_a_mixture_of_experts_compute_as_each_alone(kernel, monkeypatch):
    """Also if a model's rows are not next to each other, and a model has no row."""
    torch.manual_seed(0)
    args = MoEArgs(num_experts=4, num_shared_experts=1, top_k=2, use_grouped_mm=kernel != "loop")
    moe = MoE(args, dim=16, hidden_dim=8)
    for parameter in moe.requires_grad_(False).parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for name in ("w1", "w2", "w3"):
        add_adapter(moe.experts, name, rank=4, scale=0.5, dropout=0.0)
        add_adapter(moe.shared_experts.get_submodule(name), "weight", 4, scale=0.5, dropout=0.0)
    trained = {name: p for name, p in moe.named_parameters() if "lora" in name}
    weights = [{name: torch.randn_like(p) for name, p in trained.items()} for _ in range(4)]
    models, x = [2, 0, 1, 2, 0], torch.randn(5, 7, 16)
    factors = torch.randn_like(x)
    together = MultiLoRA([moe], None)
    monkeypatch.setattr(moe_module, "_needs_padding", lambda _: kernel == "padded groups")
    with together.adapters(weights) as gradients:
        together.set_rows(models)
        found = moe(x)
        (found * factors).sum().backward()
    assert not any(gradient.any() for gradient in gradients[3].values())
    for model in range(3):
        own = [row for row, of_row in enumerate(models) if of_row == model]
        for name, parameter in trained.items():
            parameter.data.copy_(weights[model][name])
            parameter.grad = None
        out = moe(x[own])
        (out * factors[own]).sum().backward()
        torch.testing.assert_close(found[own], out)
        for name, parameter in trained.items():
            torch.testing.assert_close(gradients[model][name], parameter.grad)


def test_initial_adapters_are_those_of_kaiming_and_change_nothing(build):
    engine, plain = build(), build(adapters=False)
    assert torch.equal(logits(engine), logits(plain))
    linear = engine.model_parts[0].layers["0"].feed_forward.w2
    reference = torch.empty(4096, linear.in_features)
    nn.init.kaiming_uniform_(reference, a=5**0.5)
    assert linear.lora_a.abs().max() <= reference.abs().max() * 1.001
    assert linear.lora_a.std().item() == pytest.approx(reference.std().item(), rel=0.1)
    assert not linear.lora_b.any()


def test_adapters_off_gives_the_base_model_and_backward_goes_on(build):
    engine, plain = build(), build(adapters=False)
    train(engine)
    on = logits(engine)
    assert not torch.equal(on, logits(plain))
    with engine.adapters_off():
        assert torch.equal(logits(engine), logits(plain))
        with pytest.raises(ValueError, match="^forward_backward_step was called in a context of"):
            train(engine)
        with pytest.raises(ValueError, match="^backward was called in a context of adapters_off"):
            engine.backward(torch.zeros((), requires_grad=True))
    assert torch.equal(logits(engine), on)
    first, second = engine.adapters_off(), engine.adapters_off()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(logits(engine), logits(plain)), "the second one is open"
    second.__exit__(None, None, None)
    assert torch.equal(logits(engine), on)
    for name, arguments in {"adapters_off": (), "save_peft": ("x",), "load_peft": ("x",)}.items():
        with pytest.raises(ValueError, match=f"^{name} needs a model with.*model.converters"):
            getattr(plain, name)(*arguments)
    with pytest.raises(ValueError, match="norm.weight is trained in full"):
        build(flags=["--lora.also_train=norm"]).adapters_off()


@pytest.mark.parametrize("family", ["llama3", "qwen3 MoE", "deepseek_v3"])
def test_merged_files_and_streams_give_the_logits_of_the_adapters(family, build, tmp_path):
    engine, plain = build(family), build(family, adapters=False)
    train(engine)
    stream = dict(engine.iter_hf_weights())
    engine.save_hf(tmp_path / "merged")
    assert not (logits(engine) - logits(plain)).abs().max() < 1e-3
    plain.load(str(tmp_path / "merged"), model_only=True)
    # fp32: x (W + BA) and x W + (x A) B round differently.
    torch.testing.assert_close(logits(plain), logits(engine), rtol=0, atol=1e-5)
    assert all(torch.equal(tensor, stream[name]) for name, tensor in plain.iter_hf_weights())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # of rank 4, bf16 has no grouped kernel
def test_grouped_experts_with_adapters_are_those_computed_one_by_one(dtype, build):
    engine = build("qwen3 MoE", [f"--training.mixed_precision_param={dtype}"])
    train(engine)
    grouped = logits(engine)
    for block in engine.model_parts[0].layers.values():
        block.moe.experts.use_grouped_mm = False
    torch.testing.assert_close(logits(engine), grouped, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama3", "qwen3 MoE"])
def test_backward_computes_no_gradient_of_a_frozen_weight(family, build):
    engine = build(family)
    weights = [p for p in engine.model_parts[0].parameters() if not p.requires_grad and p.ndim > 1]
    shapes = {s for p in weights for s in (tuple(p.shape), (*p.shape[:-2], *p.shape[:-3:-1]))}
    with Operators() as operators:
        backward_of(engine, n_rows=7)  # 224 tokens: a number that is no size of a weight
    products = (torch.ops.aten.mm.default, torch.ops.torchtitan.grouped_mm_weight_grad.default)
    found = {shape for operator, shape in operators.calls if operator in products}
    assert found and not shapes & found


def test_models_share_no_batch_if_something_else_trains(build):
    generator = LocalGenerator(build(flags=["--lora.also_train=norms"]), seed=1)
    words = "cannot share a batch, because .*norm.weight, which lora.also_train trains whole"
    with pytest.raises(ValueError, match=words), generator.with_adapters([{}, {}], [0, 1]):
        pass


@pytest.mark.parametrize("base", [[], ["--lora.base_format=nf4"]], ids=["fp32", "4 bits"])
def test_fsdp_on_one_rank_holds_no_frozen_weight_because_it_would_copy_it(base, build):
    engines = [build(flags=[*base, f"--parallelism.always_fsdp={x}"]) for x in (False, True)]
    for engine in engines:
        train(engine)
    parameters = dict(engines[1].model_parts[0].named_parameters())
    assert {n for n, p in parameters.items() if is_dtensor(p)} == trained(engines[1])
    assert torch.equal(*map(logits, engines))


def test_dropout_is_the_same_when_blocks_are_recomputed(build):
    gradients = []
    for mode, dropout in (("none", 0.0), ("none", 0.5), ("full", 0.5), ("selective", 0.5)):
        flags = [f"--lora.dropout={dropout}", f"--activation_checkpoint.mode={mode}"]
        flags += ["--activation_checkpoint.selective_ac_option=op"]
        engine = build(flags=flags)
        torch.manual_seed(5)
        gradients.append(backward_of(engine)[1])
    without, kept, *recomputed = gradients
    assert not all(map(torch.equal, without, kept))
    assert all(all(map(torch.equal, kept, own)) for own in recomputed)
    with engine.eval_mode():
        assert torch.equal(logits(engine), logits(build(adapters=False)))


# Of a block's products wq, wk, wv, wo, w1, w3 and w2, the first, the third and so on are kept.
@pytest.mark.parametrize("targets, n_again", [("wq", 0), ("wq,wk,wv,wo", 4), ("wq,wv,w2", 0)])
def test_selective_checkpointing_keeps_the_layers_that_it_keeps_without_adapters(
    targets, n_again, build
):
    gradients, computed = [], []
    flags = [f"--lora.target_modules={targets}", "--activation_checkpoint.selective_ac_option=op"]
    for mode in ("none", "selective"):
        engine = build(flags=[*flags, f"--activation_checkpoint.mode={mode}"])
        with Operators() as operators:
            gradients.append(backward_of(engine)[1])
        layer = torch.ops.torchtitan.linear_with_low_rank.default
        computed.append(sum(operator is layer for operator, _ in operators.calls))
    assert all(map(torch.equal, *gradients))
    n_layers = 2 * len(targets.split(","))
    assert computed == [n_layers, n_layers + n_again]


# ---- what is refused ----

BAD_SETTINGS = {
    "rank 0": ({"lora.rank": 0}, "lora.rank must be at least 1, got 0"),
    "rank of a pattern": ({"lora.rank_pattern": {"wq": 1.5}},
        "lora.rank_pattern['wq'] must be a whole number, got 1.5"),
    "no target": ({"lora.target_modules": []}, "lora.target_modules holds names of layers"),
    "settings without adapters": ({"model.converters": [], "lora.rank": 4},
        'lora.rank = 4 has no effect without adapters, got model.converters = []; add "lora"'),
    "not last": ({"model.converters": ["lora", "quantize.linear.float8"]},
        'model.converters must name "lora" once and last'),
    "other random numbers": ({"lora.dropout": 0.1, "activation_checkpoint.preserve_rng_state": False},
        "activation_checkpoint.preserve_rng_state = false; set it to true"),
    "no adapters there": ({"lora.adapter_path": "/nowhere"},
        "lora.adapter_path must be a folder in PEFT's format, with adapter_config.json, got '/now"),
    "adapter files without adapters": ({"model.converters": [], "checkpoint.enable": True, "checkpoint.last_save_peft": True},
        "checkpoint.last_save_peft = True has no effect without adapters, got model.converters = []"),
    "adapter files without checkpoints": ({"checkpoint.save_peft_interval": 5},
        "checkpoint.save_peft_interval = 5 needs checkpoint.enable = True, got False"),
    "seed checkpoint": ({"checkpoint.create_seed_checkpoint": True, "checkpoint.enable": True},
        'remove "lora" from model.converters for this run'),
    "4 bits and 8": ({"model.converters": ["quantize.linear.float8", "lora"], "lora.base_format": "nf4"},
        "lora.base_format = 'nf4' excludes other converters, got model.converters = ['quantize.linear.float8'"),
    "base in 4 bits from DCP": ({"lora.base_format": "nf4", "checkpoint.initial_load_path": "/base"},
        "needs a base in Hugging Face files, got checkpoint.initial_load_path = '/base'; export it"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_setting_is_refused_in_one_sentence(case):
    settings, words = BAD_SETTINGS[case]
    config = JobConfig()
    config.model.converters = ["lora"]
    for key, value in settings.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        check_job_config(config)
    assert "\n" not in str(error.value)


BAD_NAMES = {
    "unknown target": ("llama3", ["--lora.target_modules=q_porj"],
        "lora.target_modules takes parts of layers' names (output, w1, w2, w3, wk, wo, wq, wv, and"),
    "the output of tied weights": ("qwen3, tied", ["--lora.target_modules=lm_head"],
        "names the output projection, whose weight is tied to the embedding's in this model"),
    "pattern of no target": ("llama3", ["--lora.target_modules=wq", "--lora.rank_pattern=wk=2"],
        "lora.rank_pattern takes parts of layers' names (wq, and PEFT's names for them), got 'wk'"),
    "adapter of what trains whole": ("llama3", ["--lora.also_train=wq"],
        "lora.also_train names 'wq', but the layer layers.0.attention.wq has an adapter"),
    "experts of gpt-oss": ("gpt_oss", [],
        "experts of GptOssGroupedExperts cannot have adapters; name other layers"),
    "experts that PEFT cannot store": ("llama4", ["--checkpoint.enable", "--checkpoint.last_save_peft"],
        "no place for the adapter of layers.1.moe.experts"),
    "rows that are no whole blocks": ("qwen3 MoE", ["--lora.base_format=nf4"],
        "needs weights whose rows have a multiple of 64 elements, got [8, 64, 32] in layers.0.moe.experts.w2"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_NAMES)
def test_bad_name_is_refused_in_one_sentence(case, build):
    family, flags, words = BAD_NAMES[case]
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        build(family, flags)
    assert "\n" not in str(error.value)


def narrow(name, tensor):
    return name, tensor[:, :32].contiguous() if "q_proj.lora_A" in name else tensor


# case -> flags of the run that writes the file, change of each (name, tensor), words of the message
BAD_FILES = {
    "another rank": (["--lora.rank=2"], None, "has rank 2 in the file and 4 in the model; set lora.rank"),
    "another scale": (["--lora.alpha=5"], None, "set lora.alpha = 5 and lora.use_rslora"),
    "base of another width": ([], narrow,
        "is [4, 32] in the file and [4, 64] in the model: the adapters belong to another base model"),
    "more layers": ([], lambda name, tensor: (name.replace("layers.1", "layers.7"), tensor),
        "the model has no model.layers.7.mlp.down_proj.lora_A.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_is_refused_in_one_sentence(case, build, tmp_path):
    flags, change, words = BAD_FILES[case]
    file = tmp_path / "adapters/adapter_model.safetensors"
    build(flags=flags).save_peft(file.parent)
    if change is not None:
        save_file(dict(change(*item) for item in load_file(file).items()), file)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        build().load_peft(file.parent)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("n_steps_survived", range(3))
def test_writer_that_is_killed_leaves_adapters_whole_or_without_weights(
    build, tmp_path, monkeypatch, n_steps_survived
):
    """Each step of writing changes a name in the folder, with os.replace or os.unlink."""
    folder, survived = tmp_path / "adapters", []
    build().save_peft(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    other = build(flags=["--lora.alpha=3"])

    def killed_after_some(change):
        def changed(*names, **options):
            if len(survived) == n_steps_survived:  # from now on nothing in the folder changes
                raise KeyboardInterrupt
            survived.append(change(*names, **options))

        return changed

    for name in ("replace", "unlink"):
        monkeypatch.setattr(os, name, killed_after_some(getattr(os, name)))
    with pytest.raises(KeyboardInterrupt):
        other.save_peft(folder)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "adapter_model.safetensors" not in after or before.items() <= after.items()


def test_adapters_come_back_from_their_files_bitwise(build, tmp_path):
    engine = build("qwen3 MoE", ["--lora.also_train=norms"])
    train(engine)
    engine.save_peft(tmp_path / "adapters", base_model="some/base")
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    expected = {"base_model_name_or_path": "some/base", "r": 4, "lora_alpha": 16.0}
    assert expected.items() <= config.items()
    before = logits(engine)
    train(engine, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="The adapters in .*file/x could not be written.*NotADir"):
        engine.save_peft(tmp_path / "file/x")
    version = engine.weights_version
    engine.load_peft(tmp_path / "adapters")
    assert torch.equal(logits(engine), before)
    assert engine.weights_version == version + 1
    backward_of(engine)
    engine.load_peft(tmp_path / "adapters")
    with pytest.raises(ValueError, match="optim_step found no gradient on any rank"):
        engine.optim_step()
    assert torch.equal(logits(engine), before)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_backward_keeps_no_numbers_of_weights_in_4_bits(compiled, build):
    flags = ["--lora.base_format=nf4", *["--compile.enable"] * compiled]
    engine, kept, eager = build(flags=flags), [], build(flags=flags[:1])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss, _ = backward_of(engine, n_rows=7)  # 224 tokens: a number that is no size of a weight
    torch.testing.assert_close(loss, backward_of(eager, n_rows=7)[0])
    linear = engine.model_parts[0].layers["0"].feed_forward.w2
    n_stored = linear.weight.numel()
    assert n_stored == linear.in_features * linear.out_features * 36 // 64
    assert n_stored in [t.numel() for t in kept if t.dtype == torch.uint8]
    shapes = {(linear.out_features, linear.in_features), (linear.in_features, linear.out_features)}
    assert not shapes & {tuple(t.shape) for t in kept}
