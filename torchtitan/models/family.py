"""The train spec of a decoder family, and the family's import paths of torchtitan 0.2.x."""

import sys
from collections.abc import Mapping
from types import ModuleType

from torchtitan.callbacks.validate import build_validator
from torchtitan.data.text_datasets import build_text_dataloader
from torchtitan.data.tokenizer import build_hf_tokenizer
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.loss.cross_entropy import build_cross_entropy_loss
from torchtitan.models.args import DecoderArgs
from torchtitan.models.decoder import Decoder
from torchtitan.models.parallelize import parallelize_decoder
from torchtitan.optim.lr_scheduler import build_lr_schedulers
from torchtitan.optim.optimizer import build_optimizers, build_optimizers_with_moe_load_balancing
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools.lazy_names import load_on_access


def build_decoder_train_spec(
    model_cls: type[Decoder],
    model_args: Mapping[str, DecoderArgs],
    state_dict_adapter: type[BaseStateDictAdapter],
    *,
    balance_experts: bool = True,
) -> TrainSpec:
    """Return a new spec that trains a family on text. model_args: shared by all specs of the family.

    balance_experts: the optimizers also balance the load of experts, if a flavor has experts.
    """
    build = build_optimizers_with_moe_load_balancing if balance_experts else build_optimizers
    return TrainSpec(
        model_cls=model_cls,
        model_args=model_args,
        parallelize_fn=parallelize_decoder,
        pipelining_fn=pipeline_llm,
        build_optimizers_fn=build,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_text_dataloader,
        build_tokenizer_fn=build_hf_tokenizer,
        build_loss_fn=build_cross_entropy_loss,
        build_validator_fn=build_validator,
        state_dict_adapter=state_dict_adapter,
    )


# Names in the `infra` packages of torchtitan 0.2.x's families -> our module.
_PLAN, _PARALLELIZE = "torchtitan.models.tp_plan", "torchtitan.models.parallelize"
_FSDP = "torchtitan.distributed.fsdp"
_INFRA = {
    "apply_ddp": _FSDP,
    "apply_fsdp": _FSDP,
    "disable_fsdp_gradient_division": _FSDP,
    "apply_compile": _PARALLELIZE,
    "_op_sac_save_list": _PARALLELIZE,
    "apply_moe_ep_tp": _PLAN,
    "apply_tp": _PLAN,
    "apply_non_moe_tp": _PLAN,
    "GptossTensorParallel": _PLAN,
    "GptossExpertTensorParallel": _PLAN,
}


def add_old_paths(family: str) -> None:
    """Make torchtitan 0.2.x's submodules of a family importable; names in `infra` load on first access."""
    own = sys.modules[family]
    parallelize = {name: family for name in vars(own) if name.startswith("parallelize_")}
    infra = ModuleType(f"{family}.infra.parallelize", "The import path in torchtitan 0.2.x.")
    infra.__getattr__ = load_on_access(infra.__name__, _INFRA | parallelize)  # type: ignore
    for package, modules in {
        "model": dict.fromkeys(("args", "model", "moe", "state_dict_adapter"), own),
        "infra": dict.fromkeys(("parallelize", "expert_parallel"), infra),
    }.items():
        parent = sys.modules[f"{family}.{package}"] = ModuleType(f"{family}.{package}")
        parent.__path__ = []  # makes the module a package
        setattr(own, package, parent)
        for name, module in modules.items():
            setattr(parent, name, module)
            sys.modules[f"{family}.{package}.{name}"] = module
