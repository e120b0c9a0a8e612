"""Training with 8-bit matrix products through torchao, which is imported on first use."""

from importlib import import_module
from types import ModuleType
from typing import Any

from torch import nn

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.dtensor import forget_scales, is_dtensor, local_tensor, with_local
from torchtitan.distributed.token_groups import set_token_group_alignment_size_m
from torchtitan.protocols.model_converter import ModelConverter
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import has_cuda_capability

# Grouped matrix products need groups of tokens padded to multiples of these sizes.
FP8_GROUP_ALIGNMENT_SIZE = 16
MXFP8_GROUP_ALIGNMENT_SIZE = 32
# Kernels for 8-bit matrix products need weight sizes that are multiples of this.
_DIM_MULTIPLE = 16


class QuantizationConverter(ModelConverter):
    """Base class of the converters quantize.*: applies torchao's `quantize_` to filtered modules.

    enabled: set to True by a subclass once its checks have passed.
    Raises ValueError if the job mixes number formats.
    """

    enabled: bool = False
    config: Any = None  # torchao's config for `quantize_`
    message: str = ""  # logged after conversion

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        names = [name for name in job_config.model.converters if name.startswith("quantize")]
        formats = sorted({name.rsplit(".", 1)[-1] for name in names})
        if len(formats) > 1:
            raise ValueError(
                f"model.converters may quantize to one format only, got {formats} from {names}"
            )

    def is_target(self, module: nn.Module, fqn: str) -> bool:
        raise NotImplementedError(f"{type(self).__name__} must define is_target or convert")

    def convert(self, model: nn.Module) -> None:
        torchao = import_torchao("torchao.quantization", "quantize.*")
        torchao.quantize_(model, self.config, filter_fn=self.is_target)
        keep_state_dicts_plain(model)
        logger.info(self.message)


class GroupedMMConverter(QuantizationConverter):
    """Base class of converters for experts; converts modules whose name contains one of `fqns`."""

    fqns: list[str]
    number_format: str
    alignment: int

    def set_up(self, job_config: JobConfig, fqns: list[str] | str, config: Any) -> None:
        """Set the fields and enable the converter. fqns: a list, or in TOML a string for a single name."""
        if not job_config.compile.applies_to("model"):
            logger.warning(f"{self.number_format} grouped products are slow without compile.enable")
        self.fqns = [fqns] if isinstance(fqns, str) else list(fqns)
        if self.fqns:
            set_token_group_alignment_size_m(self.alignment)
        self.config = config
        self.message = f"Grouped matrix products of {self.fqns} compute in {self.number_format}"
        self.enabled = True

    def is_target(self, module: nn.Module, fqn: str) -> bool:
        return any(target in fqn for target in self.fqns)


def require_gpu(key: str, major: int, minor: int, remedy: str, or_else: bool = False) -> None:
    """Raise ValueError unless the GPU has at least this compute capability, or `or_else` is True."""
    if not (has_cuda_capability(major, minor) or or_else):
        raise ValueError(
            f"{key} needs a GPU of compute capability {major}.{minor} or higher; {remedy}"
        )


def module_filter_fn(
    mod: nn.Module, fqn: str, filter_fqns: list[str], multiple: int = _DIM_MULTIPLE
) -> bool:
    """True if the module is linear, its sizes are multiples of `multiple`, and its name contains no entry of
    `filter_fqns`."""
    return (
        isinstance(mod, nn.Linear)
        and all(size % multiple == 0 for size in mod.weight.shape)
        and not any(filter_fqn in fqn for filter_fqn in filter_fqns)
    )


def import_torchao(module_name: str, converter_name: str) -> ModuleType:
    """Return a module of torchao. Raises an ImportError that names the extra to install."""
    try:
        return import_module(module_name)
    except ImportError as error:
        raise ImportError(
            f"the converter {converter_name} needs {module_name}: pip install -U torchtitan-embeddable[float8]"
        ) from error


def keep_state_dicts_plain(model: nn.Module) -> None:
    """Make a converted model's state dicts hold plain tensors that share the weights' memory.

    torchao wraps some weights; a checkpoint of wrapped weights needs the same converter to be loaded.
    """
    for module in model.modules():
        if any(hasattr(p, "__tensor_flatten__") for p in module.parameters(recurse=False)):
            module.register_state_dict_post_hook(_unwrap_weights)
            module.register_load_state_dict_post_hook(
                lambda module, _: forget_scales(module.parameters(recurse=False))
            )


def _unwrap_weights(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    for own_name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
        weight = state_dict.get(prefix + own_name)
        local = None if weight is None else local_tensor(weight)
        if hasattr(local, "__tensor_flatten__"):
            plain = (local._tensor if hasattr(local, "_tensor") else local._data).detach()
            plain = with_local(weight, plain) if is_dtensor(weight) else plain
            state_dict[prefix + own_name] = plain
