"""What the quantization converters share."""

from importlib import import_module
from types import ModuleType

from torch import nn

from torchtitan.config import JobConfig

# Kernels for 8-bit matrix products work on blocks of this size.
_DIM_MULTIPLE = 16


def module_filter_fn(
    mod: nn.Module, fqn: str, filter_fqns: list[str], multiple: int = _DIM_MULTIPLE
) -> bool:
    """True for a linear layer to convert: fit for the kernels and matched by no filter.

    A filter matches when it occurs anywhere in the fully qualified name.
    multiple: what has to divide both sizes of the weight.
    """
    if not isinstance(mod, nn.Linear):
        return False
    fits = all(size % multiple == 0 for size in mod.weight.shape)
    return fits and not any(filter_fqn in fqn for filter_fqn in filter_fqns)


def import_torchao(module_name: str, converter_name: str) -> ModuleType:
    """Return a module of torchao. Raises ImportError naming the extra to install."""
    try:
        return import_module(module_name)
    except ImportError as error:
        raise ImportError(
            f"the converter {converter_name} needs {module_name}: pip install -U torchtitan[float8]"
        ) from error


def model_is_compiled(job_config: JobConfig) -> bool:
    return job_config.compile.enable and "model" in job_config.compile.components


def set_group_alignment(alignment: int) -> None:
    """Pad the tokens of each expert up to a multiple of `alignment` from here on."""
    from torchtitan.models.moe.utils import set_token_group_alignment_size_m

    set_token_group_alignment_size_m(alignment)
