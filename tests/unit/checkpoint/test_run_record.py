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
from torchtitan.config.job_config import Checkpoint, MixtureSource
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.rl.job_config import JobConfig as RLConfig
from torchtitan.tools.files import find_shipped

TOKENIZER = find_shipped("tests/assets/tokenizer")


def config_with(**changes) -> JobConfig:
    config = JobConfig()
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return config


ALL = ("optimizer", "lr_scheduler", "dataloader")


@pytest.mark.parametrize(
    ("loaded", "changes", "told"),
    [
        (ALL, {}, []),
        (
            ["optimizer"],
            {"optimizer__beta1": 0.8},
            ["beta1 was 0.9 when .* now: the saved value is"],
        ),
        (
            ["dataloader"],
            {"optimizer__beta1": 0.8},
            ["beta1 was 0.9 .* is 0.8 now: this run's value is"],
        ),
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
    saved = json.loads(json.dumps(record_of(JobConfig(), 8, None)))
    own = record_of(config_with(**changes), 8, None)
    compare_with_saved(saved, own, "step-4", loaded)
    assert len(caplog.messages) == len(told)
    for message, pattern in zip(caplog.messages, told, strict=True):
        assert re.search(pattern, message), message
    compare_with_saved({}, own, "step-4", loaded)  # settings that came after the checkpoint
    assert len(caplog.messages) == len(told)


def resumed(loaded=("optimizer", "dataloader"), allowed=(), saved=None, **changes):
    """Compare a run with `changes` with a saved one, a copy of it with `saved` changes."""
    lora = {"model__converters": ["lora"], "validation__enable": True}
    before, now = (
        record_of(config_with(**lora, **values), 8, None) for values in (saved or {}, changes)
    )
    compare_with_saved(json.loads(json.dumps(before)), now, "step-4", loaded, allowed)


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
    changes = {key.replace(".", "__"): value}
    with pytest.raises(ValueError) as error:
        resumed(**changes)
    assert f"{key} was" in str(error.value)
    assert f"checkpoint.allow_changed = ['{key}']" in str(error.value)
    resumed(allowed=[key], **changes)
    assert f"{key} was" in caplog.text
    resumed(saved=changes, **changes)
    if key.startswith(("training.data", "training.packing", "training.shuffle")):
        resumed(loaded=["optimizer"], **changes)  # the data begin again


def test_settings_are_compared_where_something_reads_them():
    for key, value, reader in (
        ("training.data_seed", 3, {"training__shuffle": True}),
        ("training.too_long", "cut", {"training__dataset": "chat"}),
    ):
        changes = {key.replace(".", "__"): value}
        resumed(**changes)
        with pytest.raises(ValueError, match=f"{key} was"):
            resumed(saved=reader, **reader, **changes)


def test_other_weights_sources_and_chat_templates_are_refused(tmp_path):
    def record(*names, weight=1.0, template="{{ a }}"):
        encode = SimpleNamespace(template=template)
        sources = [
            SimpleNamespace(name="chat", path=f"{tmp_path}/{n}", encode=encode) for n in names
        ]
        mixture = [MixtureSource("chat", str(tmp_path / name), weight) for name in names]
        config = config_with(training__mixture=mixture)
        return record_of(config, 8, None, 5, None, None, sources)

    for name in "ab":
        (tmp_path / name).write_text(f"{name}\n" * 9)
    loaded, saved = ["dataloader"], record("a", "b")
    compare_with_saved(saved, record("a", "b"), "step-4", loaded, ())
    for other, key in (
        (record("b", "a"), "training.mixture"),
        (record("a", "b", weight=2.0), "training.mixture"),
        (record("a", "b", template="{{ b }}"), "training.chat_template"),
    ):
        with pytest.raises(ValueError, match=f"from step-4: content of {key} was [^;]* now. The"):
            compare_with_saved(saved, other, "step-4", loaded, ())


def test_other_optimizer_and_wrong_names_of_settings_to_allow_are_refused():
    saved, own = (record_of(config_with(optimizer__name=n), 8, None) for n in ("AdamW", "Adam"))
    with pytest.raises(ValueError, match="'AdamW', got 'Adam'.*exclude_from_loading"):
        compare_with_saved(saved, own, "step-4", ["optimizer"])
    compare_with_saved(saved, own, "step-4", ["dataloader"])
    compare_with_saved({}, own, "step-4", ["optimizer"])
    with pytest.raises(ValueError, match="allow_changed .* 'lora.alfa', did you mean 'lora.alpha'"):
        record_of(config_with(checkpoint__allow_changed=["lora.alfa"]), 8, None)


def test_other_tokenizer_is_refused(tmp_path):
    """Its vocabulary may be the same: here the end-of-text token differs, or the normalizer."""
    shutil.copytree(TOKENIZER, tmp_path / "copy")
    file = tmp_path / "copy/tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "NFC"}}))
    saved, same, ends, normalizes = (
        record_of(JobConfig(), 8, HuggingFaceTokenizer(str(folder), eos_token=eos))
        for folder, eos in (
            (TOKENIZER, None),
            (TOKENIZER, None),
            (TOKENIZER, "<|pad|>"),
            (tmp_path / "copy", None),
        )
    )
    compare_with_saved(saved, same, "step-4", ["dataloader"], ())
    for other in (ends, normalizes):
        with pytest.raises(ValueError, match=r"content of model.hf_assets_path was .*allow_ch"):
            compare_with_saved(saved, other, "step-4", ["dataloader"], ())
        compare_with_saved(saved, other, "step-4", ["dataloader"], ["model.hf_assets_path"])


def test_other_task_of_rl_is_refused(tmp_path, caplog):
    for name in "ab":
        (tmp_path / name).write_text(name)

    def record(template="{{ a }}", **changes):
        rl = RLConfig().rl
        rl.task.path = str(tmp_path / "a")
        for key, value in changes.items():
            *sections, name = key.split("__")
            setattr(getattr(rl, sections[0]) if sections else rl, name, value)
        task = SimpleNamespace(chat=SimpleNamespace(source=template), tokenizer=None)
        return json.loads(json.dumps(record_of_task(rl, task)))

    saved = record()
    (tmp_path / "moved").write_text("a")
    free = {"task__path": str(tmp_path / "moved"), "task__reward_processes": 2, "eval_every": 5}
    compare_with_saved(saved, record(**free), "step-4", (), ())
    assert (
        "rl.eval_every was 0 when it was saved and is 5 now: this run's value is used"
        in caplog.text
    )
    for key, changed in {
        "content of rl.task.path": record(task__path=str(tmp_path / "b")),
        "content of rl.task.chat_template": record("{{ b }}"),
        "rl.task.reward_fn": record(task__reward_fn="rewards:other"),
        "rl.task.tools": record(task__tools=["tools:add"]),
        "rl.sampling.temperature": record(sampling__temperature=0.5),
        "rl.seed": record(seed=3),
    }.items():
        with pytest.raises(ValueError, match=f"from step-4: {key} was [^;]* now. The"):
            compare_with_saved(saved, changed, "step-4", (), ())
        allowed = [key.removeprefix("content of ")]
        compare_with_saved(saved, changed, "step-4", (), allowed)
        record_of(RLConfig(checkpoint=Checkpoint(allow_changed=allowed)), 8, None)


def test_run_continues_with_the_content_of_its_data_wherever_that_lies(tmp_path, own_flavors):
    """Not with as many other documents, or another epsilon or base of the model's positions."""
    from tests.reliability.jobs import TINY_JOB
    from torchtitan.config import ConfigManager
    from torchtitan.trainer import Trainer

    lines = [json.dumps({"text": f"story {i} of the fox and the crow " * 9}) for i in range(40)]
    for name, text in (("data", lines), ("other", lines[::-1])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(text))

    def run(steps, data="data", *flags):
        flags = [*TINY_JOB, f"--training.dataset_path={tmp_path}/{data}.jsonl", *flags]
        flags += [f"--job.dump_folder={tmp_path}", f"--training.steps={steps}"]
        flags += ["--checkpoint.enable", "--checkpoint.no-last-save-model-only"]
        with Trainer(ConfigManager().parse_args(flags)) as trainer:
            trainer.train()

    run(2)
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / "data.jsonl", tmp_path / "copy")  # with another time
    run(3, "copy/data")
    for flags, key in (
        (["other"], "content of training.dataset_path"),
        (["data", "--model.args", "norm_eps=1e-3"], "model.args.norm_eps"),
        (["data", "--model.args", "rope_theta=100"], "model.args.rope_theta"),
        (["data", "--training.packing=fit"], "training.packing"),
    ):
        with pytest.raises(ValueError, match=f"cannot continue from .*step-3: {key} was"):
            run(4, *flags)
    run(4, "other", "--checkpoint.allow_changed=training.dataset_path")


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
    trainer = make_trainer(str(tmp_path), [*flags, full, "--training.steps=4"])
    trainer.train()
    trainer.close()
    flags.append(f"--checkpoint.exclude_from_loading={excluded}")
    trainer = make_trainer(str(tmp_path), [*flags, "--training.steps=8"])
    rates, (optimizer,) = [], trainer.optimizers.optimizers
    trainer.optimizers.register_step_pre_hook(
        lambda *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    logged = []
    trainer.metrics_processor.log = lambda *_, extra_metrics: logged.append(extra_metrics["lr"])
    trainer.train()
    trainer.close()
    assert rates[0] == logged[0] == pytest.approx(rate)
    assert rates == logged
