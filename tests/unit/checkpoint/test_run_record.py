"""Settings of a resumed run that differ from the saved run's."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest

from torchtitan.checkpoint.run_record import (
    compare_with_saved,
    read_record,
    record_of,
    record_of_task,
)
from torchtitan.config import JobConfig
from torchtitan.config.job_config import Checkpoint, MixtureSource, ParameterGroup
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.rl.job_config import JobConfig as RLConfig
from torchtitan.tools.files import find_shipped

TOKENIZER = find_shipped("tests/assets/tokenizer")


def record(tokenizer=None, **changes) -> dict:
    """Of the default config with `changes`; section__key stands for section.key."""
    config = JobConfig()
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return record_of(config, 8, tokenizer)


def compare(saved, own, loaded=("dataloader",), allowed=()):
    compare_with_saved(json.loads(json.dumps(saved)), own, "step-4", loaded, allowed)


def assert_refused(key, saved, own, loaded=("dataloader",)):
    """Unless the setting is allowed."""
    name = key.removeprefix("content of ")
    message = f"from step-4: {key} was [^;]* now. The.*checkpoint.allow_changed = .'{name}'."
    with pytest.raises(ValueError, match=message):
        compare(saved, own, loaded)
    compare(saved, own, loaded, [name])


ALL = ("optimizer", "lr_scheduler", "dataloader")


@pytest.mark.parametrize(
    ("loaded", "changes", "told"),
    [
        (ALL, {}, []),
        (["optimizer"], {"optimizer__beta1": 0.8}, ["beta1 was 0.9 .* now: the saved value is"]),
        (["dataloader"], {"optimizer__beta1": 0.8}, ["is 0.8 now: this run's value is"]),
        (["lr_scheduler"], {"optimizer__lr": 1.0}, ["optimizer.lr was .* the saved value is used"]),
        (["optimizer"], {"optimizer__lr": 1.0}, ["optimizer.lr was .* this run's value is used"]),
        (
            ALL,
            {"lr_scheduler__warmup_steps": 7, "training__steps": 5, "training__dtype": "bfloat16"},
            ["lr_scheduler.warmup_steps was", "training.steps was", "training.dtype was"],
        ),
    ],
)
def test_each_difference_is_told_with_the_value_that_is_used(loaded, changes, told, caplog):
    own = record(**changes)
    compare(record(), own, loaded)
    for message, pattern in zip(caplog.messages, told, strict=True):
        assert re.search(pattern, message), message
    compare({}, own, loaded)  # settings that came after the checkpoint
    assert len(caplog.messages) == len(told)


LORA = {"model__converters": ["lora"], "validation__enable": True}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora.alpha", 32.0), ("lora.use_rslora", True), ("lora.alpha_pattern", {"q_proj": 4}),
        ("lora.dropout", 0.1), ("training.restart_positions", False),
        ("training.mask_boundary_loss", True), ("training.dataset", "local"),
        ("training.packing", "fit"), ("training.shuffle", True), ("training.eos_token", "x"),
        ("validation.dataset", "local"),
    ],
)  # fmt: skip
def test_other_meaning_is_refused_with_the_setting_that_allows_it(key, value, caplog):
    saved, own = record(**LORA), record(**LORA, **{key.replace(".", "__"): value})
    assert_refused(key, saved, own, ["optimizer", "dataloader"])
    assert f"{key} was" in caplog.text
    compare(own, own)
    if key.startswith(("training.data", "training.packing", "training.shuffle")):
        compare(saved, own, ["optimizer"])  # the data begin again


def test_settings_are_compared_where_something_reads_them():
    for key, value, reader in (
        ("training.data_seed", 3, {"training__shuffle": True}),
        ("training.too_long", "cut", {"training__dataset": "chat"}),
    ):
        changes = {key.replace(".", "__"): value}
        compare(record(), record(**changes))
        assert_refused(key, record(**reader), record(**reader, **changes))


def test_other_weights_sources_and_chat_templates_are_refused(tmp_path):
    def of_mixture(*names, weight=1.0, template="{{ a }}"):
        paths, encode = [f"{tmp_path}/{name}" for name in names], SimpleNamespace(template=template)
        sources = [SimpleNamespace(name="chat", path=path, encode=encode) for path in paths]
        config = JobConfig()
        config.training.mixture = [MixtureSource("chat", path, weight) for path in paths]
        return record_of(config, 8, None, 5, None, None, sources)

    for name in ("a", "b", "moved/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name[-1]}\n" * 9)
    saved = of_mixture("a", "b")
    compare(saved, of_mixture("moved/a", "b"))
    for other, key in (
        (of_mixture("b", "a"), "training.mixture"),
        (of_mixture("a", "b", weight=2.0), "training.mixture"),
        (of_mixture("a", "b", template="{{ b }}"), "training.chat_template"),
    ):
        assert_refused(f"content of {key}", saved, other)


def test_other_optimizer_and_wrong_names_of_settings_to_allow_are_refused():
    saved, own = (record(optimizer__name=name) for name in ("AdamW", "Adam"))
    with pytest.raises(ValueError, match="'AdamW', got 'Adam'.*exclude_from_loading"):
        compare(saved, own, ["optimizer"])
    compare(saved, own)
    compare({}, own, ["optimizer"])
    saved = record(optimizer__groups=[ParameterGroup(pattern="norm")])
    with pytest.raises(ValueError, match="patterns of optimizer.groups.*norm.*exclude"):
        compare(saved, record(), ["optimizer"])
    with pytest.raises(ValueError, match="allow_changed .* 'lora.alfa', did you mean 'lora.alpha'"):
        record(checkpoint__allow_changed=["lora.alfa"])


def test_other_tokenizer_is_refused(tmp_path):
    """Its vocabulary may be the same: here the end-of-text token differs, or the normalizer."""
    shutil.copytree(TOKENIZER, tmp_path / "copy")
    file = tmp_path / "copy/tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "NFC"}}))

    def of_tokenizer(folder=TOKENIZER, eos_token=None):
        return record(HuggingFaceTokenizer(str(folder), eos_token=eos_token))

    compare(of_tokenizer(), of_tokenizer())
    for other in (of_tokenizer(eos_token="<|pad|>"), of_tokenizer(tmp_path / "copy")):
        assert_refused("content of model.hf_assets_path", of_tokenizer(), other)


def test_other_task_of_rl_is_refused(tmp_path, caplog):
    for name in ("a", "b", "moved"):
        (tmp_path / name).write_text(name.replace("moved", "a"))

    def of_task(template="{{ a }}", data="a", **changes):
        rl = RLConfig().rl
        rl.task.path = str(tmp_path / data)
        for key, value in changes.items():
            *sections, name = key.split("__")
            setattr(getattr(rl, sections[0]) if sections else rl, name, value)
        task = SimpleNamespace(chat=SimpleNamespace(source=template), tokenizer=None)
        return record_of_task(rl, task)

    saved = of_task()
    compare(saved, of_task(data="moved", task__reward_processes=2, eval_every=5), ())
    told = "rl.eval_every was 0 when it was saved and is 5 now: this run's value is used"
    assert told in caplog.text
    for key, changed in {
        "content of rl.task.path": of_task(data="b"),
        "content of rl.task.chat_template": of_task("{{ b }}"),
        "rl.task.reward_fn": of_task(task__reward_fn="rewards:other"),
        "rl.task.tools": of_task(task__tools=["tools:add"]),
        "rl.sampling.temperature": of_task(sampling__temperature=0.5),
        "rl.seed": of_task(seed=3),
    }.items():
        assert_refused(key, saved, changed, ())
        allowed = [key.removeprefix("content of ")]
        record_of(RLConfig(checkpoint=Checkpoint(allow_changed=allowed)), 8, None)


@pytest.mark.parametrize("text", ["[1, 2]", "[" * 10**5])
def test_record_that_cannot_be_read_is_left_out_with_a_warning(tmp_path, text, caplog):
    assert read_record(str(tmp_path)) == {}
    (tmp_path / "run.json").write_text(text)
    assert read_record(str(tmp_path)) == {}
    assert "not compared with the saved ones" in caplog.text and "run.json" in caplog.text


@pytest.mark.parametrize(
    ("excluded", "rate"),
    # Warm-up to 1e-3 over 5 steps, then decay. Step 5 has the peak; if the schedule begins again,
    # step 5 is step 1 of the warm-up.
    [("optimizer", 1e-3), ("lr_scheduler", 2e-4)],
)
def test_first_step_of_a_continued_run_has_the_rate_of_its_own_schedule(tmp_path, excluded, rate):
    from tests.distributed.training_runs import make_trainer

    flags = ["--training.local_batch_size=1", "--checkpoint.enable"]
    full = "--checkpoint.no-last-save-model-only"
    with make_trainer(str(tmp_path), [*flags, full, "--training.steps=4"]) as trainer:
        trainer.train()
    flags += [f"--checkpoint.exclude_from_loading={excluded}", "--training.steps=8"]
    with make_trainer(str(tmp_path), flags) as trainer:
        rates, logged, (optimizer,) = [], [], trainer.optimizers.optimizers
        trainer.optimizers.register_step_pre_hook(
            lambda *_: rates.append(optimizer.param_groups[0]["lr"])
        )
        trainer.metrics_processor.log = lambda *_, extra_metrics: logged.append(extra_metrics["lr"])
        trainer.train()
    assert rates[0] == logged[0] == pytest.approx(rate)
    assert rates == logged
