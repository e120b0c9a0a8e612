"""float8 (e4m3/e5m2) matrix products in training, through torchao."""

from dataclasses import replace
from functools import partial

from torch import nn

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.quantization import (
    FP8_GROUP_ALIGNMENT_SIZE,
    GroupedMMConverter,
    QuantizationConverter,
    import_torchao,
    keep_state_dicts_plain,
    module_filter_fn,
    require_gpu,
)
from torchtitan.tools import host, torch_parts
from torchtitan.tools.logging import logger

# This name in filter_fqns excludes layers that are too small to gain from float8.
AUTO_FILTER_SMALL_KN_FLAG = "auto_filter_small_kn"


class Float8LinearConverter(QuantizationConverter):
    """Replaces linear layers by torchao's Float8Linear.

    On hardware without float8, raises ValueError unless the config emulates float8 without compiling.
    Raises ValueError if a recipe and float8 all-gather are both set, and ImportError without torchao.
    """

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        super().__init__(job_config, parallel_dims)
        options = job_config.quantize.linear.float8
        compiled = job_config.compile.applies_to("model")
        remedy = "without one, set quantize.linear.float8.emulate = true and compile.enable = false"
        emulates = options.emulate and not compiled
        require_gpu("quantize.linear.float8", 8, 9, remedy, or_else=emulates)
        self._torchao_float8 = import_torchao("torchao.float8", "quantize.linear.float8")
        if not compiled:
            logger.warning("float8 without torch.compile is slower than bf16: set compile.enable")

        config_cls = self._torchao_float8.Float8LinearConfig
        if options.recipe_name is None:
            gather = parallel_dims.dp_shard_enabled and options.enable_fsdp_float8_all_gather
            self.config = config_cls(enable_fsdp_float8_all_gather=gather, emulate=options.emulate)
        elif options.enable_fsdp_float8_all_gather:
            raise ValueError(
                "quantize.linear.float8.recipe_name and enable_fsdp_float8_all_gather exclude "
                f"each other, got recipe_name = {options.recipe_name!r}; drop one of them"
            )
        else:
            recipe = config_cls.from_recipe_name(options.recipe_name)
            self.config = replace(recipe, emulate=options.emulate)
        if options.recipe_name == "rowwise":
            # Makes compiled scaling kernels round like eager ones.
            host.change_attribute(torch_parts.inductor_config, "emulate_precision_casts", True)
        self.precompute_scale = (
            self.config.enable_fsdp_float8_all_gather
            and options.precompute_float8_dynamic_scale_for_fsdp
        )
        self.filter_fqns = [fqn for fqn in options.filter_fqns if fqn != AUTO_FILTER_SMALL_KN_FLAG]
        self.filter_fn = partial(module_filter_fn, filter_fqns=self.filter_fqns)
        if AUTO_FILTER_SMALL_KN_FLAG in options.filter_fqns:
            try:
                self.filter_fn = self._torchao_float8._auto_filter_for_recipe(
                    options.recipe_name or "tensorwise", filter_fqns=self.filter_fqns
                )
            except (AttributeError, NotImplementedError):
                logger.warning(
                    "This version of torchao has no size filter for the float8 recipe %s: small "
                    "layers are converted too",
                    options.recipe_name,
                )
        self.enabled = True

    def convert(self, model: nn.Module) -> None:
        self._torchao_float8.convert_to_float8_training(
            model, config=self.config, module_filter_fn=self.filter_fn
        )
        keep_state_dicts_plain(model)
        logger.info(
            "Linear layers compute in float8; float8 all-gather: %s",
            self.config.enable_fsdp_float8_all_gather,
        )

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Compute the scales of all float8 weights in one all-reduce instead of one per weight."""
        if not self.precompute_scale:
            return
        for part in model if isinstance(model, list) else [model]:
            self._torchao_float8.precompute_float8_dynamic_scale_for_fsdp(part)


class Float8GroupedMMConverter(GroupedMMConverter):
    """Makes experts' grouped matrix products compute in float8 with row-wise scales.

    Raises ValueError on hardware without float8, and with pipeline or context parallelism.
    """

    number_format, alignment = "float8", FP8_GROUP_ALIGNMENT_SIZE

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        super().__init__(job_config, parallel_dims)
        name = "quantize.grouped_mm.float8"
        require_gpu(name, 8, 9, "remove it from model.converters")
        for key, degree in (("pipeline", parallel_dims.pp), ("context", parallel_dims.cp)):
            if degree != 1:
                raise ValueError(
                    f"{name} does not work with parallelism.{key}_parallel_degree = {degree}; "
                    "set it to 1"
                )
        config = import_torchao("torchao.prototype.moe_training.config", name)
        fqns = job_config.quantize.grouped_mm.float8.fqns
        self.set_up(job_config, fqns, config.Float8TrainingOpConfig())
