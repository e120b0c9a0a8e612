"""Tokens per CPU-second of reading, tokenising and packing, beside those of training.

    python benchmarks/data.py [--megabytes 8] [--no-training]

The data are JSON lines of Python's own documentation, repeated; the tokenizer is the tests'. Each
part is timed alone (packing with a tokenizer that has encoded every text before), then together,
in batches of 4 x 512, without and with a data worker. Of a worker's run the CPU-seconds of the
process that trains are told apart: what is left of the data's cost beside the kernels. One thread.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from common import ROOT, print_header, print_row
from steps import Case, measure

from torchtitan.data.dataloader import ParallelAwareDataloader
from torchtitan.data.local_files import load_local_documents
from torchtitan.data.python_docs import PythonDocs
from torchtitan.data.text_datasets import HuggingFaceTextDataset
from torchtitan.data.tokenizer import BaseTokenizer, HuggingFaceTokenizer

ROWS, SEQ_LEN = 4, 512


class AlreadyEncoded(BaseTokenizer):
    """Looks up what a tokenizer made of each text."""

    def __init__(self, tokens_of: dict[str, list[int]]) -> None:
        super().__init__()
        self._tokens_of = tokens_of

    def encode(self, text: str, *, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return self._tokens_of[text]

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


def exhaust(items: Iterable[Any]) -> None:
    for _ in items:
        pass


def write_documents(path: Path, n_bytes: int) -> None:
    texts = [PythonDocs()[i]["text"] for i in range(len(PythonDocs()))]
    written = number = 0
    with open(path, "w") as file:
        while written < n_bytes:
            # No two documents alike, as a tokenizer may remember words but not texts.
            text = f"{number}\n{texts[number % len(texts)]}"
            written += file.write(json.dumps({"text": text}) + "\n")
            number += 1


def loader(path: Path, tokenizer: BaseTokenizer, n_workers: int) -> ParallelAwareDataloader:
    dataset = HuggingFaceTextDataset("local", str(path), tokenizer, SEQ_LEN, infinite=False)
    options = {"prefetch_factor": 2} if n_workers else {}
    return ParallelAwareDataloader(dataset, 0, 1, batch_size=ROWS, num_workers=n_workers, **options)


def data_rates(path: Path, tokenizer: HuggingFaceTokenizer) -> dict[str, float]:
    """What -> tokens per CPU-second."""
    documents = load_local_documents(str(path))
    texts = [documents[i]["text"] for i in range(len(documents))]
    tokens_of = {text: tokenizer.encode(text, add_bos=True, add_eos=True) for text in texts}
    n_tokens = sum(map(len, tokens_of.values()))
    print(f"{len(texts):,} documents, {path.stat().st_size / 1e6:.1f} MB, {n_tokens:,} tokens\n")
    rates = {}

    def children() -> float:
        return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])

    def time_it(name: str, work: Callable[[], Any]) -> None:
        own, others = time.process_time(), children()
        work()
        own, others = time.process_time() - own, children() - others
        rates[name] = n_tokens / own
        if others:
            rates["  both processes together"] = n_tokens / (own + others)

    def tokenize() -> None:
        for text in texts:
            tokenizer.encode(text, add_bos=True, add_eos=True)

    time_it("opening the file: where its lines begin", lambda: load_local_documents(str(path)))
    time_it("reading documents", lambda: exhaust(documents[i] for i in range(len(documents))))
    time_it("tokenising", tokenize)
    time_it("packing", lambda: exhaust(loader(path, AlreadyEncoded(tokens_of), 0)))
    rates["packing"] = 1 / (1 / rates["packing"] - 1 / rates["reading documents"])
    time_it("all, in batches, no worker", lambda: exhaust(loader(path, tokenizer, 0)))
    time_it("all, one worker: the training process", lambda: exhaust(loader(path, tokenizer, 1)))
    return rates


def training_rates() -> dict[str, float]:
    """Model -> tokens per CPU-second of a training step, fp32, one process."""
    cases = {model: Case(model, "1", "float32", False, ()) for model in ("debugmodel", "50M")}
    return {
        model: measure(case, [ROOT], turns=2, n_steps=1)["tokens_per_cpu_second"]
        for model, case in cases.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=float, default=8)
    parser.add_argument("--no-training", action="store_true", help="leave out the models' steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no warning from the worker's fork
    tokenizer = HuggingFaceTokenizer(str(ROOT / "tests/assets/tokenizer"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documents.jsonl"
        write_documents(path, int(args.megabytes * 1e6))
        rates = data_rates(path, tokenizer)
    training = {} if args.no_training else training_rates()
    print_header("", "tokens per CPU-second", *(f"of a step of {model}" for model in training))
    for what, rate in rates.items():
        print_row(what, f"{rate:,.0f}", *(f"{step / rate:.2%}" for step in training.values()))
    for model, rate in training.items():
        print_row(f"training {model}", f"{rate:,.0f}", *[""] * len(training))


if __name__ == "__main__":
    main()
