"""Shared functions of the quantization converters."""

from importlib import import_module
from types import ModuleType
from typing import Any

from torch import nn

from torchtitan.distributed.dtensor import (
    forget_scales,
    is_dtensor,
    local_tensor,
    with_local,
)

# Kernels for 8-bit matrix products need weight sizes that are multiples of this.
_DIM_MULTIPLE = 16


def module_filter_fn(
    mod: nn.Module, fqn: str, filter_fqns: list[str], multiple: int = _DIM_MULTIPLE
) -> bool:
    """True for a linear layer that fits the kernels and that no filter matches.

    A filter matches if it occurs anywhere in the fully qualified name.
    multiple: must divide both sizes of the weight.
    """
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
    """Make the state dicts of a converted model hold plain weights, which share its memory.

    torchao wraps some weights. A checkpoint of wrapped tensors could be read only with torchao and
    the same converter.
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
        if (name := prefix + own_name) not in state_dict:
            continue
        weight = state_dict[name]
        local = local_tensor(weight)
        if not hasattr(local, "__tensor_flatten__"):
            continue
        plain = (local._tensor if hasattr(local, "_tensor") else local._data).detach()
        if is_dtensor(weight):
            plain = with_local(weight, plain)
        state_dict[name] = plain
