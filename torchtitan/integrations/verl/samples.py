"""Packs verl's samples into rows, and unpacks the model's outputs into samples.

A microbatch of verl is a TensorDict with jagged tensors [S, j]: S samples of j tokens each, where j differs
between samples. All samples together have N tokens. A packed row [1, N] holds the samples as S documents.
"""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode

from torchtitan.batch.batch import Batch
from torchtitan.batch.documents import IGNORE_INDEX, PARENT_IDS, ids_of_branches
from torchtitan.batch.trees import columns_of, grow_trees

TEMPERATURE = "temperature"
_SLOTS = "slots_of_tokens"

# Settings of verl that are refused -> the feature that the setting turns on.
_REFUSED = {
    "distillation_use_topk": "distillation from a teacher's top-k",
    "distillation_only": "distillation without log-probabilities",
}
# Supported in forward-only batches; verl never sets it in training.
_REFUSED_IN_TRAINING = {"calculate_sum_pi_squared": "sum of squared probabilities in training"}


def setting(data: TensorDict, key: str, default: Any) -> Any:
    """Return a non-tensor entry of a batch, or `default`."""
    return tu.get_non_tensor_data(data=data, key=key, default=default)


def check(data: TensorDict, forward_only: bool, replays: bool) -> None:
    """Raise ValueError for a batch that needs a feature that our engine lacks.

    replays: True if the engine replays routing; then the batch must contain the recorded experts.
    """
    for key, feature in (_REFUSED if forward_only else _REFUSED | _REFUSED_IN_TRAINING).items():
        if setting(data, key, False):
            raise ValueError(f"torchtitan's engine has no {feature}, got {key} = True; turn it off")
    pad_mode = setting(data, "pad_mode", DatasetPadMode.NO_PADDING)
    if pad_mode != DatasetPadMode.NO_PADDING:
        raise ValueError(
            f"torchtitan's engine takes samples without padding, got pad_mode = {pad_mode!r}; set "
            "data.pad_mode=no_padding"
        )
    # With the processor of a multimodal model, verl gives each sample of text four equal rows of positions.
    positions = data["position_ids"]
    in_streams = positions.is_nested and positions.dim() == 3
    if in_streams and (positions.values() != positions.values()[:1]).any():
        raise ValueError(
            "torchtitan's engine trains models of text only, got position_ids whose rows differ, as for "
            "images; leave images and videos out, or use another engine"
        )
    for name in ("input_ids", *["position_ids"] * (not in_streams)):
        tensor = data[name]
        if not tensor.is_nested or tensor.dim() != 2:
            kind = "jagged" if tensor.is_nested else "dense"
            raise ValueError(
                f"torchtitan's engine takes {name} of text as a jagged tensor [samples, tokens], "
                f"got a {kind} tensor of {tensor.dim()} dimensions; give samples without padding"
            )
    inputs = setting(data, "multi_modal_inputs", None)
    of_samples = [tu.unwrap_non_tensor_data(x) for x in (() if inputs is None else inputs)]
    # Some tokenizers of text models return token_type_ids, which mark every token as text.
    keys = {key for x in of_samples if x is not None for key in x.keys()} - {"token_type_ids"}
    if keys:
        raise ValueError(
            f"torchtitan's engine trains models of text only, got multi_modal_inputs with "
            f"{sorted(keys)}; leave images and videos out, or use another engine"
        )
    if replays and "routed_experts" not in data.keys():
        raise ValueError(
            "engine.router_replay.mode = 'R3' needs routed_experts in each batch, got "
            f"{sorted(data.keys())}; set rollout.enable_rollout_routing_replay=true"
        )
    if setting(data, "enable_routing_replay", replays) and not replays:
        raise ValueError(
            "the batch requests routing replay, got engine.router_replay.mode = 'disabled'; set it to "
            "'R3'"
        )


def _experts(recorded: Tensor) -> Tensor:
    """Return expert indices [N, MoE layers L, experts per token k]; -1 for tokens that were not recorded.

    verl fills these tokens' entries with zeros: k times expert 0, which no router chooses if k > 1. With
    k = 1 they stay expert 0, which is harmless: these tokens come after all tokens in the loss.
    """
    repeats = (recorded.sort(dim=-1).values.diff(dim=-1) == 0).any(dim=-1, keepdim=True)
    return recorded.masked_fill(repeats, -1)


def pack(
    microbatch: TensorDict, index: int, replays: bool = False, shares_prefixes: bool = False
) -> Batch:
    """Return one row of all samples, with labels [1, N]; a sample's last token has no label.

    index: the microbatch's index, stored in the row. replays: store the recorded experts from the
        microbatch's `routed_experts`, jagged [S, j, L, k], in the row. shares_prefixes: samples with a
        common prefix form a tree and share slots; `microbatch` gets each token's slot, for `unpack`.
    """
    input_ids = microbatch["input_ids"]
    tokens, offsets = input_ids.values(), input_ids.offsets()
    lengths = offsets.diff()
    sample_of_token = torch.arange(len(lengths), device=tokens.device).repeat_interleave(lengths)
    labels = tokens.roll(-1)
    labels[offsets[1:] - 1] = IGNORE_INDEX
    # Positions are [N], or four equal rows [4, N].
    positions = microbatch["position_ids"].values()
    row = {
        "input": tokens,
        "positions": positions[0] if positions.dim() == 2 else positions,
        "document_ids": sample_of_token.int(),
        "labels": labels,
    }
    if replays:
        row["routed_experts"] = _experts(microbatch["routed_experts"].values())
    temperature = setting(microbatch, TEMPERATURE, 1.0)
    # A tensor has one temperature per sample.
    if isinstance(temperature, Tensor):
        row[TEMPERATURE] = temperature.float().reshape(-1).expand(len(lengths))[sample_of_token]
    if shares_prefixes:
        slots, row = _share(row, lengths.tolist())
        slots = slots.to(tokens.device)
        microbatch[_SLOTS] = torch.nested.nested_tensor_from_jagged(slots, offsets)
    return {name: of_tokens[None] for name, of_tokens in row.items()} | {"index": index}


def _share(row: dict[str, Tensor], lengths: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (slot of each token [N], the row packed as prefix trees). row: all tokens of the samples."""
    split = {name: of_tokens.cpu().split(lengths) for name, of_tokens in row.items()}
    # Losses also read the score of a sample's last token, which has no label: mark it with -1, so that its
    # score gets its own entry.
    labels = [of_sample.masked_fill(of_sample == IGNORE_INDEX, -1) for of_sample in split["labels"]]
    nothing = [torch.zeros_like(of_sample, dtype=torch.bool) for of_sample in labels]
    groups = [float(x[0]) for x in split[TEMPERATURE]] if TEMPERATURE in split else None
    given = split["input"], labels, nothing, sum(lengths), groups, split.get("routed_experts")
    trees = grow_trees(*given)
    of_samples = columns_of(trees, lengths)
    of_tokens = torch.cat([of_samples[sample] for sample in range(len(lengths))])
    token = torch.empty(sum(tree.size for tree in trees), dtype=torch.int64)
    # For each slot, the index of any of the slot's tokens, which are all equal.
    token.scatter_(0, of_tokens, torch.arange(len(of_tokens)))
    depths = torch.cat([torch.arange(n) for n in lengths])[token]
    (ids,), (parents,) = ids_of_branches(depths[None])
    values = {name: x[token.to(x.device)] for name, x in row.items()}
    device = row["input"].device
    return of_tokens, values | {"document_ids": ids.to(device), PARENT_IDS: parents.to(device)}


def unpack(values: Tensor, microbatch: TensorDict) -> Tensor:
    """Convert values [1, >= N] of a row to a jagged tensor [S, j]; values after the tokens are padding."""
    offsets = microbatch["input_ids"].offsets().to(values.device)
    of_tokens = values[0, : microbatch["input_ids"].values().shape[0]]
    if _SLOTS in microbatch.keys():
        of_tokens = values[0, microbatch[_SLOTS].values().to(values.device)]
    return torch.nested.nested_tensor_from_jagged(of_tokens, offsets)
