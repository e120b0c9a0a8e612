"""How fast trained weights get to whoever serves them: two FSDP ranks, a model of Qwen3-0.6B's shape.

    python benchmarks/weight_push.py [--flavor 0.6B] [--rounds 2]

Takes turns, round by round, and the best round of each counts; a time is that of the slower rank.
The two ranks work at the same time in every case, in fp32, over gloo:

- a state dict without a gather: the live shards, under their names;
- the gathered state dict of torch, whole on every rank;
- `iter_hf_weights`, whole tensors, one after another, on every rank: with its digest, and cast;
- the same as shards that the rank holds;
- `push_model_state_dict` to a receiver that takes whole tensors, with the digest, and to one that
  takes each rank's shards as they are, such as TorchStore;
- for comparison, a plain copy of as many bytes, tensor by tensor, and gloo's bare all-gather.

Weights are filled with a repeated block of numbers; about 10 GB of memory is needed for 0.6B.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from torchtitan.testing.gloo import run_ranks

GB = 1e9
STATE_DICT, GATHERED = "state_dict(), live shards", "gathered state dict"
LIVE = "WeightStream.state_dict()"
COPY, ALL_GATHER = "plain copy", "bare all-gather"
WHOLE, CAST = "iter_hf_weights()", "iter_hf_weights(dtype=bfloat16)"
SHARDED, DIGEST = "iter_hf_weights(sharded=True)", "digest alone"
PUSH_WHOLE, PUSH_SHARDS = "push, whole tensors", "push, live shards"


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

    from torchtitan.checkpoint.stream import WeightStream, digest_of
    from torchtitan.rl.weight_sync import OurNames, push_weights

    model, adapter = build(flavor)
    n_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    largest = max(p.numel() for p in model.parameters())
    source, target = torch.ones(largest), torch.ones(largest)

    def stream(**options: Any) -> WeightStream:
        return WeightStream([model], adapter, torch.device("cpu"), **options)

    # What `PolicyTrainer.push_model_state_dict` does, of an engine nothing but its weights.
    engine: Any = SimpleNamespace(
        model_parts=[model], device=torch.device("cpu"), weights_version=0, pp_schedule=None
    )

    def push(takes_shards: bool) -> None:
        push_weights(engine, Receiver(takes_shards))

    def copy() -> None:
        for parameter in model.parameters():
            target[: parameter.numel()].copy_(source[: parameter.numel()])

    def all_gather() -> None:
        for parameter in model.parameters():
            local = parameter.to_local().detach().view(-1)
            whole = target[: local.numel() * dist.get_world_size()]
            dist.all_gather_into_tensor(whole, local)

    def digest() -> None:
        digest_of(
            (name, source[: parameter.numel()]) for name, parameter in model.named_parameters()
        )

    cases: dict[str, Callable[[], Any]] = {
        STATE_DICT: model.state_dict,
        LIVE: lambda: WeightStream.from_engine(engine, OurNames()).state_dict(),
        PUSH_SHARDS: lambda: push(takes_shards=True),
        GATHERED: lambda: get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True)
        ),
        COPY: copy,
        ALL_GATHER: all_gather,
        DIGEST: digest,
        WHOLE: lambda: exhaust(stream()),
        CAST: lambda: exhaust(stream(dtype=torch.bfloat16)),
        SHARDED: lambda: exhaust(stream(sharded=True)),
        PUSH_WHOLE: lambda: push(takes_shards=False),
    }
    best = dict.fromkeys(cases, float("inf"))
    quick = [(name, cases[name]) for name in (STATE_DICT, LIVE, PUSH_SHARDS)] * 10
    for name, case in [*cases.items(), *quick] * rounds:
        dist.barrier()
        started = time.perf_counter()
        case()
        best[name] = min(best[name], time.perf_counter() - started)
    return best, n_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--flavor", default="0.6B")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    ranks = run_ranks(seconds_on_rank, 2, args.flavor, args.rounds, timeout_seconds=3600)
    best = {name: max(times[name] for times, _ in ranks) for name in ranks[0][0]}
    n_bytes = ranks[0][1]
    print(f"\nqwen3 {args.flavor}: {n_bytes / GB:.2f} GB in fp32, 2 ranks\n")
    print("| case | s | GB/s | time in plain copies |\n|---|---:|---:|---:|")
    for name, seconds in best.items():
        rate = "" if name in (STATE_DICT, LIVE, PUSH_SHARDS) else f"{n_bytes / GB / seconds:.2f}"
        print(f"| {name} | {seconds:.4f} | {rate} | {seconds / best[COPY]:.2f} |")
    print(
        f"\nWeightStream.state_dict() / state_dict(): {best[LIVE] / best[STATE_DICT]:.2f}; "
        f"push of live shards / state_dict(): {best[PUSH_SHARDS] / best[STATE_DICT]:.2f}\n"
        f"gathered / live state dict: {best[GATHERED] / best[STATE_DICT]:.0f} times the time; "
        f"stream / gathered state dict: {best[WHOLE] / best[GATHERED]:.2f}; "
        f"push of whole tensors / of live shards: {best[PUSH_WHOLE] / best[PUSH_SHARDS]:.0f}"
    )


if __name__ == "__main__":
    main()
