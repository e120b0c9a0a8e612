"""Distillation by the trainer is a plain loop with two transformers models."""

import pytest

from tests.distillation_jobs import (
    STEPS,
    Recorded,
    curves,
    job,
    make_folders,
    plain_loop,
    train_job_of_page,
)
from torchtitan.config.checks import ConfigError
from torchtitan.trainer import Trainer

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_folders(folder)
    return folder


def load(folder):
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, attn_implementation="eager")


def assert_equal_steps(out, expected):
    found = curves(out)
    assert len(found) == STEPS
    assert found == [pytest.approx(step, rel=1e-5) for step in expected]


@pytest.mark.parametrize("top_k", [0, 8])
@pytest.mark.parametrize("divergence, temperature", [("forward", 1.0), ("reverse", 2.0)])
def test_steps_have_the_losses_of_a_plain_loop(divergence, temperature, top_k, folder, tmp_path):
    weights = {"loss__kl_weight": 0.7, "loss__label_weight": 0.3}
    kind = {"loss__divergence": divergence, "loss__top_k": top_k, "loss__temperature": temperature}
    config = job(folder, tmp_path, **weights, **kind)
    with Trainer(config) as trainer:
        recorded = Recorded(trainer)
        trainer.train()
    models = load(folder / "student"), load(folder / "teacher")
    expected = plain_loop(*models, recorded.steps, config)
    assert any(batch.document_ids.max() > 0 for batch in recorded.steps[0])  # packed documents
    assert_equal_steps(tmp_path, expected)


CHAT_TEMPLATE = """{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}
{{- m.content }}{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"""


def test_config_of_the_page_distils_a_folder_that_transformers_opens(folder, tmp_path):
    (folder / "student/chat_template.jinja").write_text(CHAT_TEMPLATE)
    changes = {"./outputs/distilled": tmp_path, "/models": folder, "/data": folder, "4096": 64}
    changes |= {"top_k = 64": "top_k = 8", '"qwen3"': '"llama3"'}
    saved, tokens, logits = train_job_of_page("distillation", changes, tmp_path)
    assert (load(saved)(tokens).logits - logits).abs().max() <= 0.02 * logits.abs().max()  # bf16


def test_adapters_learn_from_chats_as_with_peft(folder, tmp_path):
    """Also with activation checkpointing, and an adapter on the output projection."""
    peft = pytest.importorskip("peft")
    chats = {"dataset": "chat", "dataset_path": folder / "chats.jsonl"}
    chats["chat_template"] = tmp_path / "template.jinja"
    chats["chat_template"].write_text(CHAT_TEMPLATE)
    settings = {f"training__{key}": value for key, value in chats.items()}
    settings |= {"model__converters": "lora", "activation_checkpoint__mode": "full"}
    settings |= {"lora__target_modules": "q_proj,down_proj,lm_head", "loss__label_weight": 0.5}
    config = job(folder, tmp_path, **settings)
    with Trainer(config) as trainer:
        recorded = Recorded(trainer)
        trainer.load()
        trainer.save_peft(tmp_path / "adapters")
        trainer.train()
    student = load(folder / "student")
    student = peft.PeftModel.from_pretrained(student, tmp_path / "adapters", is_trainable=True)
    expected = plain_loop(student, load(folder / "teacher"), recorded.steps, config)
    assert any((batch.labels == -100).float().mean() > 0.3 for batch in recorded.steps[0])
    assert_equal_steps(tmp_path, expected)


def test_resumed_run_has_the_same_teacher(folder, tmp_path):
    saved = {"checkpoint__enable": True, "checkpoint__no_last_save_model_only": True}
    for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        with Trainer(job(folder, tmp_path / name, training__steps=steps, **saved)) as trainer:
            trainer.train()
    whole, parts = (curves(tmp_path / name) for name in ("whole", "parts"))
    assert len(whole) == 4 and parts == whole


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"teacher": "nowhere"}, "loss.teacher = 'nowhere' cannot score .* nowhere cannot be read"),
        ({"teacher": ""}, "loss.name = 'distillation' needs loss.teacher, the folder of"),
        ({"teacher": "tests/assets/tokenizer"}, "cannot score the job's rows: .*config.json"),
        ({"top_k": 2048}, "logits of 2048 vocabulary entries, .* top_k = 2048"),
        ({"kl_weight": 0}, "loss.kl_weight must be above 0"),
        ({"name": ""}, "loss.teacher = .* has no effect with loss.name = ''"),
    ],
)
def test_bad_setting_is_refused_by_name(settings, message, folder, tmp_path):
    given = {f"loss__{key}": value for key, value in settings.items()}
    with pytest.raises(ConfigError, match=message):
        Trainer(job(folder, tmp_path, **given))
