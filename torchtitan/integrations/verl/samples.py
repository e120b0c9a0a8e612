"""verl's samples as packed rows, and what the model says of them as samples again.

A microbatch of verl is a TensorDict with jagged tensors [S, j]: S samples, each of its own length,
N tokens together. Here they become one row [1, N] of S documents.
"""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode

from torchtitan.batch.batch import Batch
from torchtitan.batch.documents import IGNORE_INDEX

TEMPERATURE = "temperature"

# Switches of verl that change what is computed, and what each asks for.
_REFUSED = {
    "distillation_use_topk": "distillation from a teacher's top-k",
    "distillation_only": "distillation without log-probabilities",
    "enable_routing_replay": "routing replay",
}
# verl wants it of answers that it scores, and of nothing else.
_REFUSED_IN_TRAINING = {"calculate_sum_pi_squared": "sum of squared probabilities in training"}


def setting(data: TensorDict, key: str, default: Any) -> Any:
    """A non-tensor entry of a batch, or `default`."""
    return tu.get_non_tensor_data(data=data, key=key, default=default)


def check(data: TensorDict, forward_only: bool) -> None:
    """Raise ValueError for a batch that asks for what the engine cannot do."""
    for key, what in (_REFUSED if forward_only else _REFUSED | _REFUSED_IN_TRAINING).items():
        if setting(data, key, False):
            raise ValueError(f"torchtitan's engine has no {what}, got {key} = True; turn it off")
    pad_mode = setting(data, "pad_mode", DatasetPadMode.NO_PADDING)
    if pad_mode != DatasetPadMode.NO_PADDING:
        raise ValueError(
            f"torchtitan's engine takes samples without padding, got pad_mode = {pad_mode!r}; set "
            "data.pad_mode=no_padding"
        )
    for name in ("input_ids", "position_ids"):
        tensor = data[name]
        if not tensor.is_nested or tensor.dim() != 2:
            kind = "jagged" if tensor.is_nested else "dense"
            raise ValueError(
                f"torchtitan's engine takes {name} as a jagged tensor [samples, tokens] of models "
                f"of text, got a {kind} one of {tensor.dim()} dimensions; give samples without "
                "padding"
            )
    inputs = setting(data, "multi_modal_inputs", None)
    of_samples = [tu.unwrap_non_tensor_data(x) for x in (() if inputs is None else inputs)]
    # Some tokenizers of text alone say of every token that it is text.
    keys = {key for x in of_samples if x is not None for key in x.keys()} - {"token_type_ids"}
    if keys:
        raise ValueError(
            f"torchtitan's engine trains models of text alone, got multi_modal_inputs with "
            f"{sorted(keys)}; leave images and videos out, or use another engine"
        )


def pack(microbatch: TensorDict, index: int) -> Batch:
    """One row of all samples, with its labels [1, N]: a sample's last token has none.

    index: of the microbatch, an entry of the row.
    """
    input_ids = microbatch["input_ids"]
    tokens, offsets = input_ids.values(), input_ids.offsets()
    lengths = offsets.diff()
    sample_of_token = torch.arange(len(lengths), device=tokens.device).repeat_interleave(lengths)
    labels = tokens.roll(-1)
    labels[offsets[1:] - 1] = IGNORE_INDEX
    row = {
        "input": tokens[None],
        "positions": microbatch["position_ids"].values()[None],
        "document_ids": sample_of_token.int()[None],
        "labels": labels[None],
        "index": index,
    }
    temperature = setting(microbatch, TEMPERATURE, 1.0)
    if isinstance(temperature, Tensor):  # one per sample
        row[TEMPERATURE] = (
            temperature.float().reshape(-1).expand(len(lengths))[sample_of_token][None]
        )
    return row


def unpack(values: Tensor, microbatch: TensorDict) -> Tensor:
    """Jagged [S, j] of values [1, N], or of more, whose end is padding."""
    offsets = microbatch["input_ids"].offsets().to(values.device)
    n_tokens = microbatch["input_ids"].values().shape[0]
    return torch.nested.nested_tensor_from_jagged(values[0, :n_tokens], offsets)
