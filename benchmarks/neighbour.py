"""What a busy neighbour on the machine costs a run on the CPU, by how OpenMP's threads wait.

    python benchmarks/neighbour.py                      # one process
    python benchmarks/neighbour.py --ranks 2            # torchrun
    python benchmarks/neighbour.py --spin default 5000 passive --nice 0

Each case trains a preset for some steps, without neighbours and beside one busy process per core but one;
cases take turns. `--spin` says how threads wait for each other: as libgomp does by itself ("default"), for
so many turns of a loop before they sleep (`GOMP_SPINCOUNT`), or not at all ("passive"). Tokens per second
are medians over the steps after the first five, from the run's metrics.jsonl.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRESET = "torchtitan/models/llama3/train_configs/python_docs.toml"


@contextlib.contextmanager
def busy_neighbours(count: int, nice: int) -> Iterator[None]:
    """So many niced processes that never sleep."""
    spin = [sys.executable, "-c", f"import os\nos.nice({nice})\nwhile True: pass"]
    neighbours = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def environment_of(spin: str) -> dict[str, str]:
    environment = {
        k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    if spin == "passive":
        environment["OMP_WAIT_POLICY"] = "passive"
    elif spin == "default":
        environment["GOMP_SPINCOUNT"] = "300000"  # libgomp's own, with no more threads than cores
    else:
        environment["GOMP_SPINCOUNT"] = spin
    return environment


def tokens_per_second(spin: str, ranks: int, steps: int, overrides: list[str]) -> float:
    """Of all ranks together."""
    launcher = [] if ranks == 1 else ["torch.distributed.run", f"--nproc-per-node={ranks}", "-m"]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", *launcher, "torchtitan.train", "--job.config_file", PRESET,
            f"--job.dump_folder={folder}", f"--training.steps={steps}", "--metrics.log_freq=1", "--metrics.enable_jsonl",
            "--checkpoint.no-enable", *overrides,
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, env=environment_of(spin), check=True, capture_output=True)
        lines = next(Path(folder).rglob("metrics.jsonl")).read_text().splitlines()
    rates = [json.loads(line)["throughput(tps)"] for line in lines[5:]]
    return ranks * statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--nice", type=int, default=10, help="of the neighbours")
    parser.add_argument("--spin", nargs="+", default=["default", "5000", "passive"])
    args, overrides = parser.parse_known_args()
    cores = len(os.sched_getaffinity(0))
    found: dict[tuple[str, bool], list[float]] = {}
    for turn in range(args.turns):
        for spin in args.spin:
            for beside in (False, True):
                with busy_neighbours(max(cores - 1, 1) if beside else 0, args.nice):
                    rate = tokens_per_second(spin, args.ranks, args.steps, overrides)
                found.setdefault((spin, beside), []).append(rate)
                what = "with neighbours" if beside else "quiet"
                print(f"turn {turn + 1}, {spin}, {what}: {rate:,.0f} tokens/s", file=sys.stderr)
    print(f"{platform.processor() or platform.machine()}, {cores} cores, {args.ranks} processes")
    print("| waiting | quiet tokens/s | with neighbours | share |\n|---|---|---|---|")
    for spin in args.spin:
        quiet, beside = (statistics.median(found[spin, x]) for x in (False, True))
        print(f"| {spin} | {quiet:,.0f} | {beside:,.0f} | {beside / quiet:.0%} |")


if __name__ == "__main__":
    main()
