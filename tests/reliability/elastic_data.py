"""Kill the reading of data at random instants, go on with other ranks and workers, compare all rows.

    python -m tests.reliability.elastic_data --rows 10000

Each phase reads a random number of steps, saves the position with torch's distributed checkpoint, and
reads on for a while before it is killed. The next phase goes on from the saved position with another
number of ranks, rows per microbatch and data workers. Every row has to equal the unbroken run's.
The ranks of a phase are simulated in this process.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from torchtitan.config import ConfigManager
from torchtitan.config.job_config import MixtureSource, Training
from torchtitan.data.dataloader import ParallelAwareDataloader
from torchtitan.data.text_datasets import build_text_dataloader
from torchtitan.data.token_files import smallest_type, write_pair
from torchtitan.data.tokenizer import HuggingFaceTokenizer

GLOBAL_BATCH_SIZE = 12
SEQ_LEN = 64
# (ranks, rows per microbatch, data workers of each rank)
PHASES = [(4, 1, 0), (1, 12, 2), (3, 2, 1), (2, 3, 0), (4, 3, 2), (1, 4, 1), (2, 6, 0)]


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """Write JSON lines, unless the file exists. Returns its path."""
    if not path.exists():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(n: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield texts whose lengths run from a few tokens to several rows."""
    generator = random.Random(seed)
    for number in range(n):
        words = ["the", "of", "a", str(number)] * round(generator.lognormvariate(2.5, 1))
        yield {"text": f"{seed} {' '.join(words)}"}


def mixture(training: Training, folder: Path) -> None:
    training.mixture = [
        MixtureSource("local", write_lines(folder / "a.jsonl", texts(700, 1)), weight=0.7),
        MixtureSource("local", write_lines(folder / "b.jsonl", texts(90, 2)), weight=0.3),
    ]


def tokens(training: Training, folder: Path) -> None:
    training.dataset, training.dataset_path = "tokens", str(folder / "pair")
    if not (folder / "pair.idx").exists():
        generator = np.random.default_rng(3)
        lengths = generator.lognormal(3.5, 1, 700).astype(int) + 1
        documents = [generator.integers(0, 2000, length) for length in lengths]
        write_pair(training.dataset_path, documents, smallest_type(2000))


TEMPLATE = """{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}
{{- m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\\n' }}{% endfor %}"""


def chats(training: Training, folder: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        generator = random.Random(4)
        for number in range(700):
            roles = ["user", "assistant"] * generator.randint(1, 6)
            yield {"messages": [{"role": r, "content": f"the {number} of a"} for r in roles]}

    training.dataset, training.too_long = "chat", "cut"
    training.dataset_path = write_lines(folder / "chats.jsonl", rows())
    training.chat_template = str(folder / "template.jinja")
    Path(training.chat_template).write_text(TEMPLATE)


KINDS = {"mixture": mixture, "tokens": tokens, "chats": chats}
PACKINGS = ("concat", "fit", "none")


def build(
    prepare: Callable[[Training], None], packing: str, ranks: int, local: int, workers: int
) -> list[ParallelAwareDataloader]:
    flags = f"""
        seq_len={SEQ_LEN} global_batch_size={GLOBAL_BATCH_SIZE} local_batch_size={local}
        dataloader.num_workers={workers} packing={packing} shuffle
    """.split()
    config = ConfigManager().parse_args([f"--training.{flag}" for flag in flags])
    prepare(config.training)
    tokenizer = HuggingFaceTokenizer("tests/assets/tokenizer")
    return [build_text_dataloader(ranks, rank, tokenizer, config) for rank in range(ranks)]


def steps_of(loaders: list[ParallelAwareDataloader]) -> Iterator[torch.Tensor]:
    """Yield each global batch: inputs and labels [G, 2 T]."""
    readers = [iter(loader) for loader in loaders]
    per_rank = GLOBAL_BATCH_SIZE // len(loaders)
    while True:
        rows = [
            torch.cat([input_dict["input"], labels], dim=1)
            for reader, loader in zip(readers, loaders, strict=True)
            for input_dict, labels in islice(reader, per_rank // loader.batch_size)
        ]
        yield torch.cat(rows)


def run(kind: str, folder: Path, n_rows: int, packing: str, seed: int = 0) -> int:
    """Return the number of rows, all of which were equal; raises AssertionError for another row."""
    prepare = partial(KINDS[kind], folder=folder)
    generator = random.Random(seed)
    expected = steps_of(build(prepare, packing, 1, GLOBAL_BATCH_SIZE, 0))
    states: dict[str, Any] = {}
    n_equal = phase = 0
    while n_equal < n_rows:
        ranks, local, workers = PHASES[phase % len(PHASES)]
        phase += 1
        loaders = build(prepare, packing, ranks, local, workers)
        for loader in loaders:
            loader.load_state_dict(states)
        steps = steps_of(loaders)
        for _ in range(generator.randint(1, 1 + n_rows // GLOBAL_BATCH_SIZE // 8)):
            rows = next(steps)
            assert rows.equal(next(expected)), f"phase {phase} of {packing}: another row"
            n_equal += len(rows)
        saved: dict[str, Any] = {}
        for loader in loaders:
            saved |= loader.state_dict()
        for _ in range(generator.randint(0, 2)):
            next(steps)  # lost in the kill
        states = _saved_and_loaded(saved, folder / "checkpoint")
    return n_equal


def _saved_and_loaded(states: dict[str, Any], folder: Path) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    loaded = {"dataloader": dict.fromkeys(states, b"")}
    with warnings.catch_warnings():  # of there being no process group
        warnings.simplefilter("ignore")
        dcp.save({"dataloader": states}, checkpoint_id=str(folder), no_dist=True)
        dcp.load(loaded, checkpoint_id=str(folder), no_dist=True)
    return loaded["dataloader"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for kind in KINDS:
        for packing in PACKINGS:
            with tempfile.TemporaryDirectory() as folder:
                n = run(kind, Path(folder), arguments.rows, packing, arguments.seed)
            print(f"{kind:8} {packing:6}: {n:,} rows equal to the unbroken run's", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
