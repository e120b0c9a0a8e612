"""Converts data, losses and results between Tinker's types and the trainer's types."""

import math
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchtitan.adapters.lora import fits
from torchtitan.config.job_config import LoRA
from torchtitan.integrations.tinker.types import Datum, ForwardBackwardOutput, TensorData
from torchtitan.rl.losses import GSPOLoss, PolicyLoss, build_loss
from torchtitan.rl.types import TrainingSample

_T = TypeVar("_T")

_THRESHOLDS = ("clip_high_threshold", "clip_low_threshold")
# Name of Tinker's loss -> names of the loss's settings in loss_fn_config.
_LOSSES = dict.fromkeys(
    ("cross_entropy", "importance_sampling", "ppo", "cispo", "gspo"), _THRESHOLDS
) | {
    "dro": ("beta",),
}
# Limit of log ratios: exp(89) overflows fp32.
_LARGEST_LOG_RATIO = 88.0
_INPUTS = ("target_tokens", "weights", "mask", "logprobs", "advantages")


def loss_of(name: str, config: dict[str, float]) -> PolicyLoss:
    """Return the loss that Tinker calls `name`. Raises ValueError for an unknown name or setting."""
    if name not in _LOSSES:
        raise ValueError(
            f"loss_fn must be one of {', '.join(_LOSSES)}, got {name!r}; for any other function of "
            "log-probs call forward_backward_custom"
        )
    for key, value in config.items():
        if key not in _LOSSES[name]:
            known = " and ".join(_LOSSES[name])
            raise ValueError(f"loss_fn_config of {name} takes {known}, got {key!r}")
        if math.isnan(value) or (name == "dro" and math.isinf(value)):
            raise ValueError(f"{key} of loss_fn_config must be a number, got {value}; correct it")
    # Tinker's thresholds are ratios, ours are distances from 1. The defaults are Tinker's: no bound on
    # ratios and no dual clip. Clipped losses bound the log ratio, because exp(log ratio) must be finite.
    if name == "cross_entropy":
        return build_loss(name)
    if name in ("importance_sampling", "dro"):
        return build_loss(name, max_log_ratio=math.inf, **(config if name == "dro" else {}))
    bounds = {
        "max_log_ratio": _LARGEST_LOG_RATIO,
        "ratio_clip_low": 1 - config.get("clip_low_threshold", 0.8),
        "ratio_clip_high": config.get("clip_high_threshold", 1.2) - 1,
    }
    bounds |= {} if name == "cispo" else {"dual_clip": 0.0}
    return build_loss("dapo" if name == "ppo" else name, **bounds)


def has_output_adapter(lora: LoRA) -> bool:
    """Return True if the output projection has an adapter; `all-linear` does not include it."""
    return any(fits(name, "output") for name in lora.names(lora.target_modules))


def adapters_of(
    lora: LoRA | None, rank: int, seed: int | None, attn: bool, mlp: bool, unembed: bool
) -> dict[str, Any] | None:
    """Convert arguments of `create_lora_training_client` to arguments of `start_adapters`.

    lora: the config of the model's adapters. For a model without adapters, `lora` and the result are None.
    Raises ValueError for adapters that the model does not have.
    """
    if rank < 1:
        raise ValueError(f"lora_config.rank must be at least 1, got {rank}; correct it")
    if lora is None:
        return None
    if rank > lora.rank:
        raise ValueError(
            f"lora_config.rank must be 1 to {lora.rank}, this server's lora.rank, got {rank}; "
            "request a lower rank, or start the server with a larger lora.rank"
        )
    parts = {"attention": attn, "mlp": mlp, "output": unembed and has_output_adapter(lora)}
    layers = [name for name, trains in parts.items() if trains]
    if not layers:
        raise ValueError(
            "lora_config must train a part that has adapters, got train_attn and train_mlp false, and "
            f"lora.target_modules = {lora.target_modules}; set one of them to true"
        )
    seed = secrets.randbits(31) if seed is None else seed
    return {"seed": seed, "rank": rank, "layers": layers}


def only_targets(datum: Datum, **inputs: Tensor) -> Datum:
    """Return the datum with only its targets and `inputs` as loss inputs."""
    targets = {k: v for k, v in datum.loss_fn_inputs.items() if k == "target_tokens"}
    return Datum(datum.model_input, targets | inputs)


def training_sample(datum: Datum, loss: PolicyLoss | None = None) -> TrainingSample:
    """Convert a datum to a sample. Raises ValueError for inputs that cannot be used.

    loss: if a datum for a policy loss has no mask, targets with log-prob 0 and advantage 0 count as
        prompt tokens, and are masked out of ratios and metrics.
    """
    given, n = dict(datum.loss_fn_inputs), datum.model_input.length
    if isinstance(loss, GSPOLoss) and "sequence_ratio_mask" in given:
        # Tinker's name of GSPO's mask is sequence_ratio_mask.
        given["mask"] = given.pop("sequence_ratio_mask")
    if unknown := sorted(set(given) - set(_INPUTS)):
        known = ", ".join(_INPUTS)
        raise ValueError(f"loss_fn_inputs of a Datum may be {known}, got {unknown[0]!r}; remove it")
    needed = {"target_tokens"}
    if has_ratio := loss is not None and loss.has_generator:
        needed |= {"logprobs", "advantages"}
    for name in sorted(needed - given.keys()):
        raise ValueError(
            f"{'a policy loss' if has_ratio else 'a Datum'} needs {name} in loss_fn_inputs, got "
            f"{sorted(given)}; give one number for the token that follows each input token"
        )
    inputs = {name: _numbers(name, values, n) for name, values in given.items()}
    targets = inputs["target_tokens"]
    labels = targets.long()
    if not torch.equal(labels.to(targets.dtype), targets):
        raise ValueError(
            f"target_tokens of a Datum must be token ids, got {targets.tolist()[:8]}; give integers"
        )
    zeros, ones = torch.zeros(n), torch.ones(n)
    mask = inputs.get("mask", ones).float()
    if has_ratio and "mask" not in inputs:
        mask = ((inputs["logprobs"] != 0) | (inputs["advantages"] != 0)).float()
    return TrainingSample(
        token_ids=torch.tensor(datum.model_input.to_ints()),
        labels=labels,
        loss_mask=(mask != 0).float(),
        logprobs=inputs.get("logprobs", zeros).float(),
        advantages=inputs.get("advantages", zeros).float(),
        weights=inputs.get("weights", ones).float() * mask,
    )


def _numbers(name: str, values: Any, n: int) -> Tensor:
    """Return a loss input as a tensor [n]. values: numbers, or the tinker package's TensorData."""
    try:
        tensor = torch.as_tensor(values.to_torch() if hasattr(values, "to_torch") else values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} of a Datum must be a list or a tensor of numbers: {error}"
        ) from error
    if list(tensor.shape) != [n]:
        raise ValueError(
            f"{name} of a Datum must have one number per input token, [{n}], got {list(tensor.shape)}; "
            "for a sequence of n + 1 tokens give its first n as input and its last n as targets"
        )
    for place in tensor.isfinite().logical_not().nonzero()[:1].flatten().tolist():
        got = f"{tensor[place].item()} at token {place}"
        raise ValueError(f"{name} of a Datum must be finite, got {got}; remove the Datum")
    return tensor


def check_finite(logprobs: list[Tensor]) -> list[Tensor]:
    for number, values in enumerate(logprobs):
        if not values.isfinite().all():
            raise FloatingPointError(
                f"the policy gives log-probs that are not finite in Datum {number}; look at the "
                "last optimizer steps, or load a saved state"
            )
    return logprobs


def error_or(call: Callable[..., _T], *args: Any) -> _T | Exception:
    try:
        return call(*args)
    except (ValueError, FloatingPointError) as error:
        return error


def output_of(logprobs: list[Tensor], metrics: dict[str, float]) -> ForwardBackwardOutput:
    """Return the output of a call. Raises FloatingPointError for non-finite log-probs, ValueError for a
    non-finite loss.
    """
    check_finite(logprobs)
    if not math.isfinite(loss := metrics.get("loss:sum", 0.0)):
        raise ValueError(
            f"the loss is {loss}: logprobs of the data are too far from the policy's, or "
            "advantages or weights too large; leave such tokens out with mask"
        )
    outputs = [{"logprobs": TensorData.from_torch(values)} for values in logprobs]
    return ForwardBackwardOutput(outputs, metrics)
