"""A value head in place of the output: the model, its files, and what is refused."""

import dataclasses
import json
import logging
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.models.tiny import sized
from torchtitan.config import ConfigManager
from torchtitan.config.checks import ConfigError
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.engine import TrainingEngine
from torchtitan.job import resolve_job
from torchtitan.loss.cross_entropy import build_mse_loss
from torchtitan.loss.logprobs import TokenLogProbs
from torchtitan.models.hf_config import from_hf_config, main
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.protocols import train_spec as train_spec_module
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.testing.tiny_jobs import add_tiny_flavors, tiny_job

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.long]
HEAD = {"score.weight": (1, 32), "score.bias": (1,)}
TOKENS = torch.arange(24).view(2, 12)


def tiny_value_model(seed=0, **changes):
    model = Transformer(sized(TransformerModelArgs, n_kv_heads=2, **{"value_head": True} | changes))
    with torch.no_grad(), seeded_init(model, seed):
        model.init_weights()
    return model


@pytest.fixture(autouse=True)
def tiny_flavors():
    with patch.dict(qwen3_args):
        add_tiny_flavors()
        yield


def make_engine(folder, flavor="tiny_tied", value_head=True, **sections):
    model = {"value_head": value_head}
    return TrainingEngine(tiny_job(str(folder), flavor, "sdpa", "causal", model=model, **sections))


def squared(values, labels, batch):
    return values.square().sum()


def step(engine, **options):
    return engine.forward_backward_step(
        input_dict={"input": TOKENS}, labels=TOKENS, global_valid_tokens=24, **options
    )


# ---- the model ----


@pytest.mark.parametrize("family", ["llama3", "qwen3", "deepseek_v3", "llama4", "gpt_oss"])
def test_every_family_gives_one_value_per_token(family):
    spec = get_train_spec(family)
    args = dataclasses.replace(spec.model_args["debugmodel"], value_head=True, max_seq_len=64)
    model = spec.model_cls(args)
    with torch.no_grad():
        model.init_weights()
        values = model(TOKENS, attention_masks=torch.ones_like(TOKENS))
    assert values.shape == (2, 12, 1) and values.std() > 0
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["score.weight"] == (1, args.dim) and shapes["score.bias"] == (1,)
    assert not [name for name in shapes if name.startswith("output")]


def test_initial_head_is_that_of_transformers_and_changes_no_other_weight():
    wide = tiny_value_model(dim=1024, hidden_dim=16, n_layers=1)
    assert wide.score.bias.item() == 0
    assert wide.score.weight.std().item() == pytest.approx(0.02, rel=0.1)  # of 1024 draws
    weights = [tiny_value_model(seed).score.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    with_output = tiny_value_model(value_head=False).state_dict()
    ours = tiny_value_model().state_dict()
    assert ours.keys() - with_output.keys() == HEAD.keys()
    assert with_output.keys() - ours.keys() == {"output.weight"}
    assert all(torch.equal(ours[name], with_output[name]) for name in ours.keys() - HEAD.keys())


# ---- Hugging Face files ----


def hf_folder(tmp_path, changes=(), **options):
    """Write the Hugging Face weights of an engine with another seed; return (folder, weights)."""
    with make_engine(tmp_path, seed=7, **options) as engine:
        files = {
            name: t.clone(memory_format=torch.contiguous_format)
            for name, t in engine.iter_hf_weights()
        }
    files.update(changes)
    (tmp_path / "hf").mkdir()
    save_file(files, tmp_path / "hf/model.safetensors")
    return str(tmp_path / "hf"), files


def weights_of(engine):
    return {name: p.detach().clone() for name, p in engine.model_parts[0].named_parameters()}


@pytest.mark.parametrize("flavor", ["tiny", "tiny_tied"])
def test_language_models_files_give_all_but_the_head(tmp_path, caplog, flavor):
    folder, files = hf_folder(tmp_path, flavor=flavor, value_head=False)
    with make_engine(tmp_path, flavor) as engine, caplog.at_level(logging.INFO):
        initial = weights_of(engine)
        engine.load(folder)
        loaded = weights_of(engine)
        back = dict(engine.iter_hf_weights())
        assert f"Not in {folder}, so left unchanged: score.bias, score.weight" in caplog.text
        assert ("not read: lm_head.weight" in caplog.text) == ("lm_head.weight" in files)
        for name in HEAD:
            assert torch.equal(loaded[name], initial[name])
        assert back.keys() == files.keys() - {"lm_head.weight"} | HEAD.keys()
        assert all(torch.equal(back[name], files[name]) for name in back.keys() - HEAD.keys())


def test_files_with_two_labels_are_refused(tmp_path):
    two = {"score.weight": torch.ones(2, 32), "score.bias": torch.ones(2)}
    folder, _ = hf_folder(tmp_path, two)
    words = r"score.bias: saved \[2\], model \[1\]"
    with make_engine(tmp_path) as engine, pytest.raises(ValueError, match=words):
        engine.load(folder)


def test_dcp_checkpoint_loads_in_a_value_model_and_only_there(tmp_path):
    for name in ("logits", "values"):
        with make_engine(tmp_path, seed=7, value_head=name == "values") as engine:
            engine.save(str(tmp_path / name))
            expected = weights_of(engine)
    with make_engine(tmp_path) as engine:
        engine.load(str(tmp_path / "values"))
        loaded = weights_of(engine)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
        with pytest.raises(ValueError, match="qwen3 tiny_tied with a value head, .* score.weight"):
            engine.load(str(tmp_path / "logits"))


CLASSIFIER = dict(
    model_type="llama", architectures=["LlamaForTokenClassification"], id2label={"0": "LABEL_0"},
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=64, rms_norm_eps=1e-05, rope_theta=500000.0,
    max_position_embeddings=128, tie_word_embeddings=True,
)  # fmt: skip


def test_config_of_a_classifier_makes_args_with_a_value_head(tmp_path, monkeypatch, capsys):
    args = from_hf_config(CLASSIFIER).model_args
    assert (args.value_head, args.enable_weight_tying) == (True, False)
    reward = CLASSIFIER | {"architectures": ["LlamaForSequenceClassification"]}
    assert from_hf_config(reward).model_args.value_head
    language = from_hf_config(CLASSIFIER | {"architectures": ["LlamaForCausalLM"]}).model_args
    assert (language.value_head, language.enable_weight_tying) == (False, True)
    # A tied flavor is found, too.
    flavors = get_train_spec("llama3").model_args
    monkeypatch.setitem(flavors, "of this size", language)
    assert from_hf_config(CLASSIFIER).flavor == "of this size"
    (tmp_path / "config.json").write_text(json.dumps(CLASSIFIER))
    monkeypatch.setattr("sys.argv", ["hf_config", str(tmp_path)])
    main()
    assert "head: one value per token, model.value_head = true" in capsys.readouterr().out


def test_config_with_several_labels_is_refused():
    two, three = {"id2label": {"0": "no", "1": "yes"}}, {"id2label": None, "num_labels": 3}
    for labels in (two, three, {"id2label": None}):
        with pytest.raises(ValueError, match=r"needs one label, not \d; .* num_labels = 1"):
            from_hf_config(CLASSIFIER | labels)
    assert from_hf_config(CLASSIFIER | {"id2label": None, "num_labels": 1}).model_args.value_head


# ---- what is refused ----


def test_default_loss_and_heads_are_refused_and_the_engine_goes_on(tmp_path):
    with make_engine(tmp_path) as engine:
        words = "no logits for a head or the default loss; leave head out, and give a loss_fn"
        with pytest.raises(ValueError, match=words):
            step(engine)
        with pytest.raises(ValueError, match="leave head out"):
            step(engine, loss_fn=squared, head=TokenLogProbs())
        with pytest.raises(ValueError, match="leave head out"):
            engine.forward_step([{"input": TOKENS, "labels": TOKENS}], head=TokenLogProbs())
        assert step(engine, loss_fn=squared) > 0
        with pytest.raises(ValueError, match="call the model without head"):
            engine.model_parts[0](TOKENS, head=TokenLogProbs())


def test_training_on_text_is_refused_unless_the_spec_has_another_loss(monkeypatch):
    flags = ["--model.value_head", "--model.name=qwen3", "--model.flavor=debugmodel"]
    config = ConfigManager().parse_args(flags)
    with pytest.raises(ConfigError, match="_head = True .* train with an engine and a loss_fn"):
        resolve_job(config)
    resolve_job(config, builds_data=False)
    spec = get_train_spec("qwen3")
    for changes in ({"build_loss_fn": build_mse_loss}, {"build_dataloader_fn": None}):
        changed = dataclasses.replace(spec, **changes)
        monkeypatch.setitem(train_spec_module._extra_train_specs, "qwen3", changed)
        resolve_job(config)
