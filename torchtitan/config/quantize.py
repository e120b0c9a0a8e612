"""The config sections under `[quantize]`; annotations must stay real types, as in `job_config`."""

from dataclasses import dataclass, field
from typing import Literal

from torchtitan.config.fields import Section, section


@dataclass
class Float8Linear(Section):
    enable_fsdp_float8_all_gather: bool = False  # Gather weights over FSDP ranks in float8
    # Compute all float8 scales in one go after the optimizer step
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    # Named float8 recipe of torchao
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    # Linear layers whose name contains one of these strings are not converted
    filter_fqns: list[str] = field(default_factory=list)
    # Compute in float32 with float8 rounding, for devices without float8; for tests only
    emulate: bool = False


@dataclass
class MXLinear(Section):
    # Kernel that casts along the first dimension
    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = "triton"
    # Named MX recipe of torchao
    recipe_name: Literal["mxfp8_cublas", "mxfp8_cublas_rceil", "mxfp8_emulated"] = "mxfp8_cublas"
    # Linear layers whose name contains one of these strings are not converted
    filter_fqns: list[str] = field(default_factory=lambda: ["output"])


@dataclass
class QuantizedLinear(Section):
    float8: Float8Linear = section(Float8Linear, "Float8 linears")
    mx: MXLinear = section(MXLinear, "MX linears")


@dataclass
class Float8GroupedMM(Section):
    # Parts of names of the modules whose grouped matrix multiplications use float8
    fqns: list[str] | str = field(default_factory=list)


@dataclass
class MXGroupedMM(Section):
    recipe_name: Literal["mxfp8"] = "mxfp8"  # Named MX recipe of torchao
    # Parts of names of the modules whose grouped matrix multiplications use MX types
    fqns: list[str] | str = field(default_factory=list)


@dataclass
class QuantizedGroupedMM(Section):
    float8: Float8GroupedMM = section(Float8GroupedMM, "Float8 grouped matrix multiplication")
    mx: MXGroupedMM = section(MXGroupedMM, "MX grouped matrix multiplication")


@dataclass
class Quantize(Section):
    linear: QuantizedLinear = section(QuantizedLinear, "Quantized linears")
    grouped_mm: QuantizedGroupedMM = section(
        QuantizedGroupedMM, "Quantized grouped matrix multiplication, for mixtures of experts"
    )
