"""transformers loads a folder that the engine exports as a model and a tokenizer."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from torchtitan.checkpoint.hf_assets import write_model_files
from torchtitan.config.job_config import Job, JobConfig, Model, Training
from torchtitan.data.tokenizer import HuggingFaceTokenizer, build_hf_tokenizer
from torchtitan.engine import TrainingEngine
from torchtitan.models.hf_config import differing, from_hf_config, to_hf_config
from torchtitan.protocols.train_spec import get_train_spec

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ASSETS = Path(__file__).parents[1] / "assets/tokenizer"
TEXT = "The engine's layout changes the speed,\n  and nothing else: 1,234 <tokens>."


def job(tmp_path, assets=ASSETS, **model):
    return JobConfig(
        job=Job(dump_folder=str(tmp_path / "run")),
        model=Model(hf_assets_path=str(assets), **model),
        training=Training(seq_len=32, mixed_precision_param="float32"),
    )


def test_scaled_rope_of_few_positions_is_read_without_a_warning_and_with_equal_frequencies(caplog):
    args = dataclasses.replace(get_train_spec("llama3").model_args["debugmodel"], max_seq_len=96)
    config = to_hf_config(args)
    published = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0}
    published |= {"rope_type": "llama3", "high_freq_factor": 4.0, "factor": 8.0}
    frequencies = []
    for scaling in (published, config["rope_scaling"]):
        caplog.clear()
        theirs = transformers.LlamaConfig(**config | {"rope_scaling": scaling})
        frequencies.append(transformers.LlamaModel(theirs).rotary_emb.inv_freq)
        is_warned = "original_max_position_embeddings" in caplog.text
        assert is_warned == (scaling is published)
    assert torch.equal(*frequencies)
    assert config["max_position_embeddings"] == 96
    assert not differing(from_hf_config(config).model_args, args)


def test_value_head_is_exported_as_a_token_classifier(tmp_path):
    with TrainingEngine(job(tmp_path, value_head=True)) as engine:
        engine.save_hf(tmp_path / "export", dtype=torch.bfloat16)
        engine.load(tmp_path / "export", model_only=True)  # the rounded weights
        tokens = torch.randint(0, 2000, (2, 32))
        (ours,) = engine.forward_step({"input": tokens})
    model = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "export")
    assert model.dtype == torch.bfloat16  # as the files have it
    with torch.no_grad():
        assert (model.float().eval()(tokens).logits - ours).abs().max() <= 1e-5


@pytest.mark.parametrize("files", ["tokenizer.json alone", "vocabulary and merges"])
def test_named_end_of_text_token_reaches_the_exported_tokenizer(tmp_path, files, caplog):
    assets, export = tmp_path / "assets", tmp_path / "export"
    assets.mkdir(), export.mkdir()
    if files == "tokenizer.json alone":
        shutil.copy(ASSETS / "tokenizer.json", assets)
        end = "<|end_of_text|>"
    else:
        model = json.loads((ASSETS / "tokenizer.json").read_text())["model"]
        (assets / "vocab.json").write_text(json.dumps(model["vocab"]))
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        (assets / "merges.txt").write_text("\n".join(merges))
        end = "!"
    config = job(tmp_path, assets)
    build_hf_tokenizer(config)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "set training.eos_token" in warning
    config.training.eos_token = "<|stop|>"
    with pytest.raises(ValueError, match=r"training.eos_token .* got '<\|stop\|>'; special tokens"):
        build_hf_tokenizer(config)
    config.training.eos_token = end
    tokenizer = build_hf_tokenizer(config)
    assert tokenizer.encode(TEXT, add_eos=True)[-1] == tokenizer.token_to_id(end)
    args = get_train_spec("llama3").model_args["debugmodel"]
    write_model_files(str(export), args, str(assets), torch.float32, tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(export)
    assert theirs(TEXT).input_ids == tokenizer.encode(TEXT)
    assert (theirs.eos_token, theirs.eos_token_id) == (end, tokenizer.eos_id)
    assert transformers.AutoConfig.from_pretrained(export).eos_token_id == tokenizer.eos_id


def test_args_that_hugging_face_has_no_model_for_are_named():
    args = get_train_spec("qwen3").model_args["debugmodel"]
    with pytest.raises(ValueError, match="qwen2 cannot express qkv_bias = False"):
        to_hf_config(dataclasses.replace(args, qk_norm=False))


def test_files_that_the_export_folder_has_already_are_kept(tmp_path):
    export = tmp_path / "export"
    shutil.copytree(ASSETS, export)
    args = get_train_spec("llama3").model_args["debugmodel"]
    own = to_hf_config(args) | {"my_field": 1}
    (export / "config.json").write_text(json.dumps(own))
    (export / "tokenizer_config.json").write_text('{"eos_token": "<|image|>"}')
    write_model_files(str(export), args, str(ASSETS), torch.bfloat16)
    assert (export / "tokenizer_config.json").read_text() == '{"eos_token": "<|image|>"}'
    kept = json.loads((export / "config.json").read_text())
    end = HuggingFaceTokenizer(str(export)).eos_id
    assert kept == own | {"torch_dtype": "bfloat16", "eos_token_id": end}
    other = dataclasses.replace(args, n_layers=3)
    write_model_files(str(export), other, str(ASSETS), torch.bfloat16)
    assert json.loads((export / "config.json").read_text())["num_hidden_layers"] == 3
