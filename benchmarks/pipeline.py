"""What microbatches of unlike lengths cost in a pipeline, and how large its bubble is.

    python benchmarks/pipeline.py --ranks 2
    python benchmarks/pipeline.py --ranks 2 4 --schedules 1F1B Interleaved1F1B --repeats 5

Every rank is one process with one thread on gloo. Time is the fastest of the repeats, wall-clock,
so give the machine as many free cores as ranks.

    tokens sent     over the wire in one step, counted where they are sent, both directions
    tokens needed   sum of all lengths, times the hand-overs between ranks, both directions
    padded          every microbatch as long as the longest
    bubble          1 - busy / (ranks * time of a step), busy being the time that one process takes
                    for the same microbatches; in theory (p - 1) / (m + p - 1) for 1F1B and GPipe, and
                    (p - 1) / (v m + p - 1) with v stages per rank
"""

import argparse
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import Call, take_turns

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.parallelize import parallelize_decoder
from torchtitan.testing.gloo import run_ranks

LENGTHS = [256, 136, 384, 72, 320, 264, 168, 512]
VOCAB = 1024


def model_args() -> TransformerModelArgs:
    # Equal stages: a small vocabulary, and as many layers in every stage.
    return TransformerModelArgs(dim=256, n_layers=8, n_heads=4, vocab_size=VOCAB, max_seq_len=1024)


def sum_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = torch.nn.functional.cross_entropy
    return loss(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def meta_model() -> Transformer:
    with torch.device("meta"):
        return Transformer(model_args())


def fill(model: torch.nn.Module) -> torch.nn.Module:
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    return model


def tokens_of(lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (1, length), generator=generator) for length in lengths]


def fastest(runs: dict[str, Call], repeats: int) -> dict[str, float]:
    """Wall seconds of each, the best of `repeats`; they take turns, so that a disturbance meets all."""

    def now() -> float:
        if dist.is_initialized():
            dist.barrier()
        return time.perf_counter()

    times = take_turns(*runs.values(), turns=repeats, seconds=now)
    return dict(zip(runs, map(min, times), strict=True))


def one_process(repeats: int) -> dict[str, float]:
    model = fill(meta_model())

    def run(lengths: list[int]) -> None:
        for tokens in tokens_of(lengths):
            sum_loss(model(tokens), tokens).backward()
        model.zero_grad()

    return fastest({"unlike": lambda: run(LENGTHS), "equal": lambda: run(_equal())}, repeats)


def _equal() -> list[int]:
    return [sum(LENGTHS) // len(LENGTHS)] * len(LENGTHS)


def on_ranks(ranks: int, schedule_name: str, repeats: int) -> dict[str, float]:
    config = JobConfig()
    config.activation_checkpoint.mode = "none"
    config.parallelism.pipeline_parallel_degree = ranks
    config.parallelism.pipeline_parallel_schedule = schedule_name
    config.parallelism.pipeline_parallel_first_stage_less_layers = 0
    config.parallelism.pipeline_parallel_last_stage_less_layers = 0
    schedule, parts, first, last = pipeline_llm(
        meta_model(),
        ParallelDims(1, 1, 1, 1, ranks, 1, 1, ranks),
        config,
        torch.device("cpu"),
        model_args(),
        parallelize_decoder,
        sum_loss,
    )
    for part in parts:
        fill(part)
    sent = [0]
    dist.batch_isend_irecv = _counting(dist.batch_isend_irecv, sent)

    def run(lengths: list[int], known: bool, forward_only: bool = False) -> None:
        tokens = tokens_of(lengths)
        call = schedule.eval if forward_only else schedule.step
        call(
            arg_mbs=[(entry,) for entry in tokens],
            kwarg_mbs=[{}] * len(tokens),
            target_mbs=tokens if last else None,
            losses=[],
            return_outputs=False,
            input_shapes=[(1, length) for length in lengths] if known else None,
        )
        for part in parts:
            part.zero_grad()

    padded = [max(LENGTHS)] * len(LENGTHS)
    counts = {}
    for name, lengths in (("unlike", LENGTHS), ("padded", padded)):
        sent[0] = 0
        run(lengths, True)
        total = torch.tensor(sent[0])
        dist.all_reduce(total)
        counts[name] = int(total)
    arguments = {
        "unlike": (LENGTHS, True),
        "unlike, shapes told": (LENGTHS, False),
        "padded": (padded, True),
        "equal": (_equal(), True),
        "unlike, forward": (LENGTHS, True, True),
        "padded, forward": (padded, True, True),
    }
    times = fastest({name: partial(run, *args) for name, args in arguments.items()}, repeats)
    return {
        "sent": counts["unlike"],
        "sent padded": counts["padded"],
        "hand-overs": schedule.num_stages - 1,
        "stages": len(schedule.stages),
        **times,
    }


def _counting(send: Any, sent: list[int]) -> Any:
    def counted(messages: list[dist.P2POp]) -> Any:
        for message in messages:
            if message.op is dist.isend:
                sent[0] += message.tensor.shape[0] * message.tensor.shape[1]
        return send(messages)

    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--schedules", nargs="+", default=["1F1B", "Interleaved1F1B"])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    (busy,) = run_ranks(one_process, 1, options.repeats, timeout_seconds=600)
    m = len(LENGTHS)
    print(f"{m} microbatches of {LENGTHS} tokens; one process: {busy['unlike']:.2f} s")
    print("padding to the longest needs", f"{max(LENGTHS) * m / sum(LENGTHS):.2f} x the tokens")
    for ranks in options.ranks:
        for name in options.schedules:
            arguments = ranks, name, options.repeats
            result, *_ = run_ranks(on_ranks, ranks, *arguments, timeout_seconds=600)
            needed = 2 * sum(LENGTHS) * result["hand-overs"]
            v = result["stages"]
            theory = (ranks - 1) / (v * m + ranks - 1)
            bubble = {k: 1 - busy[k] / (ranks * result[k]) for k in ("equal", "unlike")}
            print(f"\n{name} on {ranks} ranks, {v} stage(s) each")
            print(
                f"  tokens sent {result['sent']}, needed {needed}, padded {result['sent padded']}"
            )
            for kind in ("unlike", "unlike, shapes told", "padded", "equal"):
                print(f"  step, {kind:20} {result[kind] * 1e3:8.0f} ms")
            print(f"  padded / unlike      {result['padded'] / result['unlike']:.2f} x")
            forward = result["padded, forward"] / result["unlike, forward"]
            print(f"  forward only         {forward:.2f} x")
            print(
                f"  bubble               {bubble['equal']:.1%} with equal lengths, "
                f"{bubble['unlike']:.1%} with unlike; in theory {theory:.1%}"
            )


if __name__ == "__main__":
    main()
