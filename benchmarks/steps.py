"""Cost of a training step on the CPU, by model and layout; two packages side by side.

    python benchmarks/steps.py                                   # debug model and 50M, one process
    python benchmarks/steps.py --layouts 1 fsdp tp pp cp         # the debug model on two ranks
    python benchmarks/steps.py --compare ../before               # ratios to another checkout

The model trains on rows of random tokens, the same in every layout and package. Processes have one
thread each, and their CPU time counts, summed over ranks. All cases are alive at the same time and
take turns, a few steps each: other load on the machine meets all of them alike, and medians leave
out what it meets alone. With `--compare` a ratio is the median of the turns' ratios, ours over
theirs. The other package needs the reference's `torchtitan.train.Trainer`, no more. Where a package's
command line keeps freed memory, its ranks here do, too.

"of matmuls" is a step's FLOPs per CPU-second over what a product of matrices of such a step's shape
reaches, measured in every turn. Start-up is CPU-seconds from launch to the end of the first step.
Memory is the most that a rank had resident beyond what it had when torch was imported.
"""

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common import GIB, ROOT, matmul_rate, median_ratio, print_header, print_row, status_bytes

# name -> (dim, layers, heads, kv heads, vocabulary) or the package's own flavor, and rows x tokens
MODELS: dict[str, tuple[tuple[int, ...] | None, tuple[int, int]]] = {
    "debugmodel": (None, (4, 512)),
    "50M": ((512, 12, 8, 4, 8192), (2, 512)),
    "wide vocabulary": ((128, 2, 8, 8, 131072), (4, 2048)),
    "long rows": ((512, 2, 8, 8, 2048), (1, 8192)),
}
# name -> settings of two ranks
LAYOUTS = {
    "1": "",
    "fsdp": "parallelism.data_parallel_shard_degree=2",
    "ddp": "parallelism.data_parallel_replicate_degree=2 parallelism.data_parallel_shard_degree=1",
    "tp": "parallelism.tensor_parallel_degree=2",
    "pp": "parallelism.pipeline_parallel_degree=2",
    "cp": "parallelism.context_parallel_degree=2",
}


@dataclass(frozen=True)
class Case:
    model: str
    layout: str
    dtype: str
    compile: bool
    overrides: tuple[str, ...]
    seq_len: int | None = None

    @property
    def n_ranks(self) -> int:
        return 1 if self.layout == "1" else 2

    @property
    def rows(self) -> tuple[int, int]:
        rows, seq_len = MODELS[self.model][1]
        return rows, self.seq_len or seq_len


@dataclass
class Measured:
    """cpu_seconds: of each turn, per step, all ranks. losses: of every step of rank 0."""

    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    start_up: float = 0.0
    peak_gib: float = 0.0
    flops_per_token: float = 0.0


# ---- a rank, in a process of its own, which may import another package than this one ----


def serve(case: Case) -> None:
    """Read numbers of steps from stdin, run them, and answer with a line of JSON."""
    import torch

    torch.set_num_threads(1)
    resident = status_bytes("VmRSS")
    trainer, batches = _build(case)
    losses: list[float] = []
    forward_backward = trainer.forward_backward_step

    def keep_loss(*args, **kwargs):
        loss = forward_backward(*args, **kwargs)
        losses.append(float(loss.detach() if hasattr(loss, "detach") else loss))
        return loss

    trainer.forward_backward_step = keep_loss
    trainer.step = getattr(trainer, "step", 0)
    for line in sys.stdin:
        started = time.process_time()
        losses.clear()
        for _ in range(int(line)):
            trainer.step += 1
            trainer.train_step(batches)
        answer = {
            "cpu_seconds": time.process_time() - started,
            "since_launch": time.process_time(),
            "losses": losses,
            "peak_gib": (status_bytes("VmHWM") - resident) / GIB,
            "flops_per_token": trainer.metrics_processor.num_flops_per_token,
        }
        print("\n" + json.dumps(answer), flush=True)
    os._exit(0)  # without the farewell of process groups


def _build(case: Case):
    import torch

    from torchtitan.config import ConfigManager
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
    from torchtitan.train import Trainer

    with contextlib.suppress(ImportError):  # others don't have it
        from torchtitan.tools.host import keep_freed_memory

        keep_freed_memory()
    sizes, _ = MODELS[case.model]
    rows, seq_len = case.rows
    flavor = case.model.replace(" ", "_")
    if sizes is not None:
        names = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")
        sizes = dict(zip(names, sizes, strict=True))
        llama3_args[flavor] = TransformerModelArgs(**sizes, rope_theta=500000)
    dp = 2 if case.layout in ("fsdp", "ddp") else 1
    settings = f"""
        model.name=llama3 model.flavor={flavor} training.dataset=python_docs training.steps=100000
        training.local_batch_size={rows // dp} training.seq_len={seq_len}
        training.mixed_precision_param={case.dtype} activation_checkpoint.mode=none
        lr_scheduler.warmup_steps=2 metrics.log_freq=1000000 debug.seed=0
        job.dump_folder={tempfile.mkdtemp()} {LAYOUTS[case.layout]}
        {"compile.enable" if case.compile else ""}
    """.split()
    flags = [f"--{setting}" for setting in settings]
    trainer = Trainer(ConfigManager().parse_args([*flags, *case.overrides]))
    rank = int(os.environ.get("RANK", "0")) if dp == 2 else 0
    # Fewer tokens than entries: a wide vocabulary is not learnt in a few steps.
    generator = torch.Generator().manual_seed(0)
    n_entries = min(trainer.model_args.vocab_size, 2048)

    def batches():
        while True:
            tokens = torch.randint(0, n_entries, (rows, seq_len + 1), generator=generator)
            tokens = tokens.chunk(dp)[rank]
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    return trainer, trainer.batch_generator(batches())


# ---- the ranks of a case, seen from outside ----


class Ranks:
    """The processes of one case with one package; `measured` grows turn by turn."""

    def __init__(self, case: Case, package: Path):
        self.case, self.package, self.measured = case, package, Measured()
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        common = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(package),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        self.logs = [tempfile.NamedTemporaryFile("w+") for _ in range(case.n_ranks)]
        self.processes = []
        for rank in range(case.n_ranks):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.n_ranks}
            own = {key: str(value) for key, value in own.items()} if case.n_ranks > 1 else {}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--serve", json.dumps(asdict(case))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.logs[rank],
                    text=True,
                    env=os.environ | common | own,
                )
            )

    def run(self, n_steps: int, keep: bool = True) -> None:
        for process in self.processes:
            process.stdin.write(f"{n_steps}\n")
            process.stdin.flush()
        answers = [self._answer(rank) for rank in range(len(self.processes))]
        measured = self.measured
        if not measured.losses:
            measured.start_up = sum(answer["since_launch"] for answer in answers)
        # The last stage of a pipeline knows the loss; others may say something else.
        measured.losses += answers[-1]["losses"]
        measured.peak_gib = max(answer["peak_gib"] for answer in answers)
        measured.flops_per_token = answers[0]["flops_per_token"]
        if keep:
            total = sum(answer["cpu_seconds"] for answer in answers)
            measured.cpu_seconds.append(total / n_steps)

    def _answer(self, rank: int) -> dict:
        for line in self.processes[rank].stdout:
            if line.startswith('{"cpu_seconds"'):
                return json.loads(line)
        self.logs[rank].seek(0)
        tail = "".join(self.logs[rank].readlines()[-20:])
        raise SystemExit(f"{self.case} with {self.package} ended:\n{tail}")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def measure(case: Case, packages: list[Path], turns: int, n_steps: int) -> dict:
    import torch

    torch.set_num_threads(1)
    groups, rates = [Ranks(case, package) for package in packages], []
    try:
        for _ in range(2):  # connect, compile, allocate
            for group in groups:
                group.run(1, keep=False)
        for turn in range(turns):
            # Who is first alternates, too.
            for group in groups if turn % 2 == 0 else reversed(groups):
                group.run(n_steps)
            rates.append(matmul_rate(case.dtype))
    finally:
        for group in groups:
            group.close()
    ours = groups[0].measured
    seconds = statistics.median(ours.cpu_seconds)
    n_rows, seq_len = case.rows
    flops = ours.flops_per_token * n_rows * seq_len
    row = {
        **asdict(case),
        "tokens_per_cpu_second": n_rows * seq_len / seconds,
        "cpu_seconds": seconds,
        "share_of_matmul_rate": median_ratio([flops / s for s in ours.cpu_seconds], rates),
        "start_up": ours.start_up,
        "peak_gib": ours.peak_gib,
    }
    if len(groups) > 1:
        theirs = groups[1].measured
        row["ratio"] = median_ratio(ours.cpu_seconds, theirs.cpu_seconds)
        row["ratio_of_best"] = min(ours.cpu_seconds) / min(theirs.cpu_seconds)
        row["start_up_ratio"] = ours.start_up / theirs.start_up
        row["peak_ratio"] = ours.peak_gib / theirs.peak_gib if theirs.peak_gib else None
        losses = zip(ours.losses[:20], theirs.losses[:20], strict=True)
        row["loss_difference"] = max(abs(a - b) / abs(b) for a, b in losses)
    return row


COLUMNS = {
    "tokens_per_cpu_second": ("tokens/CPU-s", "{:.0f}"),
    "share_of_matmul_rate": ("of matmuls", "{:.0%}"),
    "peak_gib": ("memory, GiB", "{:.2f}"),
    "start_up": ("start-up, CPU-s", "{:.1f}"),
    "ratio": ("CPU-s, ratio", "{:.3f}"),
    "ratio_of_best": ("of best turns", "{:.3f}"),
    "peak_ratio": ("memory, ratio", "{:.2f}"),
    "start_up_ratio": ("start-up, ratio", "{:.2f}"),
    "loss_difference": ("losses differ", "{:.0e}"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--layouts", nargs="+", default=["1"], choices=LAYOUTS)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--seq-len", type=int, help="in place of the model's")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--override", nargs="+", default=[], help="of the config, without --")
    parser.add_argument("--compare", type=Path, help="folder of another torchtitan")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        case = json.loads(args.serve)
        sys.path[0] = os.environ["PYTHONPATH"]
        serve(Case(**case | {"overrides": tuple(case["overrides"])}))
        return
    packages = [ROOT, *([args.compare.resolve()] if args.compare else [])]
    models = args.models or (["debugmodel", "50M"] if args.layouts == ["1"] else ["debugmodel"])
    overrides = tuple(f"--{override}" for override in args.override)
    print(f"{_cpu_name()}, {os.cpu_count()} cores, one thread per process, {args.dtype}")
    rows = []
    for model in models:
        for layout in args.layouts:
            case = Case(model, layout, args.dtype, args.compile, overrides, args.seq_len)
            rows.append(measure(case, packages, args.turns, args.steps))
            if len(rows) == 1:
                shown = [name for name in COLUMNS if name in rows[0]]
                titles = ["model", "rows", "layout", *(COLUMNS[name][0] for name in shown)]
                print_header(*titles)
            cells = [COLUMNS[name][1].format(rows[-1][name]) for name in shown]
            print_row(model, "{} x {}".format(*case.rows), layout, *cells)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=2))


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
