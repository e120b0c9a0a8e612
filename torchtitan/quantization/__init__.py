"""Training with 8-bit matrix products, by way of torchao. torchao is imported where it is used."""

from torch import nn

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import ModelConverter

# Grouped matrix products want token groups padded to multiples of this.
FP8_GROUP_ALIGNMENT_SIZE = 16
MXFP8_GROUP_ALIGNMENT_SIZE = 32


class QuantizationConverter(ModelConverter):
    """Base of the converters named quantize.*.

    `enabled` is False as long as there is nothing to convert. Raises ValueError if the config
    mixes number formats.
    """

    enabled: bool = False

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        _check_one_format(job_config.model.converters)

    def convert(self, model: nn.Module) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define convert")

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Most formats have nothing to do after an optimizer step."""


def _check_one_format(converter_names: list[str]) -> None:
    names = [name for name in converter_names if name.startswith("quantize")]
    formats = sorted({name.rsplit(".", 1)[-1] for name in names})
    if len(formats) > 1:
        raise ValueError(
            f"model.converters may quantize to one format only, got {formats} from {names}"
        )
