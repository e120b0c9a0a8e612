"""How fast trained weights get to whoever serves them: two FSDP ranks, a model of Qwen3-0.6B's shape.

    python benchmarks/weight_push.py [--flavor 0.6B] [--rounds 2]

Takes turns, round by round, and the best round of each counts; a time is that of the slower rank.
The two ranks work at the same time in every case, in fp32, over gloo: a state dict of the live shards;
torch's gathered one; `iter_hf_weights`, whole tensors on every rank with their digest, and as shards; and
`push_model_state_dict` to a receiver that takes whole tensors, and to one that takes each rank's shards,
such as TorchStore. For comparison, a plain copy of as many bytes, tensor by tensor, and gloo's all-gather.

Weights are filled with a repeated block of numbers; about 10 GB of memory is needed for 0.6B.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from common import GB, print_header, print_row, take_turns

from torchtitan.testing.gloo import run_ranks

COPY = "plain copy"


class Receiver:
    """Looks at every weight and copies none."""

    policy_version, weight_names, weight_dtype = -1, "ours", None

    def __init__(self, takes_shards: bool):
        self.takes_shards = takes_shards

    def update_weights(self, weights: Any, *, check_digest: bool = True) -> None:
        exhaust(weights)
        self.policy_version = weights.version


def build(flavor: str) -> tuple[torch.nn.Module, Any]:
    """(model sharded over the ranks, adapter), without the cost of drawing its weights."""
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.parallelize import parallelize_decoder
    from torchtitan.protocols.train_spec import get_train_spec

    spec = get_train_spec("qwen3")
    args = spec.model_args[flavor]
    config = JobConfig()
    config.activation_checkpoint.mode = "none"
    config.training.mixed_precision_param = "float32"
    ranks = dist.get_world_size()
    dims = ParallelDims(
        dp_replicate=1, dp_shard=ranks, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=ranks
    )
    with torch.device("meta"):
        model = spec.model_cls(args)
    model = parallelize_decoder(model, dims, config).to_empty(device="cpu")
    block = torch.randn(2**20, generator=torch.Generator().manual_seed(dist.get_rank()))
    for parameter in model.parameters():
        for piece in parameter.to_local().detach().view(-1).split(block.numel()):
            piece.copy_(block[: piece.numel()])
    return model, spec.state_dict_adapter(args, None)


def exhaust(items: Iterable[Any]) -> None:
    for _ in items:
        pass


def seconds_on_rank(flavor: str, rounds: int) -> tuple[dict[str, float], int]:
    """Best seconds of each case on this rank, and the bytes of the weights."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from torchtitan.checkpoint.stream import WeightStream
    from torchtitan.rl.weight_sync import push_weights

    model, adapter = build(flavor)
    n_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    largest = max(p.numel() for p in model.parameters())
    source, target = torch.ones(largest), torch.ones(largest)
    # What `PolicyTrainer.push_model_state_dict` does, of an engine nothing but its weights.
    engine: Any = SimpleNamespace(
        model_parts=[model], device=torch.device("cpu"), weights_version=0, pp_schedule=None
    )

    def stream(**options: Any) -> None:
        exhaust(WeightStream([model], adapter, torch.device("cpu"), **options))

    def copy() -> None:
        for parameter in model.parameters():
            target[: parameter.numel()].copy_(source[: parameter.numel()])

    def all_gather() -> None:
        for parameter in model.parameters():
            local = parameter.to_local().detach().view(-1)
            whole = target[: local.numel() * dist.get_world_size()]
            dist.all_gather_into_tensor(whole, local)

    def now() -> float:
        dist.barrier()
        return time.perf_counter()

    gathered = StateDictOptions(full_state_dict=True)
    cases: dict[str, Callable[[], Any]] = {
        COPY: copy,
        "bare all-gather": all_gather,
        "state_dict(), live shards": model.state_dict,
        "gathered state dict": lambda: get_model_state_dict(model, options=gathered),
        "iter_hf_weights()": stream,
        "iter_hf_weights(dtype=bfloat16)": lambda: stream(dtype=torch.bfloat16),
        "iter_hf_weights(sharded=True)": lambda: stream(sharded=True),
        "push, whole tensors": lambda: push_weights(engine, Receiver(False)),
        "push, live shards": lambda: push_weights(engine, Receiver(True)),
    }
    times = take_turns(*cases.values(), turns=rounds, seconds=now)
    return dict(zip(cases, map(min, times), strict=True)), n_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--flavor", default="0.6B")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    ranks = run_ranks(seconds_on_rank, 2, args.flavor, args.rounds, timeout_seconds=3600)
    n_bytes = ranks[0][1]
    print(f"\nqwen3 {args.flavor}: {n_bytes / GB:.2f} GB in fp32, 2 ranks\n")
    print_header("case", "s", "time in plain copies")
    best = {name: max(times[name] for times, _ in ranks) for name in ranks[0][0]}
    for name, seconds in best.items():
        print_row(name, f"{seconds:.4f}", f"{seconds / best[COPY]:.2f}")


if __name__ == "__main__":
    main()
