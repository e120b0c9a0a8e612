"""The cost of a generating rank's weight updates: the trainer's step, seconds per GB, bytes.

    python benchmarks/rl_push.py [--dim 512] [--layers 8] [--rows 64] [--rounds 3] [--gigabits 1]

One rank trains and pushes bf16 weights after every step; the other takes them and draws nothing. Steps
without a push, with a push on the trainer's own thread, and with pushes beside the next step take turns,
block by block; whole weights, or `rl.weight_sync.delta`. The first step of a block does not count. The
learning rate is from examples/rl/word_problems/qwen3_0.6b.toml. With --gigabits, the sender sleeps as
long as a link of that speed would take. A push takes from its call until the receiver has all weights.
Cells have the median and the smallest value.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.unit.rl.toy import toy_config, toy_samples
from torchtitan.testing.gloo import run_ranks

GB = 1e9
NO_PUSH, ON_THREAD = "no push", "whole, on the trainer's thread"
# name -> (delta, the next step waits for the push)
WAYS: dict[str, tuple[bool, bool] | None] = {
    NO_PUSH: None,
    ON_THREAD: (False, True),
    "whole, beside": (False, False),
    "delta, waited for": (True, True),
    "delta, beside": (True, False),
}


def run(folder: str, flags: list[str], args: argparse.Namespace) -> dict[str, Any] | None:
    from torchtitan.checkpoint.stream import WeightStream
    from torchtitan.engine import TrainingEngine
    from torchtitan.rl import roles
    from torchtitan.rl.batcher import Batcher
    from torchtitan.rl.generator import PolicyModel
    from torchtitan.rl.policy import PolicyTrainer
    from torchtitan.rl.weight_changes import WeightChanges
    from torchtitan.rl.weight_sync import OurNames, copied, send_weights

    config = toy_config(folder, *flags)
    role = roles.join_role(config)
    link = role.link
    assert link is not None
    if role.generates:
        part = roles.GeneratorRank(config, link, role.first_generator)
        update = part.generator.update_weights

        def reporting_update(*arguments: Any, **options: Any) -> None:
            update(*arguments, **options)
            link.send(time.perf_counter())  # both ranks have this machine's clock

        part.generator.update_weights = reporting_update
        part.train()
        part.close()
        return None

    trainer = PolicyTrainer(config, engine=TrainingEngine(config))
    remote = roles.RemoteGenerator(link, role.first_generator)
    remote.take_policy(PolicyModel.of_engine(trainer.engine))
    batch = Batcher.from_config(config, 1).batch(toy_samples(args.rows))
    changes, n_bytes, pushed = WeightChanges(), 0, 0.0
    broadcast = roles.dist.broadcast

    def counting_broadcast(tensor: torch.Tensor, *arguments: Any, **options: Any) -> None:
        nonlocal n_bytes
        if options.get("group") is link.down:
            n_bytes += tensor.nbytes
            if args.gigabits:
                time.sleep(tensor.nbytes * 8 / (args.gigabits * 1e9))
        broadcast(tensor, *arguments, **options)

    roles.dist.broadcast = counting_broadcast
    found: dict[str, Any] = {
        way: {"step": [], "cpu": [], "push": [], "bytes": [], "staged": []} for way in WAYS
    }
    for _ in range(args.rounds):
        for way, how in WAYS.items():
            rows = found[way]
            for number in range(args.steps + 1):
                started, cpu = time.perf_counter(), time.thread_time()
                trainer.forward_backward(batch)
                trainer.optim_step()
                row = {}
                if how is not None:
                    delta, waits = how
                    if number and not waits:
                        (received,) = link.receive_from_all()
                        rows["push"].append(received - pushed)
                        rows["bytes"].append(n_bytes)
                    n_bytes, pushed = 0, time.perf_counter()
                    if way == ON_THREAD:
                        link.broadcast(("weights", True))
                        weights = WeightStream.from_engine(
                            trainer.engine, OurNames(), dtype=remote.weight_dtype
                        )
                        pairs = copied(weights, torch.device("cpu"))
                        send_weights(weights, link.down, 0, pairs=pairs)
                    else:
                        remote._changes = changes if delta else None
                        trainer.push_model_state_dict(remote)
                    row["staged"] = time.perf_counter() - pushed
                    if waits:
                        (received,) = link.receive_from_all()
                        row |= {"push": received - pushed, "bytes": n_bytes}
                row |= {"step": time.perf_counter() - started, "cpu": time.thread_time() - cpu}
                for name, value in row.items() if number else ():
                    rows[name].append(value)
            if how is not None and not how[1]:
                link.receive_from_all()
    remote.close()
    trainer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gigabits", type=float, default=0.0)
    args = parser.parse_args()
    flags = [f"--model.args=dim={args.dim}, n_layers={args.layers}, n_heads=8"]
    flags += ["--rl.generator.ranks=1", "--rl.async_steps=1", f"--optimizer.lr={args.lr}"]
    flags += [f"--rl.generator.dtype={args.dtype}", "--training.local_batch_size=64"]
    flags += ["--training.steps=100000", "--lr_scheduler.decay_ratio=0.0"]
    options = {"timeout_seconds": 7200, "init_process_group": False}
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(run, 2, folder, flags, args, **options)[0]
    median, best = (
        {
            way: {name: of(values) for name, values in rows.items() if values}
            for way, rows in found.items()
        }
        for of in (statistics.median, min)
    )
    n_bytes = median[ON_THREAD]["bytes"]
    print(f"{n_bytes / 1e6:.0f} MB of weights in {args.dtype}\n")
    print(
        "| way | step, s | CPU of its thread, s | on that thread, s per GB | push, s per GB | MB |"
    )
    print("|---|---|---|---|---|---|")
    for way in WAYS:
        cells = [f"{median[way][key]:.3f}, {best[way][key]:.3f}" for key in ("step", "cpu")]
        for key in ("staged", "push"):
            rate = [f"{of[way][key] / n_bytes * GB:.2f}" for of in (median, best) if key in of[way]]
            cells.append(", ".join(rate))
        cells.append(f"{median[way]['bytes'] / 1e6:.1f}" if "bytes" in median[way] else "")
        print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
