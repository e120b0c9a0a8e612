"""Prints the first rows of a job's training data as the model sees them, on one rank.

    torchtitan show job.toml --show.rows 3

Tokens that are labels of the loss stand between ⟦ and ⟧, or are green on a terminal. Exit code 2: the
config cannot run; 1: the data cannot be read.
"""

import copy
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.batch.batch import TokenBatch
from torchtitan.batch.documents import (
    BOUNDARY_KEYS,
    IGNORE_INDEX,
    PADDING,
    document_ids_from_positions,
    positions_from_document_ids,
)
from torchtitan.batch.policy import DocumentPolicy
from torchtitan.config import JobConfig
from torchtitan.config.checks import ConfigError, check_tokenizer_fits
from torchtitan.config.job_config import section
from torchtitan.config.manager import ConfigManager, exit_on_config_error
from torchtitan.data.packed_dataset import PackedDataset
from torchtitan.data.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.job import resolve_job
from torchtitan.tools.logging import init_logger

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


@dataclass
class Show:
    rows: int = 3  # Rows to print


@dataclass
class ShowConfig(JobConfig):
    """A job's config and the section of this program."""

    show: Show = section(Show, "For torchtitan show")


def main() -> None:
    init_logger()
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    marks = (_GREEN, _PLAIN) if sys.stdout.isatty() else ("⟦", "⟧")
    try:
        with exit_on_config_error():
            config = ConfigManager(ShowConfig).parse_args()
            batches, policy, tokenizer = _read(config)
        rows = ((batch, row) for batch in batches for row in range(len(batch.tokens)))
        for number, (batch, row) in enumerate(itertools.islice(rows, config.show.rows), 1):
            for line in describe_row(batch, row, policy, tokenizer, marks, f"row {number}"):
                print(line)
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _read(config: ShowConfig) -> tuple[Iterator[TokenBatch], DocumentPolicy, BaseTokenizer]:
    """Return (batches, document policy, tokenizer) of the job."""
    if config.show.rows < 1:
        raise ConfigError(f"show.rows must be 1 or more, got {config.show.rows}; correct it")
    config = copy.deepcopy(config)  # changed below to one rank without data workers
    config.parallelism = type(config.parallelism)()
    config.training.dataloader = type(config.training.dataloader)()
    config, spec, *_ = resolve_job(config)
    if spec.build_tokenizer_fn is None or spec.build_dataloader_fn is None:
        raise ConfigError(
            f"model.name = {config.model.name!r} builds no tokenizer or no training data; set model.name "
            "to a model that reads data"
        )
    model_args = copy.deepcopy(spec.model_args[config.model.flavor])
    model_args.update_from_config(config)
    tokenizer = spec.build_tokenizer_fn(config)
    check_tokenizer_fits(tokenizer, model_args)
    policy = DocumentPolicy.from_job(config.training, model_args, tokenizer)

    def batches() -> Iterator[TokenBatch]:
        loader = spec.build_dataloader_fn(
            dp_world_size=1, dp_rank=0, tokenizer=tokenizer, job_config=config
        )
        dataset = getattr(loader, "dataset", None)
        if config.training.too_long != "error" and isinstance(dataset, PackedDataset):
            dataset.log_chats()  # drops the chats that training drops
        for input_dict, labels in loader:
            yield policy.training_batch(input_dict, labels)

    return batches(), policy, tokenizer


def describe_row(
    batch: TokenBatch,
    row: int,
    policy: DocumentPolicy,
    tokenizer: BaseTokenizer,
    marks: tuple[str, str],
    name: str,
) -> Iterator[str]:
    """Yield the lines about one row of `policy.training_batch`. marks: strings around runs of labels."""
    ids, positions = documents_and_positions(batch, row, policy)
    tokens, labels = batch.tokens[row], batch.labels[row]
    is_label = torch.zeros_like(tokens, dtype=torch.bool)
    is_label[1:] = labels[:-1] != IGNORE_INDEX
    runs = [list(run) for _, run in itertools.groupby(range(len(ids)), lambda i: int(ids[i]))]
    documents = [run for run in runs if ids[run[0]] != PADDING]
    num_labels = int((labels != IGNORE_INDEX).sum())
    facts = [f"tokens: {len(tokens)}, documents: {len(documents)}"]
    facts += [f"padding: {int((ids == PADDING).sum())}"]
    facts += [f"labels: {num_labels} ({num_labels / len(tokens):.1%})"]
    if batch.sample_ids is not None and (batch.sample_ids[row] >= 0).all():
        first, last = batch.sample_ids[row].tolist()
        facts.append(f"samples: {first} to {last}")
    if not policy.separates_documents:
        facts.append("every token sees the whole row before it")
    yield f"{name}, {', '.join(facts)}"
    if differing := int((is_label[1:] & (labels[:-1] != tokens[1:])).sum()):
        yield f"  labels that are not the row's next token: {differing}"
    of_pairs = "pair_ids" in batch.entries
    for number, run in enumerate(documents, 1):
        part = slice(run[0], run[-1] + 1)
        document = f"document {number}"
        if of_pairs:
            document = f"pair {(number + 1) // 2}, {'chosen' if number % 2 else 'rejected'}"
        yield (
            f"  {document}, tokens {run[0]} to {run[-1]}, positions {positions[run[0]]} to "
            f"{positions[run[-1]]}, labels: {int(is_label[part].sum())}"
        )
        text = marked_text(tokens[part].tolist(), is_label[part].tolist(), tokenizer, marks)
        yield "\n".join(f"    {line}" for line in text.split("\n"))
    if labels[-1] != IGNORE_INDEX:
        text = marked_text([int(labels[-1])], [True], tokenizer, marks)
        yield f"  label behind the row: {text}"


def documents_and_positions(
    batch: TokenBatch, row: int, policy: DocumentPolicy
) -> tuple[Tensor, Tensor]:
    """Return (document ids [T], the positions [T] that the model gets) of a row."""
    tokens, given = batch.tokens, batch.entries.get("positions")
    has_ids = batch.document_ids is not None
    has_ids |= any(batch.entries.get(key) is not None for key in BOUNDARY_KEYS)
    ids = torch.zeros_like(tokens)
    if has_ids or (given is None and policy.boundary_token is not None):
        ids = policy.document_ids(batch)
    elif given is not None:
        ids = document_ids_from_positions(given)
    if given is None:
        restarts = policy.separates_documents and policy.restart_positions
        columns = torch.arange(tokens.shape[1]).expand_as(tokens)
        given = positions_from_document_ids(ids) if restarts else columns
    return ids[row], given.expand_as(tokens)[row]


def marked_text(
    token_ids: list[int], is_marked: list[bool], tokenizer: BaseTokenizer, marks: tuple[str, str]
) -> str:
    # A decoder drops the blank before the first word, so each run is decoded with all tokens before it.
    options = {"skip_special_tokens": False} if isinstance(tokenizer, HuggingFaceTokenizer) else {}
    text, end, before = "", 0, ""
    for marked, run in itertools.groupby(is_marked):
        end += len(list(run))
        through = tokenizer.decode(token_ids[:end], **options)
        part = through[len(before) :].replace("\x1b", "\\x1b")  # disarm terminal escape codes
        text += f"{marks[0]}{part}{marks[1]}" if marked else part
        before = through
    return text


if __name__ == "__main__":
    main()
