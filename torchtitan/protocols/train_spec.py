"""The train spec: which model, flavors and builders belong to a `model.name`."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torchtitan.config.checks.common import guess
from torchtitan.tools.lazy_names import load_on_access

# (model, parallel_dims, job_config) -> model
ParallelizeFunction: TypeAlias = Callable[..., Any]
# (model, parallel_dims, job_config, device, model_args, parallelize_fn, loss_fn)
# -> (schedule, model parts, has first stage, has last stage)
PipeliningFunction: TypeAlias = Callable[..., tuple[Any, list[Any], bool, bool]]
# (*, dp_world_size, dp_rank, tokenizer, job_config) -> dataloader
DataLoaderBuilder: TypeAlias = Callable[..., Any]
# (job_config) -> tokenizer
TokenizerBuilder: TypeAlias = Callable[..., Any]
# (job_config, parallel_dims, model_args) -> metrics processor
MetricsProcessorBuilder: TypeAlias = Callable[..., Any]
# (model_parts, optimizer config, parallel_dims) -> optimizers
OptimizersBuilder: TypeAlias = Callable[..., Any]
# (optimizers, lr_scheduler config, training steps) -> schedulers
LRSchedulersBuilder: TypeAlias = Callable[..., Any]
# (job_config, *, parallel_dims) -> loss function that returns a sum over tokens
LossFunctionBuilder: TypeAlias = Callable[..., Any]
# (*, job_config, dp_world_size, dp_rank, tokenizer, ...) -> validator
ValidatorBuilder: TypeAlias = Callable[..., Any]


@dataclass
class TrainSpec:
    """One model family: its class, its flavors and the functions that build the rest.

    An embedder may change a field, or a flavor's args, before it builds a trainer. A builder
    that is None means that the trainer goes without that part.
    """

    model_cls: type  # a ModelProtocol
    model_args: Mapping[str, Any]  # flavor -> BaseModelArgs
    parallelize_fn: ParallelizeFunction
    pipelining_fn: PipeliningFunction | None
    build_optimizers_fn: OptimizersBuilder
    build_lr_schedulers_fn: LRSchedulersBuilder
    build_dataloader_fn: DataLoaderBuilder | None
    build_tokenizer_fn: TokenizerBuilder | None
    build_loss_fn: LossFunctionBuilder
    build_validator_fn: ValidatorBuilder | None = None
    build_metrics_processor_fn: MetricsProcessorBuilder | None = None
    state_dict_adapter: type | None = None  # a BaseStateDictAdapter


_extra_train_specs: dict[str, TrainSpec] = {}


def register_train_spec(name: str, train_spec: TrainSpec) -> None:
    """Make `train_spec` known as `model.name = name`; it wins over a built-in of that name.

    Raises ValueError for a name that is already registered.
    """
    if name in _extra_train_specs:
        raise ValueError(f"a train spec named {name!r} is already registered; pick another name")
    _extra_train_specs[name] = train_spec


def get_train_spec(name: str) -> TrainSpec:
    """Return the spec of a registered, built-in or experimental model, looked up in that order.

    Built-in specs are new objects that share one set of flavor args per process.
    Raises ValueError, listing the known names, for any other name.
    """
    if name in _extra_train_specs:
        return _extra_train_specs[name]
    known = set(_extra_train_specs)
    for package in ("models", "experiments"):
        # By name: these packages import this module.
        folder = importlib.import_module(f"torchtitan.{package}")
        families = getattr(folder, f"_supported_{package}")
        if name in families:
            return importlib.import_module(f"torchtitan.{package}.{name}").get_train_spec()
        known |= families
    raise ValueError(
        f"model.name = {name!r} is not a known model{guess(name, known)}; known: "
        f"{', '.join(sorted(known))}. Register your own with "
        "torchtitan.protocols.train_spec.register_train_spec"
    )


# Names that clients import from here; their modules stand above this one, or load much.
_MODULE_OF = {
    "BaseDataLoader": "torchtitan.data.dataloader",
    "LossFunction": "torchtitan.loss.cross_entropy",
    "LRSchedulersContainer": "torchtitan.optim.lr_scheduler",
    "MetricsProcessor": "torchtitan.listeners.metrics",
    "OptimizersContainer": "torchtitan.optim.optimizer",
    "BaseTokenizer": "torchtitan.data.tokenizer",
    "BaseValidator": "torchtitan.listeners.validate",
    "BaseModelArgs": "torchtitan.protocols.model",
    "ModelProtocol": "torchtitan.protocols.model",
    "BaseStateDictAdapter": "torchtitan.protocols.state_dict_adapter",
}
__getattr__ = load_on_access(__name__, _MODULE_OF)
