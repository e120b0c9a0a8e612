"""A setting that nothing reads under the rest of the config is named once."""

import copy
import sys
from pathlib import Path
from typing import get_args, get_origin

import pytest

import torchtitan
from tests.reliability.jobs import flags_in
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config.checks import check_job_config
from torchtitan.config.checks.common import problem_in, value_of
from torchtitan.config.checks.unused import tell_settings_without_effect, without_effect
from torchtitan.config.fields import settings_of
from torchtitan.train import Trainer

PACKAGE = str(Path(torchtitan.__file__).parent)
# Unread in the run below, and not without effect.
READ_ELSEWHERE = {
    "job.config_file": "by the parser",
    "job.print_config": "by the command line",
    "job.save_config_file": "by the command line",
    "job.stopped_exit_code": "by the command line",
    "job.custom_config_module": "by the parser",
    "model.tokenizer_path": "by the parser, for which it is an old name",
    "experimental.custom_args_module": "by the parser, for which it is an old name",
    "memory_estimation.enable": "by the command line",
    "training.mixed_precision_reduce": "has one value only",
    "training.dataloader.num_workers": "as a part of its section",
    "training.dataloader.pin_memory": "as a part of its section",
    "parallelism.fsdp_register_buffers": "of FSDP, on more than one rank",
    "comm.stuck_rank_seconds": "on more than one rank",
    "comm.slow_step_factor": "on more than one rank",
    "comm.save_traces_folder": "with NCCL",
    "comm.save_traces_file_prefix": "with NCCL",
    "debug.moe_force_load_balance": "by models with experts",
}
ANOTHER = {int: 23, float: 0.3, str: "other", list: ["other"], dict: {"other": 1}}


def another(value, annotation):
    """Return a value of a setting that is not the default, though perhaps one that is refused."""
    if isinstance(value, bool):
        return not value
    kinds = [get_origin(kind) or kind for kind in get_args(annotation) or [annotation]]
    kind = next((kind for kind in kinds if kind in ANOTHER), str)
    return ANOTHER[kind if value is None else type(value)]


def section_of(config, key):
    return value_of(config, key.rpartition(".")[0])


def set_value(config, key, value):
    setattr(section_of(config, key), key.rpartition(".")[2], value)


def tiny_job(folder):
    settings = flags_in(f"""
        job.dump_folder={folder} training.seq_len=16 training.steps=2 training.local_batch_size=1
        training.mixed_precision_param=float32 activation_checkpoint.mode=none
    """)
    return ConfigManager().parse_args([*settings, "--model.args=dim=32, n_layers=1, n_heads=2"])


@pytest.mark.long
def test_each_key_that_a_run_does_not_read_is_named_when_it_is_changed(tmp_path, monkeypatch):
    read = set()

    def noting(self, name):
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith(PACKAGE) and not caller.startswith(f"{PACKAGE}/config"):
            read.add((type(self), name))
        return object.__getattribute__(self, name)

    for kind in {type(section_of(JobConfig(), key)) for key, *_ in settings_of(JobConfig())}:
        monkeypatch.setattr(kind, "__getattribute__", noting)
    trainer = Trainer(tiny_job(tmp_path))
    trainer.train()
    trainer.close()
    monkeypatch.undo()

    silent, job = [], tiny_job(tmp_path)
    for key, value, annotation, _ in settings_of(JobConfig()):
        if (type(section_of(job, key)), key.split(".")[-1]) in read or key in READ_ELSEWHERE:
            continue
        set_value(config := copy.deepcopy(job), key, another(value, annotation))
        is_refused = problem_in(check_job_config, config, 1)
        if key not in without_effect(config) and not is_refused:
            silent.append(key)
    assert not silent


@pytest.mark.parametrize(
    ("key", "value", "needed", "switch"),
    [
        ("checkpoint.interval", 7, "checkpoint.enable", True),
        ("training.data_seed", 7, "training.shuffle", True),
        ("validation.dataloader.num_workers", 1, "validation.enable", True),
        ("quantize.linear.mx.recipe_name", "x", "model.converters", ["quantize.linear.mx"]),
        ("checkpoint.verify_on_load", False, "checkpoint.initial_load_path", "somewhere"),
    ],
)
def test_log_names_key_and_need(key, value, needed, switch, caplog):
    caplog.set_level("INFO")
    config = JobConfig()
    tell_settings_without_effect(config)
    assert not caplog.records
    set_value(config, key, value)
    tell_settings_without_effect(config)
    (record,) = caplog.records
    assert key in record.getMessage() and needed.split(".")[-1] in record.getMessage()
    set_value(config, needed, switch)
    assert not without_effect(config)


def test_export_of_a_run_that_saves_nothing_is_without_effect_and_not_refused():
    config = JobConfig()
    config.checkpoint.last_save_in_hf, config.checkpoint.last_save_model_only = True, False
    assert not problem_in(check_job_config, config, 1)
    assert without_effect(config)["checkpoint.last_save_in_hf"] == "checkpoint.enable"
