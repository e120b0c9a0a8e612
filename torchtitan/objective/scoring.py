"""Builds engines that only score a trainer's rows: a reference model or a teacher."""

import copy
import dataclasses
import os
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.config.job_config import Checkpoint, LoRA, Loss
from torchtitan.engine import TrainingEngine
from torchtitan.step.runner import on_error


def scoring_config(trainer: TrainingEngine) -> JobConfig:
    """Return a changeable copy of the trainer's config that saves and loads no checkpoints of its own."""
    config = copy.deepcopy(trainer.job_config)
    config.job.description = f"scores for {config.job.description}"
    config.job.print_config, config.job.save_config_file = False, None
    config.loss, config.debug.seed = Loss(), trainer.seed
    config.training.time_limit_minutes = 0.0  # would need a checkpoint to end with
    config.checkpoint = Checkpoint(verify_on_load=config.checkpoint.verify_on_load)
    return config


def scoring_engine(trainer: TrainingEngine, folder: str | None = None) -> TrainingEngine:
    """Return a forward-only engine with the trainer's layout, in evaluation mode. Collective.

    folder: a Hugging Face folder, with any model; or a checkpoint of the trainer's model without
        adapters. None: the weights that a new run starts from, even if the trainer resumes.
    """
    config, given = scoring_config(trainer), trainer.job_config.checkpoint
    options: dict[str, Any] = {"layout": trainer.layout, "forward_only": True}
    if folder is None:
        initial = [f.name for f in dataclasses.fields(given) if f.name.startswith("initial_")]
        values = {name: getattr(given, name) for name in initial}
        config.checkpoint = dataclasses.replace(config.checkpoint, **values)
    else:
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
