"""The model or job that a command is given: a Hugging Face folder, a checkpoint, a run, or a TOML file."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.adapters.peft_config import CONFIG_FILE
from torchtitan.checkpoint.folder import Contents, contents_of, list_steps
from torchtitan.checkpoint.run_record import read_record
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config.job_config import (
    ActivationCheckpoint,
    Compile,
    LRScheduler,
    Parallelism,
)
from torchtitan.engine import TrainingEngine
from torchtitan.job import find_train_spec
from torchtitan.models.hf_config import from_hf_config
from torchtitan.objective.scoring import without_training
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.step.runner import on_error
from torchtitan.tools import storage
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.events import FILE_NAME
from torchtitan.tools.files import open_file

# The default folder of a run, and the folder in it to which the default job exports its model.
RUN_FOLDER = JobConfig().job.dump_folder
MODEL_FOLDER = "model"
# Maximum number of positions in the RoPE table of a model from Hugging Face.
_LONGEST_TABLE = 32_768


class UnknownModelError(ValueError):
    """Neither a config.json nor the record of a run says which model a folder holds."""


def job_of(source: str | None, config_file: str | None, overrides: Sequence[str]) -> JobConfig:
    """Return the config of the source's job, with `overrides`.

    The config is read from the first of these: `config_file`, the source if it is a TOML file, the
    source's config.json, the config that its run recorded. Raises UnknownModelError if there is none.
    """
    source = source or ("" if config_file else RUN_FOLDER)
    if not config_file and storage.is_file(source):
        config_file = source
    flags = [f"--job.config_file={config_file}"] if config_file else []
    if not config_file and storage.is_file(storage.join(source, "config.json")):
        source = storage.fetched(source, has_weights=False)
        family, _, args = from_hf_config(source)
        flags = [f"--model.name={family}"]
        flags += [f"--model.{key}={source}" for key in ("hf_config", "hf_assets_path")]
        flags += [f"--training.seq_len={min(args.max_seq_len, _LONGEST_TABLE)}"]
    values = None if flags else _recorded_config(source)
    return ConfigManager().parse_args([*flags, *overrides], values)


def _recorded_config(source: str) -> dict[str, Any]:
    """Return the config, as nested tables, in the events of the run that `source` belongs to."""
    path, is_address = Path(source).resolve(), storage.is_address(source)
    for events in (f / FILE_NAME for f in (path, *path.parents[:3]) if not is_address):
        if not events.is_file():
            continue
        with open_file(events) as file:
            starts = [json.loads(line) for line in file if '"kind": "start"' in line]
        if starts:
            config = starts[-1]["config"]
            # The sections of a job without RL.
            own = {field.name for field in dataclasses.fields(JobConfig)}
            if not config["job"]["custom_config_module"]:
                config = {section: values for section, values in config.items() if section in own}
            return _without_none(config)
    if not path.exists() and not is_address:
        raise UnknownModelError(
            f"SOURCE must be a file or folder, and {source!r} does not exist; correct the path"
        )
    raise UnknownModelError(
        f"the model of {source!r} is unknown: there is no config.json, and no {FILE_NAME} of its run in "
        "the folder or above it; give the job's TOML file with --config"
    )


def _without_none(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table without keys whose value is None: TOML has no None, and a missing key means None."""
    plain = {key: value for key, value in table.items() if value is not None}
    return {k: _without_none(v) if isinstance(v, dict) else v for k, v in plain.items()}


def with_model(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the model filled in: named by the options, else by the input, else Llama 3 8B."""
    options, config = dict(options), options["config"]
    del options["config"]
    names = options["model_name"] or "llama3", options["model_flavor"] or "8B"
    # The defaults of torchtitan 0.2.x.
    assets = "./assets/hf/Llama-3.1-8B" if names[0] == "llama3" else None
    if config or not any(options[key] for key in ("model_name", "model_flavor", "hf_config")):
        try:
            job = job_of(options["input_dir"], config, [])
            options["spec"] = find_train_spec(job)
            names, assets = (job.model.name, job.model.flavor), job.model.hf_assets_path
        except UnknownModelError:
            pass
        except ConfigError as error:
            raise ValueError(error.sentence) from error
    options["model_name"], options["model_flavor"] = names
    if options.get("hf_assets_path", "") is None:
        options["hf_assets_path"] = assets
    return options


def _is_peft(folder: str) -> bool:
    return storage.is_file(storage.join(folder, CONFIG_FILE))


def weights_in(source: str | None, config: JobConfig) -> str:
    """Return `source` if it has weights, else the newest weights of its run.

    These are the last finished step or the exported model. A TOML file stands for the run in its
    job.dump_folder. config: the config of the source's job. Raises ValueError if there are no weights.
    """
    source = source or RUN_FOLDER
    if storage.is_file(source):
        source = config.job.dump_folder
    if contents_of(source) != Contents.UNKNOWN or _is_peft(source):
        return source

    def last_step(folder: str) -> list[str]:
        return [step.path for step in list_steps(folder) if step.is_finished][-1:]

    own, bucket = config.checkpoint.places()
    found = last_step(source) + last_step(storage.join(source, own))
    # The exported model of a LoRA run has merged weights.
    exported = storage.join(source, MODEL_FOLDER)
    if contents_of(exported) == Contents.HF and not (found and "lora" in config.model.converters):
        found.append(exported)
    if not found and bucket:
        found = last_step(bucket)
    if found:
        is_local = not storage.is_address(source)
        return max(found, key=os.path.getmtime) if is_local and found[1:] else found[-1]
    raise ValueError(
        f"SOURCE must be a step folder of a run, a folder of step folders, or a folder with Hugging Face "
        f"safetensors files, got {source!r}; train with --checkpoint.enable to get "
        "<job.dump_folder>/checkpoint"
    )


def open_engine(
    config: JobConfig, weights: str, train_spec: TrainSpec | None = None
) -> TrainingEngine:
    """Return an engine that only scores, on one process, with the weights in the folder `weights`.

    Raises ValueError for several processes, and for weights of another model than the config's.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        raise ValueError(
            f"this command runs on one process, got {world_size}: tensor parallelism is not available "
            "yet; set NGPU=1"
        )
    has_adapters = "lora" in config.model.converters
    config = without_training(config, keeps_initial=has_adapters)
    config.parallelism = Parallelism(always_fsdp=False)
    config.compile, config.activation_checkpoint = Compile(), ActivationCheckpoint(mode="none")
    kept = [name for name in config.model.converters if not name.startswith("quantize.")]
    config.model.converters = kept
    config.training.global_batch_size, config.training.enable_cpu_offload = -1, False
    config.lr_scheduler = LRScheduler(warmup_steps=0)
    # A LoRA base with random weights is drawn again from this seed.
    seed = config.debug.seed or 0
    config.debug.seed = read_record(weights).get("seed", seed) if has_adapters else seed
    engine = TrainingEngine(config, train_spec=train_spec, forward_only=True)
    with on_error(engine.close):
        if has_adapters:
            engine.load()
        if not _is_peft(weights):
            engine.load(weights, model_only=True)
        elif engine.checkpointer.adapters.base_name is None:
            raise ValueError(
                f"{weights} holds only adapters, and their base was initialized at random; give the run's "
                "step folder"
            )
        else:
            engine.load_peft(weights)
        engine.eval_mode()
    return engine
