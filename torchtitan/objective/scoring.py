"""Builds engines that only score a trainer's rows: a reference model or a teacher."""

import copy
import dataclasses
import os
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.config.job_config import Checkpoint, LoRA, Loss
from torchtitan.engine import TrainingEngine
from torchtitan.step.runner import on_error


def without_training(config: JobConfig, *, keeps_initial: bool) -> JobConfig:
    """Return a changeable copy of a job's config for an engine that only scores.

    It writes no file and has no loss. keeps_initial: it still names the weights that a new run starts from.
    """
    config = copy.deepcopy(config)
    config.job.print_config, config.job.save_config_file = False, None
    config.loss = Loss()
    config.training.time_limit_minutes = 0.0  # would need a checkpoint to end with
    given, names = config.checkpoint, ["verify_on_load"]
    if keeps_initial:
        names += [f.name for f in dataclasses.fields(given) if f.name.startswith("initial_")]
    config.checkpoint = Checkpoint(**{name: getattr(given, name) for name in names})
    return config


def scoring_config(trainer: TrainingEngine, *, keeps_initial: bool = False) -> JobConfig:
    """Return `without_training` of the trainer's config, with the seed that it drew."""
    config = without_training(trainer.job_config, keeps_initial=keeps_initial)
    config.job.description = f"model that scores the rows of: {config.job.description}"
    config.debug.seed = trainer.seed
    return config


def scoring_engine(trainer: TrainingEngine, folder: str | None = None) -> TrainingEngine:
    """Return a forward-only engine with the trainer's layout, in evaluation mode. Collective.

    folder: a Hugging Face folder, with any model; or a checkpoint of the trainer's model without
        adapters. None: the weights that a new run starts from, even if the trainer resumes.
    """
    config = scoring_config(trainer, keeps_initial=folder is None)
    options: dict[str, Any] = {"layout": trainer.layout, "forward_only": True}
    if folder is not None:
        config.model.converters = [name for name in config.model.converters if name != "lora"]
        config.lora = LoRA()
    if folder is not None and os.path.exists(os.path.join(folder, "config.json")):
        config.model.hf_config, config.model.args = None, {}  # sizes of the trainer's model
        engine = TrainingEngine.from_hf(folder, config, **options)
    else:
        engine = TrainingEngine(config, train_spec=trainer.train_spec, **options)
        with on_error(engine.close):
            engine.load(folder, model_only=True)
    engine.eval_mode()
    return engine
