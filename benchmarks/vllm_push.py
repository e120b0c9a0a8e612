"""How fast trained weights get to a vLLM server: through files, and by its weight-transfer interface.

    scripts/run_vllm_tests.sh --collect-only -q        # makes the environment, once
    .venv-vllm/bin/python benchmarks/vllm_push.py [--dim 1024] [--layers 12] [--rounds 5]

One server and one trainer on this machine's CPUs, in fp32. Both ways take turns, round by round; a time
is from the call of `WeightSync.update` until the server has loaded all weights and emptied its prefix
cache. Files are on the disk that --folder names.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.unit.rl.toy import toy_config
from tests.vllm.server import make_folder, vllm_server
from torchtitan.engine import TrainingEngine
from torchtitan.rl.generator import build_generator
from torchtitan.rl.weight_sync import WeightSync

WAYS = {"files": "", "weight transfer, gloo": "gloo"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        measure(Path(temporary), args.rounds, f"dim={args.dim}, n_layers={args.layers}, n_heads=8")


def measure(folder: Path, rounds: int, model_args: str) -> None:
    shape = f"--model.args={model_args}"
    model = make_folder(folder / "model", shape)
    with vllm_server(model, folder / "log") as url:
        flags = [shape, f"--model.hf_assets_path={model}", "--rl.generator.backend=openai"]
        flags += [f"--rl.generator.url={url}", "--rl.generator.model=toy"]
        engine = TrainingEngine(toy_config(folder, *flags))
        syncs = {
            way: WeightSync(
                engine,
                build_generator(
                    toy_config(folder, *flags, f"--rl.generator.weight_transfer={key}"), engine
                ),
            )
            for way, key in WAYS.items()
        }
        n_bytes = sum(tensor.nbytes for _, tensor in engine.iter_hf_weights())
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(rounds + 1):
            for way, sync in syncs.items():
                started = time.perf_counter()
                sync.update()
                if number:  # the first makes the lane
                    seconds[way].append(time.perf_counter() - started)
        print(f"{n_bytes / 1e6:.0f} MB\n\n| way | median s | s per GB | all |\n|---|---|---|---|")
        for way, times in seconds.items():
            median = statistics.median(times)
            every = ", ".join(f"{t:.2f}" for t in times)
            print(f"| {way} | {median:.2f} | {median / n_bytes * 1e9:.2f} | {every} |")
        engine.close()


if __name__ == "__main__":
    main()
