"""MXFP8 matrix products in training: blocks of 32 numbers share a power-of-two scale.

Uses torchao, whose MXFP8 interface is still a prototype.
"""

from typing import Any

import torch
from torch import nn

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.quantization import (
    MXFP8_GROUP_ALIGNMENT_SIZE,
    GroupedMMConverter,
    QuantizationConverter,
    import_torchao,
    module_filter_fn,
    require_gpu,
)
from torchtitan.tools.logging import logger, warn_once
from torchtitan.tools.utils import has_rocm_capability

# quantize.linear.mx.recipe_name -> torchao's name.
_LINEAR_RECIPES = {
    "mxfp8_cublas": "MXFP8_RCEIL",
    "mxfp8_cublas_rceil": "MXFP8_RCEIL",
    "mxfp8_emulated": "MXFP8_EMULATED_RCEIL",
}
_TORCHAO_CONFIG = "torchao.prototype.moe_training.config"
_BLOCK_SIZE = 32  # consecutive elements of a row or column that share a scale


class MXLinearConverter(QuantizationConverter):
    """Makes linear layers compute in MXFP8.

    Raises ValueError on hardware without MXFP8 unless the recipe is emulated, ImportError without torchao.
    """

    message = "Linear layers compute in MXFP8"

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        super().__init__(job_config, parallel_dims)
        options = job_config.quantize.linear.mx
        torchao_config = import_torchao(_TORCHAO_CONFIG, "quantize.linear.mx")
        if options.recipe_name != "mxfp8_emulated":
            _check_hardware("quantize.linear.mx")
        if options.mxfp8_dim1_cast_kernel_choice != type(options).mxfp8_dim1_cast_kernel_choice:
            warn_once(
                logger,
                "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice is ignored: torchao now chooses "
                "the fastest kernel.",
            )
        self.config = _from_recipe(torchao_config, _LINEAR_RECIPES[options.recipe_name])
        self.filter_fqns = list(options.filter_fqns)
        # Tensor parallelism must not split a block between two ranks.
        self._multiple = _BLOCK_SIZE * parallel_dims.tp
        self.enabled = True

    def is_target(self, module: nn.Module, fqn: str) -> bool:
        return module_filter_fn(module, fqn, self.filter_fqns, self._multiple)


class MXGroupedMMConverter(GroupedMMConverter):
    """Makes experts' grouped matrix products compute in MXFP8. Raises as `MXLinearConverter` does."""

    number_format, alignment = "MXFP8", MXFP8_GROUP_ALIGNMENT_SIZE

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        super().__init__(job_config, parallel_dims)
        options = job_config.quantize.grouped_mm.mx
        torchao_config = import_torchao(_TORCHAO_CONFIG, "quantize.grouped_mm.mx")
        _check_hardware("quantize.grouped_mm.mx")
        self.set_up(job_config, options.fqns, _from_recipe(torchao_config, "MXFP8_RCEIL"))
        self.moe_fqns, self.recipe_name = self.fqns, options.recipe_name


def _from_recipe(torchao_config: Any, name: str) -> Any:
    """Return torchao's config of a recipe. Raises ValueError on torch 2.11, which torchao refuses."""
    if torch.__version__ < "2.12":
        raise ValueError(
            f"quantize.*.mx needs a torch newer than 2.11, got {torch.__version__}; upgrade it, or "
            "use the float8 converters"
        )
    recipe = torchao_config.MXFP8TrainingRecipe[name]
    return torchao_config.MXFP8TrainingOpConfig.from_recipe(recipe)


def _check_hardware(key: str) -> None:
    remedy = "remove it from model.converters"
    require_gpu(key, 10, 0, f"{remedy} (B200 and gfx950 have MXFP8)", has_rocm_capability(9, 5))
