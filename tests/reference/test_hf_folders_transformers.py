"""Folders as transformers 4 and 5 write them: what is read means the same, and so does what is exported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_hf import tiny_hf_config, tiny_hf_model
from torchtitan.checkpoint.hf_assets import write_model_files
from torchtitan.config.job_config import Checkpoint, JobConfig, Model, Training
from torchtitan.data.tokenizer import HuggingFaceTokenizer, build_hf_tokenizer
from torchtitan.engine import TrainingEngine
from torchtitan.models.hf_config import NOT_READ, from_hf_config, hf_types
from torchtitan.models.hf_fields import ALL_TYPES

transformers = pytest.importorskip("transformers")
CONFIG_MAPPING = transformers.CONFIG_MAPPING
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ASSETS = Path(__file__).parents[1] / "assets/tokenizer"
TOKENS = torch.arange(5, 37)[None]
INDEX = "model.safetensors.index.json"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GPT_OSS = YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def saved(folder, family="llama3", **changes):
    model = tiny_hf_model(family, **changes).eval()
    model.save_pretrained(folder)
    return model


def edit(file, **changes):
    """Change fields of a JSON file; None removes a field."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def job(**sections):
    return JobConfig(
        training=Training(seq_len=32, mixed_precision_param="float32"),
        checkpoint=Checkpoint(**sections.pop("checkpoint", {})),
        **sections,
    )


def logits_of(folder, export=None, **checkpoint):
    """Return the logits of a folder's model, and export it."""
    with TrainingEngine.from_hf(folder, job(checkpoint=checkpoint)) as engine:
        if export is not None:
            engine.save_hf(folder / export)
        return engine.forward_step({"input": TOKENS})[0].clone()


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def opened(folder):
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, attn_implementation="eager").float().eval()


def assert_same_logits(ours, model):
    with torch.no_grad():
        assert (ours - model(TOKENS).logits).abs().max() <= 1e-4


# ---- config.json ----


@pytest.mark.parametrize(("family", "scaling"), [("llama3", LLAMA3), ("qwen3", YARN)])
def test_two_descriptions_of_rope_that_differ_are_refused(family, scaling):
    config = tiny_hf_config(family).to_dict()
    # A copy, because transformers changes it.
    theirs = type(tiny_hf_config(family)).from_dict(config | {"rope_scaling": dict(scaling)})
    assert theirs.rope_parameters["rope_type"] == scaling["rope_type"]  # transformers applies it
    with pytest.raises(ValueError, match="it has rope_scaling = .* but rope_parameters differs"):
        from_hf_config(config | {"rope_scaling": scaling})
    with pytest.raises(ValueError, match="it has rope_theta = 5.0, but the RoPE table has 1000000"):
        from_hf_config(config | {"rope_theta": 5.0})
    same = {"rope_scaling": dict(config["rope_parameters"]), "rope_theta": 1e6}
    assert from_hf_config(config | same) == from_hf_config(config)
    for where in (config, config["rope_parameters"]):
        where["partial_rotary_factor"] = 0.5
        with pytest.raises(ValueError, match=r"partial_rotary_factor = 0.5, but whole heads"):
            from_hf_config(config)
        del where["partial_rotary_factor"]


@pytest.mark.parametrize("model_type", hf_types())
def test_every_field_of_their_config_has_a_row_or_changes_nothing(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {model_type}")
    config = CONFIG_MAPPING[model_type]().to_dict()
    _, hf_type = hf_types()[model_type]
    known = NOT_READ.union(*(row.fields for row in (*ALL_TYPES, *hf_type.rows)))
    of_all = transformers.PretrainedConfig().to_dict()
    acts_in_training_only = {name for name in config if name.endswith(("dropout", "pdrop"))}
    unknown = {name for name in config if name[0] != "_"} - known - set(of_all)
    assert unknown <= acts_in_training_only


def test_flavor_that_computes_something_else_than_the_weights_config_is_refused(tmp_path, caplog):
    folder = str(tmp_path)
    saved(tmp_path, rms_norm_eps=1e-3)
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 64}
    args = sizes | {"hidden_dim": 64, "rope_scaling_args": {"scaling_factor": 1.0}}
    args |= {"rope_theta": 1e6}

    def load(args, **model):
        model = Model(name="llama3", flavor="debugmodel", args=args, **model)
        with TrainingEngine(job(model=model)) as engine:
            engine.load(folder, model_only=True)

    with pytest.raises(ValueError) as error:
        load(args)
    assert f"{folder} has weights of a model with norm_eps = 0.001, not 1e-05" in str(error.value)
    assert f"set model.hf_config = {folder!r}" in str(error.value)
    load(args | {"norm_eps": 1e-3})
    load({}, hf_config=folder)
    load(args | {"norm_eps": 1e-2})  # which model.args says
    assert "has weights of a model" not in caplog.text
    shutil.copytree(folder, tmp_path / "edited")
    edit(tmp_path / "edited/config.json", rms_norm_eps=1e-4)
    load({}, hf_config=str(tmp_path / "edited"))
    assert "norm_eps = 0.001, not 0.0001 (its config.json): the run's values" in caplog.text


# ---- weights ----


def sharded(folder):
    """Divide model.safetensors into two files with an index; return the tensors."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        part = {name: t for name, t in tensors.items() if names[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return tensors


def test_index_names_the_files_of_the_model(tmp_path, caplog):
    model = saved(tmp_path)
    tensors = sharded(tmp_path)
    for name in ("adapter_model.safetensors", "consolidated.safetensors", "old.safetensors"):
        save_file({key: t + 1 for key, t in tensors.items()}, tmp_path / name)
    with caplog.at_level("INFO"):
        assert_same_logits(logits_of(tmp_path), model)
    line = "not read: adapter_model.safetensors, consolidated.safetensors, old.safetensors"
    assert line in caplog.text
    save_file(tensors, tmp_path / "model.safetensors")  # transformers would read this one
    with pytest.raises(ValueError, match="holds two models, in model.safetensors and in the files"):
        logits_of(tmp_path)


def test_output_that_differs_from_the_tied_embedding_is_refused(tmp_path):
    model = saved(tmp_path, "qwen3")
    edit(tmp_path / "config.json", tie_word_embeddings=True)
    assert_same_logits(model(TOKENS).logits, opened(tmp_path))  # transformers keeps the output
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        logits_of(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert_same_logits(logits_of(tmp_path), opened(tmp_path))
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    edit(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"not in the checkpoint: lm_head.*or tie_word_embeddings"):
        logits_of(tmp_path)


QUANTIZED = dict(initial_load_in_hf=True, initial_load_in_hf_quantized=True)


def quantized(tensors):
    result = {}
    for name, tensor in tensors.items():
        result[name] = tensor
        if name.endswith("_proj.weight"):
            scale = tensor.abs().amax() / 448
            result[name] = (tensor / scale).to(torch.float8_e4m3fn)
            result[f"{name}_scale_inv"] = scale.reshape(1, 1)
    return result


def test_quantized_weights_of_one_file_are_read_and_exported_as_what_they_are(tmp_path):
    saved(tmp_path, "deepseek_v3")
    tensors = quantized(load_file(tmp_path / "model.safetensors"))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit(tmp_path / "config.json", quantization_config=fp8, auto_map={"AutoConfig": "c.C"})
    with pytest.raises(ValueError, match="set checkpoint.initial_load_in_hf_quantized = true"):
        logits_of(tmp_path)
    ours = logits_of(tmp_path, export="out", **QUANTIZED)
    content = config_of(tmp_path / "out")
    assert not content.keys() & {"quantization_config", "auto_map"}
    assert content["num_nextn_predict_layers"] == 0
    assert_same_logits(ours, opened(tmp_path / "out"))
    edit(tmp_path / "config.json", quantization_config=fp8 | {"weight_block_size": [1, 128]})
    with pytest.raises(ValueError, match=r"weight_block_size = \[1, 128\], and only square"):
        logits_of(tmp_path, **QUANTIZED)
    edit(tmp_path / "config.json", quantization_config=fp8)
    # A quantized file without a scale, or with a tensor that the model lacks.
    scale = "model.layers.0.mlp.up_proj.weight_scale_inv"
    save_file({n: t for n, t in tensors.items() if n != scale}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="it has no scales for model.layers.0.mlp.up_proj.weight"):
        logits_of(tmp_path, **QUANTIZED)
    save_file(tensors | {"model.extra.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not in the model: model.extra.weight"):
        logits_of(tmp_path, **QUANTIZED)


# ---- parts of a model that are not trained ----

VISION = dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=28,
    patch_size=14, vision_output_dim=16, projector_input_dim=16, projector_output_dim=16,
)  # fmt: skip
LLAMA4 = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, intermediate_size_mlp=64,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    num_local_experts=2, interleave_moe_layer_step=1,
)  # fmt: skip


def with_untrained_parts(folder, kind):
    """Save a model with MTP or a vision tower; return its text model and the untrained tensors."""
    file = folder / "model.safetensors"
    if kind == "vision":
        config = transformers.Llama4Config(text_config=LLAMA4, vision_config=VISION)
        whole = transformers.Llama4ForConditionalGeneration(config).eval()
        whole.save_pretrained(folder)
        model, parts = whole.language_model, load_file(file)
        untrained = {n: t for n, t in parts.items() if not n.startswith("language_model.")}
    else:
        model, parts = saved(folder, "deepseek_v3"), load_file(file)
        layer = {n.replace("s.1.", "s.2."): t + 1 for n, t in parts.items() if "layers.1." in n}
        untrained = layer | {"model.layers.2.eh_proj.weight": torch.randn(32, 64)}
        edit(folder / "config.json", num_nextn_predict_layers=1)
    untrained = {name: t.bfloat16() for name, t in untrained.items()}  # unlike what is exported
    save_file(parts | untrained, file, {"format": "pt"})
    return model, untrained


def exported(folder, choice, to="out"):
    logits_of(folder, export=to, initial_load_in_hf=True, untrained_weights=choice)
    weight_map = json.loads((folder / "out" / INDEX).read_text())["weight_map"]
    files = {name: load_file(folder / "out" / name) for name in set(weight_map.values())}
    return {name: files[file][name] for name, file in weight_map.items()}


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("kind", ["MTP", "vision"])
def test_untrained_parts_are_copied_to_the_export_byte_for_byte(kind, is_sharded, tmp_path):
    model, untrained = with_untrained_parts(tmp_path, kind)
    base = sharded(tmp_path) if is_sharded else load_file(tmp_path / "model.safetensors")
    tensors = exported(tmp_path, "copy")
    assert tensors.keys() == base.keys()
    for name, tensor in untrained.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name
    assert_same_logits(model(TOKENS).logits, opened(tmp_path / "out"))
    if kind == "MTP":
        assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 1
        return
    multimodal = transformers.AutoModelForImageTextToText
    whole, report = multimodal.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_same_logits(model(TOKENS).logits, whole.language_model.float().eval())


def test_config_of_an_export_without_the_vision_tower_describes_the_text_model(tmp_path, caplog):
    model, _ = with_untrained_parts(tmp_path, "vision")
    sharded(tmp_path)
    tensors = exported(tmp_path, "drop")
    assert 'checkpoint.untrained_weights = "copy"' in caplog.text
    assert tensors.keys() == model.state_dict().keys()
    content = config_of(tmp_path / "out")
    assert content["model_type"] == "llama4_text"
    assert content["architectures"] == ["Llama4ForCausalLM"]
    assert not content.keys() & {"text_config", "vision_config"}
    assert_same_logits(model(TOKENS).logits, opened(tmp_path / "out"))


def test_untrained_parts_are_refused_if_the_user_says_so_or_they_cannot_be_copied(tmp_path):
    with_untrained_parts(tmp_path, "MTP")
    with pytest.raises(ValueError, match="2.eh_proj.*; checkpoint.untrained_weights = 'refuse'"):
        exported(tmp_path, "refuse")
    with pytest.raises(ValueError, match="export to another folder"):
        exported(tmp_path, "copy", to=".")
    tensors = quantized(load_file(tmp_path / "model.safetensors"))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="are quantized, and an export is not.*'drop'"):
        logits_of(tmp_path, **QUANTIZED, untrained_weights="copy")


# ---- exports ----


def export_of(folder, **training):
    """Return the folder that a run exports that began from `folder`."""
    out, path = folder / "out", training.get("chat_template")
    config = JobConfig(training=Training(**training), model=Model(hf_assets_path=str(folder)))
    tokenizer, template = build_hf_tokenizer(config), path and Path(path).read_text()
    args = from_hf_config(folder).model_args
    write_model_files(str(out), args, str(folder), torch.float32, tokenizer, template)
    return out


@pytest.fixture
def base(tmp_path):
    """A folder with a config and a tokenizer that ends with one of two special tokens."""
    tiny_hf_config().save_pretrained(tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(ASSETS / "tokenizer.json"), eos_token="<|end_of_text|>"
    )
    tokenizer.save_pretrained(tmp_path)
    old = tokenizer.eos_token_id
    edit(tmp_path / "config.json", eos_token_id=old, bos_token_id=None, pad_token_id=None)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": old, "top_k": 3}))
    (tmp_path / "out").mkdir()
    return tmp_path


def test_export_ends_with_the_token_and_has_the_template_that_were_trained(base):
    template = "{% for m in messages %}<|begin_of_text|>{{ m['content'] }}{% endfor %}"
    (base / "mine.jinja").write_text(template)
    names = HuggingFaceTokenizer(str(base))
    new_token = next(t for t in names.special_tokens if t != "<|end_of_text|>")
    new, old = names.token_to_id(new_token), names.eos_id
    out = export_of(base, eos_token=new_token, chat_template=str(base / "mine.jinja"))
    generation = transformers.GenerationConfig.from_pretrained(out)
    assert (generation.eos_token_id, generation.top_k) == ([new, old], 3)
    assert transformers.AutoConfig.from_pretrained(out).eos_token_id == [new, old]
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert (tokenizer.eos_token, tokenizer.chat_template) == (new_token, template)
    # Without a change of the run, the files' own values stay.
    shutil.rmtree(out), out.mkdir()
    edit(base / "config.json", eos_token_id=[7, old])
    out = export_of(base)
    assert config_of(out)["eos_token_id"] == [7, old]
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == old
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template is None


def test_tokenizer_of_an_export_has_a_class_that_transformers_4_knows(base):
    config = base / "tokenizer_config.json"
    edit(config, tokenizer_class="TokenizersBackend", extra_special_tokens=["<|image|>"])
    before = transformers.AutoTokenizer.from_pretrained(base)
    out = export_of(base)
    written = json.loads((out / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == ["<|image|>"]
    assert "extra_special_tokens" not in written
    after = transformers.AutoTokenizer.from_pretrained(out)
    text = "One <|image|> and <|end_of_text|>two"
    assert after(text).input_ids == before(text).input_ids
    assert after.all_special_ids == before.all_special_ids


# Fields that transformers 4 wrote, in place of those in the second table that 5 writes.
THETA = {"rope_theta": 1e6, "rope_scaling": None}
IN_TABLE = {"rope_type": "default", "rope_theta": 1e6}
OLD_GPT_OSS = {"rope_theta": 150000.0, "rope_scaling": GPT_OSS, "initial_context_length": 16}
SPELLINGS = {
    "llama3": (THETA | {"rope_scaling": LLAMA3}, LLAMA3 | {"rope_theta": 1e6}, {}),
    "qwen3": (THETA, IN_TABLE, {}),
    "qwen3_moe": (THETA | {"num_experts": 4}, IN_TABLE, {"num_local_experts": 4}),
    "deepseek_v3": (THETA, IN_TABLE, {}),
    "gpt_oss": (OLD_GPT_OSS, GPT_OSS | {"rope_theta": 150000.0}, {}),
}


@pytest.mark.parametrize("written_by", [4, 5])
@pytest.mark.parametrize("family", SPELLINGS)
def test_export_has_the_fields_of_its_base_and_those_of_the_other_release(
    family, written_by, tmp_path
):
    four, rope, five = SPELLINGS[family]
    five = five | {"rope_parameters": rope}
    reference = saved(tmp_path, family, rope_parameters=five["rope_parameters"])
    content = config_of(tmp_path)
    assert five.items() <= content.items()  # 5 is installed
    if written_by == 4:
        content = {name: value for name, value in content.items() if name not in five} | four
        (tmp_path / "config.json").write_text(json.dumps(content))
    ours = logits_of(tmp_path, export="out")
    assert_same_logits(ours, reference)
    written = config_of(tmp_path / "out")
    changed = {name for name in content if written.get(name, 0) != content[name]}
    assert changed <= {"num_nextn_predict_layers", "eos_token_id", "bos_token_id"}
    if four["rope_scaling"]:  # 5 takes theta from this table only
        assert four["rope_scaling"].items() <= written["rope_scaling"].items()
    else:
        assert written["rope_scaling"] is None
    known = [name for name in four if name != "rope_scaling" and name in written]
    assert {name: written[name] for name in known}.items() <= four.items() and "rope_theta" in known
    assert_same_logits(logits_of(tmp_path / "out"), reference)
    assert_same_logits(ours, opened(tmp_path / "out"))
