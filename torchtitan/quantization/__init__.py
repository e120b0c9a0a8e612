"""Training with 8-bit matrix products through torchao, which is imported where it is used."""

from typing import Any

from torch import nn

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.token_groups import set_token_group_alignment_size_m
from torchtitan.protocols.model_converter import ModelConverter
from torchtitan.quantization.utils import import_torchao, keep_state_dicts_plain
from torchtitan.tools.logging import logger

# Grouped matrix products need groups of tokens that are padded to multiples of these sizes.
FP8_GROUP_ALIGNMENT_SIZE = 16
MXFP8_GROUP_ALIGNMENT_SIZE = 32


class QuantizationConverter(ModelConverter):
    """Base class of the converters quantize.*: torchao's `quantize_` with a config and a filter.

    enabled: set to True by a subclass once its checks have passed.
    Raises ValueError if the job mixes number formats.
    """

    enabled: bool = False
    config: Any = None  # torchao's
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

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Do nothing after an optimizer step; float8 overrides this."""


class GroupedMMConverter(QuantizationConverter):
    """Base class of the converters of experts, for modules whose name contains one of `fqns`."""

    fqns: list[str]
    number_format: str
    alignment: int

    def set_up(self, job_config: JobConfig, fqns: list[str] | str, config: Any) -> None:
        """fqns: TOML may give a single name as a plain string."""
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
