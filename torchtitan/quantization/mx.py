"""MXFP8 matrix products in training (blocks of 32 with a shared power-of-two scale).

Through torchao, whose interface for this is still a prototype.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.quantization import (
    MXFP8_GROUP_ALIGNMENT_SIZE,
    QuantizationConverter,
)
from torchtitan.quantization.utils import (
    import_torchao,
    keep_state_dicts_plain,
    module_filter_fn,
    set_group_alignment,
)
from torchtitan.tools.logging import logger, warn_once
from torchtitan.tools.utils import has_cuda_capability, has_rocm_capability

_TORCHAO_CONFIG_MODULE = "torchao.prototype.moe_training.config"
# quantize.linear.mx.recipe_name -> torchao's name.
_LINEAR_RECIPES = {
    "mxfp8_cublas": "MXFP8_RCEIL",
    "mxfp8_cublas_rceil": "MXFP8_RCEIL",
    "mxfp8_emulated": "MXFP8_EMULATED_RCEIL",
}
_EMULATED_RECIPE = "mxfp8_emulated"
_BLOCK_SIZE = 32  # numbers of a row, or of a column, that share a scale


class MXLinearConverter(QuantizationConverter):
    """Has linear layers compute in MXFP8.

    Raises ImportError without torchao, ValueError for an unknown recipe, and on hardware without
    MXFP8 unless it is emulated.
    """

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        super().__init__(job_config, parallel_dims)
        options = job_config.quantize.linear.mx
        torchao_config = import_torchao(_TORCHAO_CONFIG_MODULE, "quantize.linear.mx")
        self._quantize = import_torchao("torchao.quantization", "quantize.linear.mx").quantize_
        if options.recipe_name not in _LINEAR_RECIPES:
            raise ValueError(
                f"quantize.linear.mx.recipe_name must be one of {list(_LINEAR_RECIPES)}, "
                f"got {options.recipe_name!r}"
            )
        if options.recipe_name != _EMULATED_RECIPE:
            _check_hardware("quantize.linear.mx")
        if options.mxfp8_dim1_cast_kernel_choice != type(options).mxfp8_dim1_cast_kernel_choice:
            warn_once(
                logger,
                "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice is ignored: torchao now chooses "
                "the fastest kernel itself.",
            )
        self.config = _from_recipe(torchao_config, _LINEAR_RECIPES[options.recipe_name])
        self.filter_fqns = list(options.filter_fqns)
        # No block may lie on two ranks.
        self._multiple = _BLOCK_SIZE * parallel_dims.tp
        self.enabled = True

    def convert(self, model: nn.Module) -> None:
        is_target = partial(module_filter_fn, filter_fqns=self.filter_fqns, multiple=self._multiple)
        self._quantize(model, self.config, filter_fn=is_target)
        keep_state_dicts_plain(model)
        logger.info("Linear layers compute in MXFP8")


class MXGroupedMMConverter(QuantizationConverter):
    """Has the experts' grouped matrix products compute in MXFP8.

    Converts the modules whose name contains one of `quantize.grouped_mm.mx.fqns`. Raises
    ImportError without torchao, ValueError on hardware without MXFP8.
    """

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        super().__init__(job_config, parallel_dims)
        options = job_config.quantize.grouped_mm.mx
        torchao_config = import_torchao(_TORCHAO_CONFIG_MODULE, "quantize.grouped_mm.mx")
        self._quantize = import_torchao("torchao.quantization", "quantize.grouped_mm.mx").quantize_
        _check_hardware("quantize.grouped_mm.mx")
        if not job_config.compile.applies_to("model"):
            logger.warning("MXFP8 grouped products are slow without compile.enable")
        # One name may come as a plain string from TOML.
        self.moe_fqns = [options.fqns] if isinstance(options.fqns, str) else list(options.fqns)
        self.recipe_name = options.recipe_name
        self._config = _from_recipe(torchao_config, "MXFP8_RCEIL")
        if self.moe_fqns:
            set_group_alignment(MXFP8_GROUP_ALIGNMENT_SIZE)
        self.enabled = True

    def convert(self, model: nn.Module) -> None:
        self._quantize(model, self._config, filter_fn=self._is_target)
        keep_state_dicts_plain(model)
        logger.info("Grouped matrix products of %s compute in MXFP8", self.moe_fqns)

    def _is_target(self, module: nn.Module, fqn: str) -> bool:
        return any(target in fqn for target in self.moe_fqns)


def _from_recipe(torchao_config: Any, name: str) -> Any:
    """Raises ValueError on torch 2.11, which torchao's assertion would ask to make a nightly."""
    from torch.distributed.tensor import _dispatch

    if not hasattr(_dispatch, "is_pinned_handler"):
        raise ValueError(
            f"quantize.*.mx needs a torch newer than 2.11, got {torch.__version__}; upgrade it, or "
            "use the float8 converters"
        )
    recipe = torchao_config.MXFP8TrainingRecipe[name]
    return torchao_config.MXFP8TrainingOpConfig.from_recipe(recipe)


def _check_hardware(converter_name: str) -> None:
    if has_cuda_capability(10, 0) or has_rocm_capability(9, 5):
        return
    raise ValueError(
        f"{converter_name} needs a GPU of compute capability 10.0 or higher (B200), or gfx950; "
        "remove it from model.converters"
    )
