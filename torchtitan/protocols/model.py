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
    """Sizes and choices of one model. Subclasses are dataclasses whose fields have defaults."""

    _enforced: str = "every field has a default"  # or the subclass is a TypeError

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        """Take over the job's settings. The engine calls it on a copy of the flavor."""

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return (number of parameters, FLOPs of forward and backward per token)."""
        raise NotImplementedError(f"{type(self).__name__} must define get_nparams_and_flops")


class ModelProtocol(nn.Module):
    """A model the engine can train: built on meta, parallelized, allocated, then initialised."""

    def __init__(self, model_args: BaseModelArgs) -> None:
        super().__init__()

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Fill parameters and buffers in place, and move buffers if `buffer_device` is given."""
        raise NotImplementedError(f"{type(self).__name__} must define init_weights")

    def get_attention_masks(
        self,
        input_batch: torch.Tensor,
        tokenizer: BaseTokenizer | None,
        extra_inputs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the masks of tokens [B, T], for flex and varlen; extra_inputs: other batch entries."""
        raise NotImplementedError(
            f"{type(self).__name__} builds no attention masks; train it with attn_type 'sdpa'"
        )
