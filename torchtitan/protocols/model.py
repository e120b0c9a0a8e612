"""The methods that the engine calls on a model and on its arguments."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchtitan.config import JobConfig
from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.tools.lazy_names import load_on_access

__getattr__ = load_on_access(__name__, {"AttentionMasksType": "torchtitan.models.attention"})


@dataclass
class BaseModelArgs:
    """Sizes and options of a model. Subclasses are dataclasses in which every field has a default."""

    _enforced: str = "every field has a default"  # so subclass fields need a default, too

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        """Apply the job's settings. The engine calls it on a copy of the flavor's args."""

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return (number of parameters, FLOPs of forward and backward per token)."""
        raise NotImplementedError(f"{type(self).__name__} must define get_nparams_and_flops")


class ModelProtocol(nn.Module):
    """A model that the engine builds on the meta device, parallelizes, allocates and initialises."""

    def __init__(self, model_args: BaseModelArgs) -> None:
        super().__init__()

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Initialise parameters and buffers in place. buffer_device: None keeps the buffers' device."""
        raise NotImplementedError(f"{type(self).__name__} must define init_weights")

    def get_attention_masks(
        self,
        input_batch: torch.Tensor,
        tokenizer: BaseTokenizer | None,
        extra_inputs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the masks for flex or varlen. input_batch: tokens [B, T].

        extra_inputs: the other entries of the batch.
        """
        raise NotImplementedError(
            f"{type(self).__name__} builds no attention masks; train it with attn_type 'sdpa'"
        )
