"""The warnings of a resume about settings that differ from the saved run's."""

import json

import pytest

from torchtitan.checkpoint.run_record import (
    check_same_optimizer,
    differences,
    read_record,
    record_of,
)
from torchtitan.config import JobConfig


def config_with(**changes) -> JobConfig:
    config = JobConfig()
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return config


def told(loaded=("optimizer", "lr_scheduler", "dataloader"), **changes) -> list[str]:
    saved = json.loads(json.dumps(record_of(JobConfig(), 8, None)))
    return list(differences(saved, record_of(config_with(**changes), 8, None), loaded))


def test_same_settings_are_not_told():
    assert told() == []


def test_settings_that_came_after_the_checkpoint_are_not_told():
    assert list(differences({}, record_of(JobConfig(), 8, None), ["optimizer"])) == []


@pytest.mark.parametrize(
    ("loaded", "used"),
    [(["optimizer"], "the saved one is used"), (["dataloader"], "this run's is used")],
)
def test_which_side_wins_depends_on_what_is_loaded(loaded, used):
    (text,) = told(loaded, optimizer__beta1=0.8)
    assert text == f"optimizer.beta1 was 0.9 when it was saved and is 0.8 now: {used}"


def test_learning_rate_comes_with_the_schedule():
    for loaded, used in (
        ("lr_scheduler", "the saved one is used"),
        ("optimizer", "this run's is used"),
    ):
        (text,) = told([loaded], optimizer__lr=1.0)
        assert text.startswith("optimizer.lr was ") and text.endswith(used)


def test_each_difference_is_told():
    texts = told(
        lr_scheduler__warmup_steps=7,
        training__dataset="c4",
        training__steps=5,
        training__dtype="bfloat16",
    )
    assert [text.split()[0] for text in texts] == [
        "lr_scheduler.warmup_steps",
        "training.steps",
        "training.dataset",
        "training.dtype",
    ]


def test_other_optimizer_is_an_error_with_both_names():
    saved, own = (record_of(config_with(optimizer__name=n), 8, None) for n in ("AdamW", "Adam"))
    with pytest.raises(ValueError, match="'AdamW', got 'Adam'.*exclude_from_loading"):
        check_same_optimizer(saved, own, "step-4")
    check_same_optimizer(saved, saved, "step-4")
    check_same_optimizer({}, own, "step-4")


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "[" * 10**5, "\\udc80"])
def test_record_that_cannot_be_read_is_left_out_with_a_warning(tmp_path, text, caplog):
    assert read_record(str(tmp_path)) == {}
    (tmp_path / "run.json").write_text(text)
    assert read_record(str(tmp_path)) == {}
    assert "run.json cannot be read" in caplog.text


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


def test_number_of_documents_is_recorded_where_it_is_known():
    assert record_of(JobConfig(), 8, None, 5)["number of documents"] == 5
    assert "number of documents" not in record_of(JobConfig(), 8, None, None)
