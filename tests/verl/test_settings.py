"""verl's settings as a `JobConfig`, the plug-in, and the errors for wrong settings."""

import re
import subprocess
import sys

import pytest
import torch
from verl.trainer.config import CheckpointConfig
from verl.utils.torch_functional import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
)
from verl.workers.config import (
    EngineRouterReplayConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine import EngineRegistry

from tests.verl import cases
from torchtitan.integrations.verl.config import job_config_of
from torchtitan.optim.lr_scheduler import build_lr_schedulers
from torchtitan.tools.errors import ConfigError


def model_config(folder, **changes):
    return HFModelConfig(path=folder, load_tokenizer=False, **changes)


def configs_of(folder, *, optim=None, checkpoint=None, model=None, **engine):
    """verl's four configs, in the order of its engines' arguments."""
    of_engine, of_optimizer = cases.engine_config(**engine), cases.optimizer_config(**(optim or {}))
    checkpoint = CheckpointConfig(**(checkpoint or {}))
    return model_config(folder, **(model or {})), of_engine, of_optimizer, checkpoint


def job_of(folder, **changes):
    model, engine, optimizer, checkpoint = configs_of(folder, **changes)
    return job_config_of(engine, optimizer, model, checkpoint, "language_model")[0]


# ---- the job ----


def test_settings_reach_the_job(folder):
    optim = dict(lr_warmup_steps_ratio=0.1, total_training_steps=50)
    engine = dict(dtype="bfloat16", reshard_after_forward="never", max_seq_len=128)
    job = job_of(folder, optim=optim, **engine)
    assert job.lr_scheduler.warmup_steps == 5
    assert job.parallelism.fsdp_reshard_after_forward == "never"
    assert job.training.mixed_precision_param == "bfloat16" and job.training.seq_len == 128
    assert job.training.gradient_reduction == "mean"


def verls_factors(schedule, steps, **options):
    """The factor on the peak learning rate in each step, from verl's scheduler."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler, seen = schedule(optimizer, **options), []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def our_factors(config, steps, first=0):
    """The same from our scheduler. first: number of steps by which the schedule is ahead."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedulers, seen = build_lr_schedulers([optimizer], config, steps), []
    for step in range(first, steps):
        schedulers.set_step(step)
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_rates_are_those_of_verls_schedules_at_every_step(folder, warmup):
    optim = dict(lr=1.0, lr_warmup_steps=warmup, decay_type="cosine", min_lr_factor=0.1)
    known = job_of(folder, optim=optim | dict(total_training_steps=12)).lr_scheduler
    options = dict(num_warmup_steps=warmup, num_training_steps=12, min_lr_ratio=0.1)
    cosine = get_cosine_schedule_with_warmup
    assert our_factors(known, 12) == pytest.approx(verls_factors(cosine, 12, **options))
    from_one = verls_factors(cosine, 11, zero_indexed_step=False, **options)
    assert our_factors(known, 12, first=1) == pytest.approx(from_one)
    known.init_lr_factor = 0.3
    from_above = verls_factors(cosine, 12, init_lr_ratio=0.3, **options)
    assert our_factors(known, 12) == pytest.approx(from_above)

    unknown = job_of(folder, optim=optim).lr_scheduler
    constant = verls_factors(get_constant_schedule_with_warmup, 12, num_warmup_steps=warmup)
    assert our_factors(unknown, 12) == pytest.approx(constant)


def test_model_of_the_overridden_config_is_built(folder):
    model = model_config(folder, override_config={"model_config": {"rms_norm_eps": 1e-3}})
    configs = cases.engine_config(), cases.optimizer_config(), model, None
    job, spec = job_config_of(*configs, "language_model")
    assert spec.model_args[job.model.flavor].norm_eps == 1e-3


def test_keys_of_ours_come_from_verls_command_line(folder):
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    settings = {
        "_target_": "torchtitan.integrations.verl.config.EngineConfig",
        "tensor_parallel_size": 2,
        "job": {"parallelism.pipeline_parallel_schedule": "GPipe", "training": {"gc_freq": 7}},
    }
    engine = omega_conf_to_dataclass(OmegaConf.create(settings))
    optimizer, model = cases.optimizer_config(), model_config(folder)
    job, _ = job_config_of(engine, optimizer, model, None, "language_model")
    assert job.parallelism.pipeline_parallel_schedule == "GPipe" and job.training.gc_freq == 7
    assert job.parallelism.data_parallel_shard_degree == -1


# ---- what is refused ----


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(data_parallel_size=4), "engine.data_parallel_size must be 1"),
        (dict(router_replay=EngineRouterReplayConfig(mode="R2")), "router_replay.mode = 'R2'"),
        (dict(job={"training.stepps": 3}), "got 'training.stepps'"),
        (dict(tensor_parallel_size=2), "tensor_parallel_size = 2.*; start 2 processes"),
        (dict(context_parallel_size=0), "engine.context_parallel_size must be at least 1"),
        (dict(attn_type="flex_flash"), "engine.attn_type must be one of .* got 'flex_flash'"),
        (dict(dtype="float16"), "engine.dtype must be one of .* got 'float16'"),
        (dict(optim=dict(name="Adamm")), "optim.name must be one of .* got 'Adamm'"),
        (dict(model=dict(lora={"rank": 8})), "model.lora.rank is for Megatron's engine, got 8"),
        (dict(model=dict(lora_rank=8, target_modules=".*_proj")), "be 'all-linear' or a list"),
        (dict(model=dict(lora_rank=8, exclude_modules="x")), "model.exclude_modules = 'x'"),
        (dict(checkpoint=dict(save_contents=["modle"])), "save_contents must be one of model,"),
        (dict(checkpoint=dict(save_contents=["optimizer"])), "must include 'model'"),
    ],
)
def test_wrong_setting_is_one_sentence_that_names_it_as_verl_does(folder, alone, changes, words):
    engine_cls = EngineRegistry.get_engine_cls("language_model", "torchtitan")
    with pytest.raises(ConfigError, match=words) as error:
        engine_cls(*configs_of(folder, **changes))
    assert not re.search(r"\. |\n", str(error.value))


def test_other_engines_configs_are_refused(folder):
    model, ours = model_config(folder), cases.engine_config()
    for engine, optimizer, message in (
        (FSDPEngineConfig(), cases.optimizer_config(), "FSDPEngineConfig; set engine=torchtitan"),
        (ours, FSDPOptimizerConfig(), "got FSDPOptimizerConfig without .*optim=torchtitan"),
        (ours, None, "got None; give a config, or set engine.forward_only"),
    ):
        with pytest.raises(ConfigError, match=message):
            job_config_of(engine, optimizer, model, None, "")
    job_config_of(cases.engine_config(forward_only=True), None, model, None, "language_model")


# ---- the plug-in ----


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU is for machines without accelerator")
def test_import_of_verl_brings_the_cpu_and_the_engines():
    code = """
import sys, verl
from verl.utils.device import get_device_id, get_device_name, get_torch_device
assert "torchtitan.integrations.verl.engine" not in sys.modules, "engines are imported too early"
assert (get_device_name(), get_device_id()) == ("cpu", "cpu")
assert get_torch_device().max_memory_allocated() == 0
from verl.workers.engine import EngineRegistry
for model_type in ("language_model", "value_model"):
    print(EngineRegistry.get_engine_cls(model_type, "torchtitan").__module__)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["torchtitan.integrations.verl.engine"] * 2
    assert "torchtitan engine is not available" not in result.stderr
