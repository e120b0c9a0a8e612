"""The train spec: model class, flavors and builder functions of a model family (`model.name`)."""

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from torchtitan.config import JobConfig, LRScheduler, Optimizer
from torchtitan.config.checks.common import guess
from torchtitan.distributed import ParallelDims
from torchtitan.tools.lazy_names import load_on_access

if TYPE_CHECKING:
    from torchtitan.data.dataloader import BaseDataLoader
    from torchtitan.data.tokenizer import BaseTokenizer
    from torchtitan.loss.cross_entropy import LossFunction
    from torchtitan.optim.lr_scheduler import LRSchedulersContainer
    from torchtitan.optim.optimizer import OptimizersContainer

# Called with positional arguments.
ParallelizeFunction: TypeAlias = Callable[[nn.Module, ParallelDims, JobConfig], nn.Module]
PipeliningFunction: TypeAlias = Callable[
    # model, layout, config, device, model args, function that parallelizes a stage, loss function
    [nn.Module, ParallelDims, JobConfig, torch.device, Any, ParallelizeFunction, "LossFunction"],
    # schedule, this rank's stages, has first stage, has last stage
    tuple[Any, list[nn.Module], bool, bool],
]
TokenizerBuilder: TypeAlias = Callable[[JobConfig], "BaseTokenizer"]
OptimizersBuilder: TypeAlias = Callable[
    [list[nn.Module], Optimizer, ParallelDims], "OptimizersContainer"
]
LRSchedulersBuilder: TypeAlias = Callable[  # the last argument is the number of training steps
    ["OptimizersContainer", LRScheduler, int], "LRSchedulersContainer"
]


# Called with keyword arguments: those of `build_cross_entropy_loss`, `build_text_dataloader`, `Validator`
# and `build_metrics_processor`, in this order.
LossFunctionBuilder: TypeAlias = Callable[..., "LossFunction"]
DataLoaderBuilder: TypeAlias = Callable[..., "BaseDataLoader"]
ValidatorBuilder: TypeAlias = Callable[..., Any]
MetricsProcessorBuilder: TypeAlias = Callable[..., Any]


@dataclass
class TrainSpec:
    """One model family: its class, its flavors and the functions that build the rest.

    A client may change a field, or a flavor's args, before it builds a trainer. If a builder is None,
    the trainer works without that part. The fields after `state_dict_adapter` tell the config checks what
    the builders support. If such a field is None, the builder's attribute of the same name is used, if any.
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
    # True if build_loss_fn's loss is next-token prediction, which needs logits and token-id labels
    has_token_loss: bool | None = None
    # The values of optimizer.name that build_optimizers_fn supports
    optimizer_names: Collection[str] | None = None
    # The values of training.dataset that build_dataloader_fn supports
    registered_datasets: Mapping[str, Any] | None = None
    # True if pipelining_fn splits a model of `n_layers` layers into stages by whole layers
    cuts_by_layers: bool | None = None
    # True if parallelize_fn applies FSDP even on a single accelerator, for mixed precision
    shards_one_rank: bool | None = None

    def fact(self, name: str) -> Any:
        """Return the spec's field `name`, or if it is None, the builder's attribute of this name (or None)."""
        value, builder = getattr(self, name), getattr(self, _BUILDER_OF[name])
        return getattr(builder, name, None) if value is None else value


_BUILDER_OF = {
    "has_token_loss": "build_loss_fn",
    "optimizer_names": "build_optimizers_fn",
    "registered_datasets": "build_dataloader_fn",
    "cuts_by_layers": "pipelining_fn",
    "shards_one_rank": "parallelize_fn",
}


_extra_train_specs: dict[str, TrainSpec] = {}


def register_train_spec(name: str, train_spec: TrainSpec) -> None:
    """Register `train_spec` for `model.name = name`. It takes precedence over a built-in spec.

    Raises ValueError for a name that is already registered.
    """
    if name in _extra_train_specs:
        raise ValueError(f"a train spec named {name!r} is already registered; pick another name")
    _extra_train_specs[name] = train_spec


def get_train_spec(name: str) -> TrainSpec:
    """Return the spec of a registered, built-in or experimental model, looked up in that order.

    A built-in spec is a new object in each call, but its flavor args are shared.
    """
    if name in _extra_train_specs:
        return _extra_train_specs[name]
    known = set(_extra_train_specs)
    for package in ("models", "experiments"):
        # Imported here, because these packages import this module.
        folder = importlib.import_module(f"torchtitan.{package}")
        families = getattr(folder, f"_supported_{package}")
        if name in families:
            paths = getattr(folder, "module_paths", {})
            path = paths.get(name, f"torchtitan.{package}.{name}")
            return importlib.import_module(path).get_train_spec()
        known |= families
    raise ValueError(
        f"model.name = {name!r} is not a known model{guess(name, known)}; known: "
        f"{', '.join(sorted(known))}. Register your own with "
        "torchtitan.protocols.train_spec.register_train_spec"
    )


# Names that clients import from this module. They load on access, because their modules are slow to import
# or import this module.
_MODULE_OF = {
    "BaseDataLoader": "torchtitan.data.dataloader",
    "LossFunction": "torchtitan.loss.cross_entropy",
    "LRSchedulersContainer": "torchtitan.optim.lr_scheduler",
    "MetricsProcessor": "torchtitan.callbacks.metrics",
    "OptimizersContainer": "torchtitan.optim.optimizer",
    "BaseTokenizer": "torchtitan.data.tokenizer",
    "BaseValidator": "torchtitan.callbacks.validate",
    "BaseModelArgs": "torchtitan.protocols.model",
    "ModelProtocol": "torchtitan.protocols.model",
    "BaseStateDictAdapter": "torchtitan.protocols.state_dict_adapter",
}
__getattr__ = load_on_access(__name__, _MODULE_OF)
