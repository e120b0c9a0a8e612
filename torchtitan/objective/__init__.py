"""Objectives that need an engine. `[loss]` in the config chooses the trainer's objective."""

from typing import Any

from torchtitan.callbacks.source_losses import SourceLosses
from torchtitan.compat import is_overridden
from torchtitan.data.packed_dataset import PackedDataset
from torchtitan.engine import TrainingEngine
from torchtitan.loss.cross_entropy import build_cross_entropy_loss
from torchtitan.objective.distillation import Distillation
from torchtitan.objective.preference import PreferenceObjective
from torchtitan.objective.scoring import check_reference, check_scorer
from torchtitan.step.objective import Objective
from torchtitan.tools.errors import ConfigError


def check_objective(engine: TrainingEngine) -> None:
    """Raise ConfigError for an objective that cannot be built. The engine has a tokenizer, but no model yet."""
    loss = engine.job_config.loss
    if loss.name == "distillation":
        check_scorer("loss.teacher", loss.teacher, engine, engine.tokenizer, loss.top_k)
    elif loss.name == "dpo":
        check_reference(engine)


def build_objective(engine: TrainingEngine) -> Objective:
    """Return the objective of a trainer with this engine and its data. Collective."""
    loss = engine.job_config.loss
    if loss.name and is_overridden(engine, "forward_backward_step", TrainingEngine):
        raise ConfigError(
            f"loss.name = {loss.name!r} makes the trainer compute the loss, but {type(engine).__name__} "
            "overrides forward_backward_step with a loss of its own; leave one of the two out"
        )
    if loss.name == "dpo":
        return PreferenceObjective(engine)
    if loss.name == "distillation":
        given = engine, engine.tokenizer, loss, loss.temperature
        return Distillation("loss.teacher", loss.teacher, *given)
    dataset: Any = getattr(engine.dataloader, "dataset", None)
    is_own_loss = engine.train_spec.build_loss_fn is not build_cross_entropy_loss
    if isinstance(dataset, PackedDataset) and len(dataset.source_names) > 1 and not is_own_loss:
        return SourceLosses(dataset.source_names, engine.job_config.compile.backend_of("loss"))
    return Objective()
