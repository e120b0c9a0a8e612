"""The model converter `lora`: freezes a model and adds adapters to the layers named in `[lora]`."""

from collections.abc import Collection, Iterator

import torch
from torch import nn

from torchtitan.adapters.lora import add_adapter, first_fit, fits, name_of_layer
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.config.checks.common import guess
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import GroupedExperts, RouterGate, StackedExperts
from torchtitan.numerics import nf4
from torchtitan.numerics.linear import Linear
from torchtitan.protocols.model_converter import ModelConverter
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.logging import logger

ALL_LINEAR = "all-linear"
NORMS, BIASES = "norms", "biases"
_OUTPUT = "output"  # the output projection gets an adapter only if the config names it


class LoRAConverter(ModelConverter):
    """Freezes the model, turns off routers' load balancing, and adds adapters in `training.dtype`.

    Raises ConfigError if a name in `[lora]` fits no layer, or fits a layer that cannot have an adapter.
    """

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        self.options, self._converters = job_config.lora, job_config.model.converters
        training = job_config.training
        self._casts_all, self._dtype = parallel_dims.uses_fsdp, TORCH_DTYPE_MAP[training.dtype]
        ranks = parallel_dims.fsdp_gradient_divide_factor
        gathers = self._casts_all and (ranks > 1 or training.enable_cpu_offload)
        if self.options.base_format and gathers and torch.__version__ < "2.12":
            raise ConfigError(
                f"lora.base_format = {self.options.base_format!r} with FSDP on {ranks} ranks, or with "
                f"training.enable_cpu_offload, needs torch 2.12 or newer, got {torch.__version__}, whose "
                "FSDP casts integers; upgrade torch"
            )
        # Without FSDP, tensor and pipeline parallelism compute in training.dtype, without autocast.
        has_autocast = not (parallel_dims.tp_enabled or parallel_dims.pp_enabled)
        self._frozen_dtype: torch.dtype | None = None
        if self._casts_all or has_autocast:
            self._frozen_dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]

    def convert(self, model: nn.Module) -> None:
        targets = self._targets(model)
        model.requires_grad_(False)
        options = self.options
        ranks = {key: int(rank) for key, rank in options.rank_pattern.items()}
        alphas = {key: float(alpha) for key, alpha in options.alpha_pattern.items()}
        for key, patterns in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
            _refuse_misfits(f"lora.{key}", patterns, targets)
        for name, (module, weight_name) in targets.items():
            rank = ranks.get(first_fit(ranks, name) or "", options.rank)
            alpha = alphas.get(first_fit(alphas, name) or "", options.alpha)
            scale = alpha / (rank**0.5 if options.use_rslora else rank)
            add_adapter(module, weight_name, rank, scale, options.dropout)
        self._train_whole(model, targets)
        for module in model.modules():
            if hasattr(module, "load_balance_coeff"):
                module.load_balance_coeff = None
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        n_trained, n_all = sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes)
        logger.info(
            f"LoRA: {len(targets)} weights have adapters; {n_trained:,} of {n_all:,} parameters "
            f"train ({100 * n_trained / max(n_all, 1):.2f} %)"
        )
        self._store_frozen(model)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Do nothing after an optimizer step."""

    def _targets(self, model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
        """Return, for each layer that gets an adapter, layer name -> (module, name of the weight)."""
        linears = dict(_linears(model))
        wanted = self.options.names(self.options.target_modules)
        names = [name for name in wanted if name != ALL_LINEAR]
        _refuse_misfits("lora.target_modules", names, linears)
        chosen = {
            name: where
            for name, where in linears.items()
            if (ALL_LINEAR in wanted and name != _OUTPUT) or first_fit(names, name)
        }
        if _OUTPUT in chosen and model.enable_weight_tying:
            raise ConfigError(
                f"lora.target_modules = {wanted} names the output projection, whose weight is tied to "
                "the embedding's in this model. Merged files hold a tied weight only once; leave the output "
                "projection out"
            )
        quantizing = [c for c in self._converters if c.startswith("quantize.grouped_mm.")]
        for name, (module, _) in chosen.items():
            kinds = [*quantizing, type(module).__name__]
            if isinstance(module, StackedExperts) and kinds != [GroupedExperts.__name__]:
                raise ConfigError(
                    f"lora.target_modules = {wanted} names {name}, and experts of {kinds[0]} cannot "
                    "have adapters; name other layers, such as ['self_attn']"
                )
        return chosen

    def _train_whole(self, model: nn.Module, targets: Collection[str]) -> None:
        """Unfreeze the modules that `lora.also_train` names, and the value head if there is one."""
        wanted = self.options.names(self.options.also_train)
        modules = {
            name_of_layer(model, name): module
            for name, module in model.named_modules()
            if name and next(module.parameters(recurse=False), None) is not None
        }
        names = [name for name in wanted if name not in (NORMS, BIASES)]
        _refuse_misfits("lora.also_train", names, modules)
        for name in names:
            if with_adapter := [layer for layer in targets if fits(name, layer)]:
                raise ConfigError(
                    f"lora.also_train names {name!r}, but the layer {with_adapter[0]} has an adapter; "
                    "leave it out of lora.also_train or of lora.target_modules"
                )
        for name, module in modules.items():
            is_norm = NORMS in wanted and isinstance(module, nn.RMSNorm | nn.LayerNorm)
            if is_norm or name.rpartition(".")[2] == "score" or first_fit(names, name):
                module.requires_grad_(True)
            elif BIASES in wanted and isinstance(getattr(module, "bias", None), nn.Parameter):
                module.bias.requires_grad_(True)

    def _store_frozen(self, model: nn.Module) -> None:
        """Cast frozen weights now to the dtype that FSDP or autocast would cast them to each step, and
        store matrices of linear layers and experts in `lora.base_format`."""
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        n_quantized = 0
        for module_name, module in model.named_modules():
            # Autocast casts only operands of matrix products; routers and fp32 heads don't use autocast.
            has_experts = isinstance(module, StackedExperts)
            is_cast = type(module) is Linear or has_experts
            for name, parameter in list(module.named_parameters(recurse=False)):
                is_plain = not hasattr(parameter.data, "__tensor_flatten__")
                if parameter.requires_grad or not is_plain:
                    continue
                is_matrix = is_cast and parameter.ndim == (3 if has_experts else 2)
                if self.options.base_format is not None and is_matrix:
                    if parameter.shape[-1] % nf4.BLOCK:
                        raise ConfigError(
                            f"lora.base_format = {self.options.base_format!r} needs weights whose rows have a "
                            f"multiple of {nf4.BLOCK} elements, got {list(parameter.shape)} in "
                            f"{module_name}.{name}; remove lora.base_format"
                        )
                    stored = nn.Parameter(nf4.quantize(parameter), requires_grad=False)
                    module.register_parameter(name, stored)
                    module.in_4_bits = (*getattr(module, "in_4_bits", ()), name)
                    module.dtype_of_4_bits = self._frozen_dtype or self._dtype
                    n_quantized += parameter.numel()
                elif self._frozen_dtype is not None and (self._casts_all or is_cast):
                    if parameter not in replaced:  # keeps tied parameters tied
                        cast = parameter.detach().to(self._frozen_dtype)
                        replaced[parameter] = nn.Parameter(cast, requires_grad=False)
                    module.register_parameter(name, replaced[parameter])
        if self.options.base_format is None:
            return
        if not n_quantized:
            raise ConfigError(
                f"lora.base_format = {self.options.base_format!r} found no frozen layer of class "
                "torchtitan.numerics.linear.Linear to quantize; remove lora.base_format"
            )
        gib = n_quantized * nf4.BYTES / nf4.BLOCK / 2**30
        logger.info(
            f"LoRA: {n_quantized:,} frozen parameters are stored in 4 bits, {gib:.2f} GiB in all"
        )


def _linears(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Yield (layer name, (module, weight name)). Each stacked weight of experts counts as one layer."""
    for name, module in model.named_modules():
        if isinstance(module, StackedExperts):
            for weight_name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 3:
                    yield f"{name}.{weight_name}", (module, weight_name)
        elif isinstance(module, nn.Linear) and not isinstance(module, RouterGate):
            if name.rpartition(".")[2] != "score":
                yield name_of_layer(model, name), (module, "weight")


def _refuse_misfits(key: str, patterns: Collection[str], layers: Collection[str]) -> None:
    """Raise ConfigError for a pattern that fits no layer."""
    for pattern in patterns:
        if not any(fits(pattern, layer) for layer in layers):
            ends = sorted({layer.rpartition(".")[2] for layer in layers})
            raise ConfigError(
                f"{key} takes parts of layers' names ({', '.join(ends)}, and PEFT's names for them), "
                f"got {pattern!r}{guess(pattern, ends)}; correct it, or train other modules whole with "
                "lora.also_train"
            )
