"""Text datasets as packed token sequences: the registry, the packing, the loaders."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from torchtitan.batch.documents import SAMPLE_IDS
from torchtitan.config import JobConfig
from torchtitan.config.checks.common import guess
from torchtitan.config.mask_types import reads_positions
from torchtitan.data import DatasetConfig
from torchtitan.data.dataloader import ParallelAwareDataloader
from torchtitan.data.document_sources import IndexedDocuments, StreamedDocuments
from torchtitan.data.local_files import (
    JsonLinesDocuments,
    load_local_documents,
    load_with_datasets,
)
from torchtitan.data.open_document import OpenDocument
from torchtitan.data.python_docs import PythonDocs
from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.tools.files import find_shipped
from torchtitan.tools.logging import logger

# After this many documents in a row without a token, the dataset is reported as empty.
MAX_EMPTY_DOCUMENTS_IN_A_ROW = 100_000


# ---- the registry ----


def _load_c4(path: str, split: str) -> Any:
    if os.path.isfile(path):
        return load_local_documents(path)
    problem = f"cannot load the dataset {path!r} from the hub"
    remedy = (
        "set training.dataset_path (or validation.dataset_path) to a copy on this machine, or "
        "training.dataset to 'local'"
    )
    return load_with_datasets(problem, remedy, path, name="en", split=split, streaming=True)


def _load_c4_test(path: str) -> Any:
    path = find_shipped(path)
    if not os.path.isdir(path):
        return load_local_documents(path)
    problem, remedy = f"{path} cannot be read as a dataset", "fetch or write its files again"
    try:
        return load_with_datasets(problem, remedy, path, split="train")
    except ValueError:
        # For bad JSON lines, our own reader raises an error that names the file and the line.
        documents = load_local_documents(path)
        if isinstance(documents, JsonLinesDocuments):
            for index in range(len(documents)):
                documents[index]
        raise


def _load_python_docs(path: str, split: str) -> Any:
    return load_local_documents(path) if path else PythonDocs(split)


def _load_local(path: str) -> Any:
    if not path:
        raise ValueError(
            "training.dataset = 'local' needs training.dataset_path, a .jsonl, .json, .txt or "
            ".parquet file or a folder of such files"
        )
    return load_local_documents(path)


def _text_of(sample: Any) -> str:
    if "text" not in sample:
        raise ValueError(
            f"a document needs the column 'text', got {sorted(sample)}; for another column, "
            f"register the dataset with a sample_processor of its own"
        )
    return sample["text"]


# Looked up when a dataset is built, so entries may be added and removed until then.
DATASETS: dict[str, DatasetConfig] = {
    name: DatasetConfig(path, loader, _text_of)
    for name, path, loader in [
        ("c4", "allenai/c4", partial(_load_c4, split="train")),
        ("c4_test", "tests/assets/c4_test", _load_c4_test),
        ("c4_validation", "allenai/c4", partial(_load_c4, split="validation")),
        ("local", "", _load_local),
        ("python_docs", "", partial(_load_python_docs, split="train")),
        ("python_docs_validation", "", partial(_load_python_docs, split="validation")),
    ]
}


def _validate_dataset(
    dataset_name: str, dataset_path: str | None = None
) -> tuple[str, Callable, Callable]:
    """Return (path, loader, sample_processor) of a dataset; ValueError if it is not registered."""
    if dataset_name not in DATASETS:
        hint = guess(dataset_name, DATASETS)
        raise ValueError(
            f"unknown dataset {dataset_name!r}{hint}; registered are {', '.join(DATASETS)}"
        )
    config = DATASETS[dataset_name]
    return dataset_path or config.path, config.loader, config.sample_processor


# ---- packing ----


class HuggingFaceTextDataset(IterableDataset):
    """Sequences of `seq_len` tokens, cut from a dataset's documents laid end to end.

    Yields `({"input": x[:-1], "sample_ids": ids}, x[1:])` of LongTensors [seq_len], where x are the
    next seq_len + 1 tokens; sequences don't overlap. ids [2] are the numbers of the first and the
    last document in x, -1 if the dataset does not number its documents. Every document has its
    begin- and end-of-text ids. There is no padding, and no label is ignored.

    Ranks and data workers share the documents; no two read the same document within a pass.
    infinite: begin again at the end of the data. Otherwise the tokens after the last whole
    sequence are dropped, and another iteration begins from the start.

    Raises ValueError if the data hold no documents or, when finite, no whole sequence.
    """

    def __init__(
        self,
        dataset_name: str,
        dataset_path: str | None,
        tokenizer: BaseTokenizer,
        seq_len: int = 2048,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        infinite: bool = False,
    ) -> None:
        self.dataset_name = dataset_name if dataset_name in DATASETS else dataset_name.lower()
        self.seq_len, self.infinite = seq_len, infinite
        self._tokenizer = tokenizer
        self._dp_rank, self._dp_world_size = dp_rank, dp_world_size
        path, loader, self._text_processor = _validate_dataset(self.dataset_name, dataset_path)
        logger.info(f"Preparing dataset {self.dataset_name}" + (f" from {path}" if path else ""))
        self._data = loader(path)
        if hasattr(self._data, "__len__"):
            self._source = IndexedDocuments(self._data, self.dataset_name, infinite, path)
        else:
            self._source = StreamedDocuments(
                self._data, self.dataset_name, infinite, dp_rank, dp_world_size
            )

        # Documents to finish before the source's next document.
        self._open: deque[OpenDocument] = deque()
        self._left_over: list[int] = []  # tokens at the end of the data, fewer than a sequence
        self._inherited_places: list[dict[str, Any]] = []
        self._is_started = self._is_resumed = self._ran_out = False

    @property
    def num_documents(self) -> int | None:
        """The number of documents of all readers; None for a stream."""
        return len(self._data) if hasattr(self._data, "__len__") else None

    @property
    def can_reshard(self) -> bool:
        """Whether `inherit` works, as it does for all data but streams."""
        return self._source.can_reshard

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        self._start()
        if self._ran_out:
            self._source.restart()
            self._open.clear()
            self._left_over = []
            self._is_resumed = self._ran_out = False
        has_sequence = False
        for sequence, numbers in self._sequences():
            has_sequence = True
            sample_ids = torch.tensor([numbers[0], numbers[-1]])
            yield {"input": sequence[:-1], SAMPLE_IDS: sample_ids}, sequence[1:]
        if not has_sequence and not self._is_resumed:
            reader, num_readers = self._reader()
            raise ValueError(
                f"dataset {self.dataset_name!r} is too small: reader {reader + 1} of {num_readers} "
                f"(ranks times data workers) got {len(self._left_over)} tokens, and one "
                f"sequence takes seq_len + 1 = {self.seq_len + 1}; use more data, a smaller "
                "seq_len, or fewer ranks or data workers"
            )
        logger.warning(f"Dataset {self.dataset_name} has run out of data")
        self._ran_out = True

    def _sequences(self) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """Yield token sequences [seq_len + 1], each with the numbers of its documents."""
        samples = iter(self._source)
        num_empty = 0
        while True:
            tokens: list[int] = []
            numbers: list[int] = []
            while len(tokens) <= self.seq_len:
                if not self._open:
                    number = self._source.next_number
                    try:
                        text = self._text(next(samples), number)
                    except StopIteration:
                        self._left_over = tokens
                        return
                    self._open.append(OpenDocument(number, text))
                document = self._open[0]
                new = document.take(self.seq_len + 1 - len(tokens), self._tokenizer)
                num_empty = 0 if new else num_empty + 1
                if num_empty >= MAX_EMPTY_DOCUMENTS_IN_A_ROW:
                    raise ValueError(
                        f"dataset {self.dataset_name!r}: {num_empty} documents in a row gave no "
                        "tokens"
                    )
                tokens += new
                if new:
                    numbers.append(-1 if document.number is None else document.number)
                if document.is_finished:
                    self._open.popleft()
            yield torch.tensor(tokens, dtype=torch.long), numbers

    def _text(self, sample: Any, number: int | None) -> str:
        text = self._text_processor(sample)
        if not isinstance(text, str):
            raise ValueError(
                f"{self._source.where(number)}: a document's text must be a string, got "
                f"{type(text).__name__}; mend or leave out the document"
            )
        try:
            text.encode()  # raises where the tokenizer would
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{self._source.where(number)}: the text has half of a surrogate pair, "
                f"{text[error.start]!r}, which is not a character; mend or leave out the document"
            ) from None
        return text

    def _reopen(self, place: dict[str, Any]) -> OpenDocument:
        """Return the document at a saved place; its text is read again if the source has `[i]`."""
        if "tokens" in place:
            text, tokens = place.get("text", ""), list(place["tokens"])
            is_begun = place.get("is_begun", True)
            return OpenDocument(None, text, end=0, tokens=tokens, is_begun=is_begun)
        number = place["number"]
        document = OpenDocument(number, self._text(self._source.sample(number), number))
        if place["start"] or place["used"]:
            document.open_piece(place["start"], self._tokenizer)
            document.used = min(place["used"], len(document.tokens))
        return document

    def _reader(self) -> tuple[int, int]:
        """Return (number of this reader, number of readers), of all ranks and their data workers."""
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        return self._dp_rank * num_workers + worker_id, self._dp_world_size * num_workers

    def _start(self) -> None:
        """Choose this reader's documents, once: only the iterating process knows its data worker."""
        if self._is_started:
            return
        reader, num_readers = self._reader()
        self._source.start(reader, num_readers)
        self._open.extend(map(self._reopen, self._inherited_places[reader::num_readers]))
        self._inherited_places, self._is_started = [], True

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this reader's position.

        It holds the number of a document that is partly read, or its unread text for a stream.
        """
        self._start()
        places = [{"tokens": self._left_over}] if self._left_over else []
        places += [document.place() for document in self._open]
        return {"open": places, **self._source.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where the same one of the same number of readers stopped."""
        self._start()
        self._source.load_state_dict(state_dict)
        self._open = deque(map(self._reopen, _places(state_dict)))
        self._left_over = []
        self._is_resumed, self._ran_out = True, False

    def inherit(self, states: list[dict[str, Any]]) -> None:
        """Continue where a different number of readers stopped.

        states: of all old readers, in order. Each document, or part of one, that they had not read
        goes to one of the new readers. Call it before iterating, in the dataloader's process.
        """
        self._source.inherit(states)
        self._inherited_places = [place for state in states for place in _places(state)]
        self._open.clear()
        self._left_over = []
        self._is_started = self._ran_out = False
        self._is_resumed = True


def _places(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the places of partly read documents; older versions saved a list of tokens instead."""
    tokens = state.get("token_buffer")
    return ([{"tokens": tokens}] if tokens else []) + state.get("open", [])


# ---- loaders ----


def build_text_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    infinite: bool = True,
) -> ParallelAwareDataloader:
    """Return a loader of batches of the dataset in `[training]`."""
    return _build(job_config, job_config.training, dp_world_size, dp_rank, tokenizer, infinite)


build_text_dataloader.registered_datasets = DATASETS  # the check of a config reads it


def build_text_validation_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    infinite: bool = False,
) -> ParallelAwareDataloader:
    """Return a loader of batches of the dataset in `[validation]`.

    If `[validation]` names no dataset, it is `<training.dataset>_validation` if that is registered,
    or else the training data, with a warning.
    """
    section, training = job_config.validation_data, job_config.training
    held_out = f"{section.dataset}_validation"
    if job_config.validation.dataset is None and held_out in DATASETS:
        section.dataset = held_out
    if (section.dataset, section.dataset_path) == (training.dataset, training.dataset_path):
        logger.warning(
            "validation reads the training data, so its loss says nothing about other text; set "
            "validation.dataset or validation.dataset_path to data that is held out"
        )
    return _build(job_config, section, dp_world_size, dp_rank, tokenizer, infinite)


def _build(
    job_config: JobConfig,
    section: Any,
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    infinite: bool,
) -> ParallelAwareDataloader:
    """section: `job_config.training` or `job_config.validation`; both have the keys read here."""
    if reads_positions(job_config.model.attn_mask_type):
        raise ValueError(
            "model.attn_mask_type 'position_block_causal' reads document boundaries from "
            "'positions', which text datasets don't have: set it to 'block_causal', which reads "
            "the end-of-text tokens, or bring a dataloader whose batches have 'positions' [B, T]"
        )
    name, path, seq_len = section.dataset, section.dataset_path, section.seq_len
    dataset = HuggingFaceTextDataset(
        name, path, tokenizer, seq_len, dp_rank, dp_world_size, infinite
    )
    loader_options = {**asdict(section.dataloader), "batch_size": section.local_batch_size}
    return ParallelAwareDataloader(dataset, dp_rank, dp_world_size, **loader_options)
