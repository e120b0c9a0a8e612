"""Print the pairs of features that the config's rules refuse, and the rules' messages.

    python -m scripts.composability

Each pair of features is a config, which goes through `torchtitan.config.checks` as at a start, and
through the rules for the CPU and for CUDA. Nothing is built.
"""

import argparse
import itertools
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torchtitan.config import JobConfig, checks
from torchtitan.config.checks.device import device_limits
from torchtitan.protocols.model_converter import known_converter_names
from torchtitan.protocols.train_spec import get_train_spec

# Feature -> the keys that it sets. Other keys are those of llama3's debug model with flex attention;
# "experts" takes a flavor with experts.
_EXPERTS = {"model.name": "qwen3", "model.flavor": "debugmodel_moe_small"}
FEATURES: dict[str, dict[str, Any]] = {
    "FSDP 2": {"parallelism.data_parallel_shard_degree": 2},
    "DDP 2": {"parallelism.data_parallel_replicate_degree": 2},
    "TP 2": {"parallelism.tensor_parallel_degree": 2},
    "TP 2, asynchronous": {
        "parallelism.tensor_parallel_degree": 2,
        "parallelism.enable_async_tensor_parallel": True,
        "compile.enable": True,
    },
    "PP 2, 1F1B": {"parallelism.pipeline_parallel_degree": 2},
    "PP 2, ZBVZeroBubble": {
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble",
    },
    "CP 2, allgather": {"parallelism.context_parallel_degree": 2},
    "CP 2, alltoall": {
        "parallelism.context_parallel_degree": 2,
        "parallelism.context_parallel_rotate_method": "alltoall",
    },
    "CP 2, ptrr": {
        "parallelism.context_parallel_degree": 2,
        "parallelism.context_parallel_load_balancer": "ptrr",
    },
    "experts, EP 2": {
        **_EXPERTS,
        "parallelism.expert_parallel_degree": 2,
        "parallelism.data_parallel_shard_degree": 2,
    },
    "sdpa": {"model.attn_type": "sdpa"},
    "varlen": {"model.attn_type": "varlen"},
    "packed documents": {"model.attn_mask_type": "block_causal"},
    "value head": {"model.value_head": True},
    "fp32": {"training.mixed_precision_param": "float32"},
    "compile": {"compile.enable": True},
    "full AC": {"activation_checkpoint.mode": "full"},
    "memory budget AC": {"activation_checkpoint.mode": "memory_budget", "compile.enable": True},
    "float8": {"model.converters": ["quantize.linear.float8"]},
    "MXFP8": {"model.converters": ["quantize.linear.mx"]},
    "experts, float8": {**_EXPERTS, "model.converters": ["quantize.grouped_mm.float8"]},
    "early step": {"optimizer.early_step_in_backward": True},
    "accumulation": {"training.global_batch_size": 64},
    "FSDP 2, CPU offload": {
        "parallelism.data_parallel_shard_degree": 2,
        "training.enable_cpu_offload": True,
    },
}
# Two features that set the same one of these keys cannot be combined.
_EXCLUSIVE = {
    "parallelism.tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree",
    "parallelism.context_parallel_degree",
    "model.attn_type",
    "activation_checkpoint.mode",
}


class _Refused(Exception):
    """Arguments: a rule's message and its name."""


def _refuse(*problems: Iterable[str]) -> None:
    for rule in problems:
        for message in rule:
            module = Path(rule.gi_code.co_filename).stem
            raise _Refused(message, f"{module}.{rule.gi_code.co_name}")


def refusal(*features: str) -> tuple[str, str] | None:
    """Return (message, rule) of the first rule that the features break together, else None."""
    config = JobConfig()
    keys: dict[str, Any] = {"model.attn_type": "flex", "parallelism.data_parallel_shard_degree": 1}
    for name in features:
        for key, value in FEATURES[name].items():
            keys[key] = [*keys.get(key, []), *value] if isinstance(value, list) else value
    for key, value in keys.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    degrees = config.parallelism
    dp = degrees.data_parallel_replicate_degree * degrees.data_parallel_shard_degree
    ranks = dp * degrees.tensor_parallel_degree * degrees.pipeline_parallel_degree
    ranks *= degrees.context_parallel_degree
    spec = get_train_spec(config.model.name)
    dims = SimpleNamespace(
        tp_enabled=degrees.tensor_parallel_degree > 1,
        pp_enabled=degrees.pipeline_parallel_degree > 1,
        cp_enabled=degrees.context_parallel_degree > 1,
        uses_fsdp=degrees.data_parallel_shard_degree * degrees.context_parallel_degree > 1,
    )
    model = SimpleNamespace(model_args=config.model, modules=list)
    try:
        with mock.patch.object(checks, "refuse", _refuse):
            checks.check_job_config(config, ranks, known_converter_names(), builds_data=False)
            checks.check_against_spec(config, spec, builds_data=False)
        for device in ("cpu", "cuda"):
            with mock.patch("torchtitan.tools.utils.device_type", device):
                _refuse(device_limits(config, dims, model))
    except _Refused as found:
        return found.args
    return None


def refused_pairs() -> dict[tuple[str, str], tuple[str, str]]:
    """Return (feature, feature) -> (message, rule) of all pairs that a rule refuses."""
    alone = [name for name in FEATURES if refusal(name)]
    assert not alone, f"refused by themselves: {alone}"
    pairs = [
        pair
        for pair in itertools.combinations(FEATURES, 2)
        if not _EXCLUSIVE & {*FEATURES[pair[0]]} & {*FEATURES[pair[1]]}
    ]
    return {pair: found for pair in pairs if (found := refusal(*pair))}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    for (one, other), (message, rule) in refused_pairs().items():
        print(f"{one} + {other}: {message} [{rule}]")


if __name__ == "__main__":
    main()
