"""Builds engines that only score a trainer's rows: a reference model or a teacher."""

import copy
import os
from typing import Any

from torchtitan.build import derive_model_args, job_of_hf
from torchtitan.checkpoint.folder import Contents, contents_of
from torchtitan.config import JobConfig
from torchtitan.config.checks.values import REFERENCES
from torchtitan.config.job_config import Checkpoint, LoRA, Loss, Model, Optimizer, Quantize
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.engine import TrainingEngine
from torchtitan.job import resolve_job
from torchtitan.step.runner import on_error
from torchtitan.tools.errors import ConfigError


def without_training(config: JobConfig, *, keeps_initial: bool) -> JobConfig:
    """Return a mutable copy of a job's config for an engine that only scores.

    An engine with this config writes no file and has no loss. keeps_initial: keep checkpoint.initial_*, which
    set a new run's initial weights.
    """
    config = copy.deepcopy(config)
    config.job.print_config, config.job.save_config_file = False, None
    config.loss = Loss()
    config.training.time_limit_minutes = 0.0  # a limit needs checkpoint.enable, off below
    prefixes = ("verify_on_load", "initial_") if keeps_initial else ("verify_on_load",)
    kept = {k: v for k, v in vars(config.checkpoint).items() if k.startswith(prefixes)}
    config.checkpoint = Checkpoint(**kept)
    return config


def scoring_config(trainer: TrainingEngine, *, keeps_initial: bool = False) -> JobConfig:
    """Return `without_training` of the trainer's config, with the seed that the trainer drew."""
    config = without_training(trainer.job_config, keeps_initial=keeps_initial)
    config.job.description = f"model that scores the rows of: {config.job.description}"
    config.debug.seed = trainer.seed
    return config


def check_scorer(
    key: str, folder: str, trainer: TrainingEngine, tokenizer: Any, top_k: int = 0
) -> JobConfig:
    """Return the config of a forward-only engine for a Hugging Face folder.

    The trainer needs no model yet. The engine uses the mask type and attention kernel of the trainer's model.
    key: the setting that names the folder. tokenizer: the trainer's. Raises ConfigError if the trainer's layout
    cannot run the folder's model, if its tokenizer differs, or if it has at most top_k vocabulary entries.
    """
    config = scoring_config(trainer)
    args = derive_model_args(config, trainer.train_spec)
    attention = {name: getattr(args, name, None) for name in ("attn_type", "attn_mask_type")}
    config.model = Model(fp32_head=config.model.fp32_head, **attention)
    config.lora, config.quantize, config.optimizer = LoRA(), Quantize(), Optimizer()
    config.activation_checkpoint.mode = "none"
    layout = config.parallelism
    layout.always_fsdp = trainer.parallel_dims.always_fsdp
    layout.module_fqns_per_model_part = layout.pipeline_parallel_layers_per_stage = None
    try:
        job, spec = job_of_hf(folder, config, None, False)
        resolve_job(job, False, spec)
        args_of_scorer = spec.model_args[job.model.flavor]
        sizes = args.vocab_size, args_of_scorer.vocab_size
        n_common = 0 if args_of_scorer.value_head else min(sizes)
        if top_k >= n_common:
            raise ValueError(
                f"it has logits of {n_common} vocabulary entries, which must be more than top_k = {top_k}"
            )
        own, others = (x.get_vocab() for x in (tokenizer, HuggingFaceTokenizer(folder)))
        different = sorted(own.items() ^ others.items(), key=lambda item: item[::-1])
        if different:
            token = different[0][0]
            raise ValueError(
                f"its tokenizer gives {token!r} the id {others.get(token)}, and the job's tokenizer "
                f"{own.get(token)}; choose a model with the same vocabulary"
            )
    except (AttributeError, OSError, ValueError) as error:
        raise ConfigError(f"{key} = {folder!r} cannot score the job's rows: {error}") from error
    return config


def check_reference(trainer: TrainingEngine) -> JobConfig | None:
    """Return the config for the folder in loss.reference, or None if it has no config.json.

    Raises ConfigError like `check_scorer`.
    """
    folder = trainer.job_config.loss.reference
    if folder in REFERENCES:
        return None
    if contents_of(folder) not in (Contents.DCP, Contents.HF):
        raise ConfigError(
            "loss.reference must be a Hugging Face folder with safetensors files, or a step folder of a run "
            f"such as .../checkpoint/step-1000, got {folder!r}; correct it"
        )
    if not os.path.exists(os.path.join(folder, "config.json")):
        return None
    config = check_scorer("loss.reference", folder, trainer, trainer.tokenizer)
    # Quantize the reference like the trained model.
    given = trainer.job_config
    config.model.converters = [name for name in given.model.converters if name != "lora"]
    config.quantize = copy.deepcopy(given.quantize)
    return config


def reference_engine(trainer: TrainingEngine) -> TrainingEngine:
    """Return a forward-only engine with the trainer's layout, in evaluation mode. Collective.

    loss.reference may be a Hugging Face folder with any model that has the trainer's tokenizer; a checkpoint
    of the trainer's model without adapters; or "initial", the weights that a new run starts from, even if
    the trainer resumes.
    """
    folder = trainer.job_config.loss.reference
    options: dict[str, Any] = {"layout": trainer.layout, "forward_only": True}
    if config := check_reference(trainer):
        engine = TrainingEngine.from_hf(folder, config, **options)
    else:
        is_initial = folder == "initial"
        config = scoring_config(trainer, keeps_initial=is_initial)
        if not is_initial:
            config.model.converters = [name for name in config.model.converters if name != "lora"]
            config.lora = LoRA()
        engine = TrainingEngine(config, train_spec=trainer.train_spec, **options)
        with on_error(engine.close):
            engine.load(None if is_initial else folder, model_only=True)
    engine.eval_mode()
    return engine
