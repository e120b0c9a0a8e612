"""What the train specs of all families of decoders have in common."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchtitan.tools.lazy_names import load_on_access

if TYPE_CHECKING:
    from torchtitan.models.args import DecoderArgs
    from torchtitan.models.decoder import Decoder
    from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
    from torchtitan.protocols.train_spec import TrainSpec


def build_decoder_train_spec(
    model_cls: "type[Decoder]",
    model_args: "Mapping[str, DecoderArgs]",
    state_dict_adapter: "type[BaseStateDictAdapter]",
    *,
    balance_experts: bool = False,
) -> "TrainSpec":
    """Return a fresh spec that trains a family on text, with the standard components.

    model_args: flavor -> args; the spec refers to this very mapping.
    balance_experts: optimizers also even out the load of experts, in flavors that have some.
    """
    from torchtitan.data.text_datasets import build_text_dataloader
    from torchtitan.data.tokenizer import build_hf_tokenizer
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.listeners.validate import build_validator
    from torchtitan.loss.cross_entropy import build_cross_entropy_loss
    from torchtitan.models.parallelize import parallelize_decoder
    from torchtitan.optim.lr_scheduler import build_lr_schedulers
    from torchtitan.optim.optimizer import (
        build_optimizers,
        build_optimizers_with_moe_load_balancing,
    )
    from torchtitan.protocols.train_spec import TrainSpec

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


class DecoderFamily:
    """What the folder of a family offers besides its flavors: a train spec, and names on access.

    package: the folder's `__name__`. flavors: flavor -> args.
    model, adapter, parallelize: names that its model/model.py, model/state_dict_adapter.py and
        infra/parallelize.py define. They load more of torch than a flavor table needs.
    balance_experts: as in `build_decoder_train_spec`.
    """

    def __init__(
        self,
        package: str,
        flavors: "Mapping[str, DecoderArgs]",
        *,
        model: str,
        adapter: str,
        parallelize: str,
        balance_experts: bool = True,
    ):
        self._flavors = flavors
        self._model = model
        self._adapter = adapter
        self._balance_experts = balance_experts
        self.load_name = load_on_access(
            package,
            {
                model: ".model.model",
                adapter: ".model.state_dict_adapter",
                parallelize: ".infra.parallelize",
            },
        )

    def get_train_spec(self) -> "TrainSpec":
        """Return a fresh spec; all of them share one table of flavors, and the args in it."""
        return build_decoder_train_spec(
            self.load_name(self._model),
            self._flavors,
            self.load_name(self._adapter),
            balance_experts=self._balance_experts,
        )
