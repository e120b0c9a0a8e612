"""The train spec of every family of decoders: the standard components around its model."""

from collections.abc import Mapping

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


def build_decoder_train_spec(
    model_cls: type[Decoder],
    model_args: Mapping[str, DecoderArgs],
    state_dict_adapter: type[BaseStateDictAdapter],
    *,
    balance_experts: bool = True,
) -> TrainSpec:
    """Return a new spec that trains a family on text.

    model_args: flavor -> args; the spec refers to this mapping, so all specs of a family share it.
    balance_experts: optimizers also even out the load of experts, in flavors that have experts.
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
