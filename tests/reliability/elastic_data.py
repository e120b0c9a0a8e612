"""Resume the data on other numbers of ranks and data workers, and count every sample.

    python -m tests.reliability.elastic_data --samples 10000 --phases 4,1,3,2

A sample's text is its number, so that what the ranks were given tells which samples were lost or
came twice. Each phase reads a part of what is left, saves the position with torch's distributed
checkpoint and hands it to the next one; the last phase reads to the end. The ranks of a phase are
simulated in this process.
"""

import argparse
import json
import pickle
import shutil
import sys
import tempfile
import warnings
from collections import Counter, deque
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from torchtitan.data.dataloader import ParallelAwareDataloader, _reader_states
from torchtitan.data.document_share import DocumentShare
from torchtitan.data.text_datasets import HuggingFaceTextDataset
from torchtitan.data.tokenizer import BaseTokenizer


class SampleTokenizer(BaseTokenizer):
    """The text "7 3" is three tokens of the id 7."""

    def encode(self, text: str, **_: Any) -> list[int]:
        number, length = map(int, text.split()) if text else (0, 0)
        return [number] * length

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return " ".join(map(str, token_ids))

    def get_vocab_size(self) -> int:
        return 2**31


def token_counts(n_samples: int, seq_len: int, packed: bool) -> list[int]:
    """How many tokens each sample has: exactly a row, or less and more than that."""
    if not packed:
        return [seq_len + 1] * n_samples
    return [1 + (number * 7) % (3 * seq_len) for number in range(n_samples)]


def run(
    folder: Path, n_samples: int, phases: Iterable[int], workers: Iterable[int], packed: bool
) -> dict[str, int]:
    """Counts of what came of the samples; those of "lost" and "repeated" should be 0.

    workers: data workers per rank of each phase.
    """
    seq_len, batch_size = 16, 2
    counts = token_counts(n_samples, seq_len, packed)
    data = folder / "data.jsonl"
    with open(data, "w") as file:
        for number, count in enumerate(counts):
            file.write(json.dumps({"text": f"{number} {count}"}) + "\n")

    drawn: Counter[int] = Counter()
    states: dict[str, Any] = {}
    phases = list(phases)
    rows_left = sum(counts) // (seq_len + 1)
    for phase, (n_ranks, num_workers) in enumerate(zip(phases, workers, strict=True)):
        is_last = phase + 1 == len(phases)
        # A part of what is left; less than all, so that no rank's data end.
        n_batches = rows_left // (len(phases) - phase + 1) // n_ranks // batch_size
        merged: dict[str, Any] = {}
        for rank in range(n_ranks):
            dataset = HuggingFaceTextDataset(
                "local", str(data), SampleTokenizer(), seq_len, rank, n_ranks
            )
            loader = ParallelAwareDataloader(
                dataset, rank, n_ranks, batch_size=batch_size, num_workers=num_workers
            )
            loader.load_state_dict(states)
            for input_dict, labels in islice(loader, None if is_last else n_batches):
                # [B, T + 1]: inputs, and the last label.
                drawn.update(input_dict["input"].flatten().tolist())
                drawn.update(labels[:, -1].tolist())
                rows_left -= len(labels)
            merged |= loader.state_dict()
        states = _saved_and_loaded(merged, folder / "checkpoint")
    left_over = _left_over(states, counts)
    seen = drawn + left_over
    return {
        "samples": n_samples,
        "tokens": sum(counts),
        "read": sum(drawn.values()),
        "left over": sum(left_over.values()),
        "lost": sum(seen[number] < count for number, count in enumerate(counts)),
        "repeated": sum(seen[number] > count for number, count in enumerate(counts)),
    }


def _saved_and_loaded(states: dict[str, Any], folder: Path) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    loaded = {"dataloader": dict.fromkeys(states, b"")}
    with warnings.catch_warnings():  # of there being no process group
        warnings.simplefilter("ignore")
        dcp.save({"dataloader": states}, checkpoint_id=str(folder), no_dist=True)
        dcp.load(loaded, checkpoint_id=str(folder), no_dist=True)
    return loaded["dataloader"]


def _left_over(states: dict[str, Any], counts: list[int]) -> Counter[int]:
    """Tokens that are in no batch: each reader's last ones are less than a row, or a batch."""
    loaders = [pickle.loads(state) for name, state in states.items() if name != "world_size"]
    left: Counter[int] = Counter()
    for reader in (reader for loader in loaders for reader in _reader_states(loader)):
        for place in reader["open"]:
            if "tokens" in place:
                left.update(place["tokens"])
            else:
                left[place["number"]] += counts[place["number"]] - place["used"]
        share = DocumentShare(
            reader["reader"],
            reader["num_readers"],
            reader["base"],
            reader["sample_idx"],
            deque(reader["pending"]),
        )
        for number in share.not_taken_below(len(counts)):
            left[number] += counts[number]
    return left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument(
        "--phases", default="4,1,3,2", help="data-parallel ranks, one after another"
    )
    arguments = parser.parse_args()
    phases = [int(n) for n in arguments.phases.split(",")]
    failed = False
    for packed in (True, False):
        for workers in (
            [0] * len(phases),
            [2] * len(phases),
            [i % 2 * 2 for i in range(len(phases))],
        ):
            with tempfile.TemporaryDirectory() as folder:
                found = run(Path(folder), arguments.samples, phases, workers, packed)
            failed |= bool(found["lost"] or found["repeated"])
            rows = "packed" if packed else "a document per row"
            print(
                f"{rows:20} ranks {phases} workers {workers}: "
                + ", ".join(f"{n:,} {name}" for name, n in found.items()),
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
