"""The cost of adapters: CPU-seconds of a step and memory, against full training and a frozen model.

    python benchmarks/lora.py                        # 50M Llama, fp32, one process
    python benchmarks/lora.py --steps 20 --rank 64 --tokens 512     # a batch of two rows of 256

Three engines, each in a process of its own, take one step in turn, so that a change of the machine's speed
changes all three. "frozen" trains its norms only: what adapters cost beyond backward through a frozen
model. Prints CPU-seconds of a step (median), the medians of the rounds' ratios, and the memory that a
process has beyond that of its imports and of a step of a tiny model, at most.
"""

import argparse
import dataclasses
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection

from common import GIB, median_ratio, print_header, print_row, status_bytes

SIZES = {"dim": 512, "n_layers": 12, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 8192}
SMALL = {"dim": 64, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 256}
ROWS = 2
KINDS = ("full", "adapters", "frozen")


def serve(kind: str, rank: int, seq_len: int, folder: str, pipe: Connection) -> None:
    """Take a step for each message; answer with (CPU-seconds, GiB beyond the imports at most)."""
    import torch

    from tests.reliability.jobs import flags_in
    from torchtitan.config import ConfigManager
    from torchtitan.engine import TrainingEngine
    from torchtitan.protocols.train_spec import get_train_spec
    from torchtitan.tools.host import keep_freed_memory

    keep_freed_memory()  # as torchtitan.train does
    torch.set_num_threads(1)
    spec = get_train_spec("llama3")
    flags = {"full": [], "frozen": [], "adapters": ["--model.converters=lora"]}[kind]
    flags += [f"--lora.rank={rank}"] if kind == "adapters" else []

    def engine_of(sizes: dict) -> TrainingEngine:
        args = dataclasses.replace(spec.model_args["debugmodel"], **sizes)
        common = flags_in(f"""
            model.name=llama3 model.flavor=debugmodel job.dump_folder={folder} debug.seed=1
            training.seq_len={seq_len} training.local_batch_size={ROWS}
            training.mixed_precision_param=float32 activation_checkpoint.mode=none
            lr_scheduler.warmup_steps=0
        """)
        config = ConfigManager().parse_args([*common, *flags])
        changed = {
            "model_args": {"debugmodel": args},
            "build_optimizers_fn": frozen_first(kind, spec),
        }
        return TrainingEngine(config, train_spec=dataclasses.replace(spec, **changed))

    tokens = torch.randint(SMALL["vocab_size"], (ROWS, seq_len + 1))

    def step(engine: TrainingEngine) -> None:
        engine.forward_backward_step(
            input_dict={"input": tokens[:, :-1]},
            labels=tokens[:, 1:],
            global_valid_tokens=ROWS * seq_len,
        )
        engine.optim_step()

    with engine_of(SMALL) as engine:  # for the imports of a first step, which take 100 MiB
        step(engine)
    before = status_bytes("VmHWM")
    engine = engine_of(SIZES)
    while pipe.recv():
        start = time.process_time()
        step(engine)
        seconds = time.process_time() - start
        pipe.send((seconds, (status_bytes("VmHWM") - before) / GIB))
    engine.close()


def frozen_first(kind: str, spec):
    """Return the spec's builder of optimizers; for "frozen" it first freezes all but the norms."""

    def build(model_parts, *others):
        for name, parameter in model_parts[0].named_parameters():
            parameter.requires_grad_(kind != "frozen" or "norm" in name)
        return spec.build_optimizers_fn(model_parts, *others)

    return build if kind == "frozen" else spec.build_optimizers_fn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="of each kind, after two to warm up")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024, help="of a step, in two rows")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipes, results = {}, {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            pipes[kind], other = context.Pipe()
            arguments = (kind, options.rank, options.tokens // ROWS, f"{folder}/{kind}", other)
            context.Process(target=serve, args=arguments, daemon=True).start()
        for step in range(options.steps + 2):
            for kind, pipe in pipes.items():
                pipe.send(True)
                result = pipe.recv()
                if step >= 2:
                    results[kind].append(result)
        for pipe in pipes.values():
            pipe.send(False)
    seconds = {kind: [x for x, _ in pairs] for kind, pairs in results.items()}
    memory = {kind: max(x for _, x in pairs) for kind, pairs in results.items()}
    print(f"rank {options.rank}, {options.tokens} tokens, {options.steps} steps")
    print_header("trains", "CPU-s of a step", "of full", "of frozen", "GiB", "of full")
    for kind, own in seconds.items():
        ratios = (f"{median_ratio(own, seconds[other]):.2f}" for other in ("full", "frozen"))
        sizes = f"{memory[kind]:.2f}", f"{memory[kind] / memory['full']:.2f}"
        print_row(kind, f"{statistics.median(own):.3f}", *ratios, *sizes)


if __name__ == "__main__":
    main()
