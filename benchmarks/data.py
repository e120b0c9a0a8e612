"""Tokens per CPU-second of reading, tokenising and packing, beside those of training; resuming.

    python benchmarks/data.py [--megabytes 8] [--no-training]

The data are JSON lines of Python's own documentation, repeated; the tokenizer is the tests'. Each
part is timed alone (packing with a tokenizer that has encoded every text before), then together,
in batches of 4 x 512, without and with a data worker. Of a worker's run the CPU-seconds of the
process that trains are told apart: what is left of the data's cost beside the kernels.

Resuming is from a position to the first sequence after it. Documents of growing length, and many
small ones, show what grows faster than the text. Times are CPU-seconds of one thread.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from torchtitan.data.dataloader import ParallelAwareDataloader
from torchtitan.data.local_files import load_local_documents
from torchtitan.data.python_docs import PythonDocs
from torchtitan.data.text_datasets import HuggingFaceTextDataset
from torchtitan.data.tokenizer import BaseTokenizer, HuggingFaceTokenizer

ROOT = Path(__file__).resolve().parents[1]
ROWS, SEQ_LEN = 4, 512
SHORT_SEQ_LEN = 64  # many sequences of little text, for far positions


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


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """Of this process, and of child processes that ended meanwhile."""

    def used() -> tuple[float, float]:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time(), children.ru_utime + children.ru_stime

    before = used()
    work()
    own, children = (after - start for after, start in zip(used(), before, strict=True))
    return own, children


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


def dataset(
    path: Path, tokenizer: BaseTokenizer, seq_len: int = SEQ_LEN, infinite: bool = False
) -> HuggingFaceTextDataset:
    return HuggingFaceTextDataset("local", str(path), tokenizer, seq_len, infinite=infinite)


def loader(path: Path, tokenizer: BaseTokenizer, n_workers: int) -> ParallelAwareDataloader:
    options = {"prefetch_factor": 2} if n_workers else {}
    return ParallelAwareDataloader(
        dataset(path, tokenizer), 0, 1, batch_size=ROWS, num_workers=n_workers, **options
    )


def rates(path: Path, tokenizer: HuggingFaceTokenizer) -> dict[str, float]:
    """What -> tokens per CPU-second."""
    documents = load_local_documents(str(path))
    texts = [documents[i]["text"] for i in range(len(documents))]
    tokens_of = {text: tokenizer.encode(text, add_bos=True, add_eos=True) for text in texts}
    n_tokens = sum(map(len, tokens_of.values()))
    print(f"{len(texts):,} documents, {path.stat().st_size / 1e6:.1f} MB, {n_tokens:,} tokens\n")
    rates = {}

    def time_it(name: str, work: Callable[[], Any]) -> None:
        seconds, children = cpu_seconds(work)
        rates[name] = n_tokens / seconds
        if children:
            rates["  both processes together"] = n_tokens / (seconds + children)

    def tokenize() -> None:
        for text in texts:
            tokenizer.encode(text, add_bos=True, add_eos=True)

    time_it("opening the file: where its lines begin", lambda: load_local_documents(str(path)))
    time_it("reading documents", lambda: exhaust(documents[i] for i in range(len(documents))))
    time_it("tokenising", tokenize)
    time_it("packing", lambda: exhaust(dataset(path, AlreadyEncoded(tokens_of))))
    rates["packing"] = 1 / (1 / rates["packing"] - 1 / rates["reading documents"])
    time_it("all, sequence by sequence", lambda: exhaust(dataset(path, tokenizer)))
    time_it("all, in batches, no worker", lambda: exhaust(loader(path, tokenizer, 0)))
    time_it(
        "all, in batches, one worker: the training process",
        lambda: exhaust(loader(path, tokenizer, 1)),
    )
    return rates


def training_rates() -> dict[str, float]:
    """Model -> tokens per CPU-second of a training step, fp32, one process."""
    from steps import Case, measure

    args = argparse.Namespace(turns=2, steps=1)
    rates = {}
    for model in ("debugmodel", "50M"):
        row = measure(Case(model, "1", "float32", False, ()), [ROOT], args)
        rates[model] = row["tokens_per_cpu_second"]
    return rates


def resume_seconds(path: Path, tokenizer: BaseTokenizer) -> dict[int, tuple[float, float, int]]:
    """Position in sequences -> CPU-seconds to save it, CPU-seconds to resume there, its bytes."""
    reader = dataset(path, tokenizer, SHORT_SEQ_LEN, infinite=True)
    sequences, at, found = iter(reader), 0, {}
    for position in (1_000, 10_000, 100_000):
        exhaust(islice(sequences, position - at))
        at = position
        save, _ = cpu_seconds(lambda: reader.state_dict())
        state = json.dumps(reader.state_dict())
        resumed = dataset(path, tokenizer, SHORT_SEQ_LEN, infinite=True)
        first: list[Any] = []

        def resume(resumed: Any = resumed, state: str = state, first: list[Any] = first) -> None:
            resumed.load_state_dict(json.loads(state))
            first.append(next(iter(resumed)))

        seconds, _ = cpu_seconds(resume)
        expected = next(sequences)
        at += 1
        assert torch.equal(first[0][1], expected[1])
        found[position] = save, seconds, len(state)
    return found


def growth(folder: Path, tokenizer: BaseTokenizer) -> list[tuple[str, int, float]]:
    """(documents, characters, tokens per CPU-second) of one text cut into more or fewer of them."""
    text = "\n\n".join(PythonDocs()[i]["text"] for i in range(200))
    rows = []
    for n_characters, n_documents in (
        *((10**5 * 4**i, 1) for i in range(4)),
        *((10**5 * 4**2, 100 * 8**i) for i in range(3)),
    ):
        whole = (text * (1 + n_characters // len(text)))[:n_characters]
        size = n_characters // n_documents
        path = folder / f"{n_characters}_{n_documents}.jsonl"
        pieces = [whole[i * size : (i + 1) * size] for i in range(n_documents)]
        path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
        reader = dataset(path, tokenizer)
        n_tokens = 0

        def read(reader: Any = reader) -> None:
            nonlocal n_tokens
            # A position after every sequence, as a training step takes one.
            for _, labels in reader:
                n_tokens += len(labels)
                reader.state_dict()

        seconds, _ = cpu_seconds(read)
        rows.append((f"{n_documents:,}", n_characters, n_tokens / seconds))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=float, default=8)
    parser.add_argument("--no-training", action="store_true", help="leave out the models' steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no warning from the worker's fork
    tokenizer = HuggingFaceTokenizer(str(ROOT / "tests/assets/tokenizer"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "documents.jsonl"
        write_documents(path, int(args.megabytes * 1e6))
        data_rates = rates(path, tokenizer)
        training = {} if args.no_training else training_rates()
        titles = ["", "tokens per CPU-second", *(f"of a step of {model}" for model in training)]
        print(f"| {' | '.join(titles)} |\n|" + "---|" * len(titles))
        for what, rate in data_rates.items():
            shares = [f"{step / rate:.2%}" for step in training.values()]
            print(f"| {' | '.join([what, f'{rate:,.0f}', *shares])} |")
        for model, rate in training.items():
            print(f"| training {model} | {rate:,.0f} |" + " |" * len(training))
        print("\n| position, sequences | save, ms | resume, ms | bytes |\n|---|---|---|---|")
        for position, (save, resume, n_bytes) in resume_seconds(path, tokenizer).items():
            print(f"| {position:,} | {1e3 * save:.2f} | {1e3 * resume:.1f} | {n_bytes} |")
        print("\n| documents | characters | tokens per CPU-second |\n|---|---|---|")
        for n_documents, n_characters, rate in growth(folder, tokenizer):
            print(f"| {n_documents} | {n_characters:,} | {rate:,.0f} |")


if __name__ == "__main__":
    main()
