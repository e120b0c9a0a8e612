"""The registry of datasets, and the dataloaders that read them as packed token sequences."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.config.checks.common import guess
from torchtitan.config.job_config import MixtureSource, Training
from torchtitan.config.mask_types import reads_positions
from torchtitan.data import DatasetConfig
from torchtitan.data.chat_samples import load_chats, load_pairs, parse_keys
from torchtitan.data.chats import ChatEncoder, ChatTokens
from torchtitan.data.dataloader import ParallelAwareDataloader
from torchtitan.data.document_sources import Encoder, Source
from torchtitan.data.local_files import load_local_documents
from torchtitan.data.open_document import Tokens
from torchtitan.data.packed_dataset import PackedDataset
from torchtitan.data.preference import PairTokens
from torchtitan.data.python_docs import PythonDocs
from torchtitan.data.row_streams import Packing
from torchtitan.data.token_files import TokenDocuments
from torchtitan.data.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.tools import storage
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.files import find_shipped
from torchtitan.tools.logging import logger


def _load_c4(path: str, split: str) -> Any:
    if storage.is_address(path) or os.path.isfile(path):
        return load_local_documents(path)
    from datasets import load_dataset  # slow to import, and not needed for local files

    try:
        return load_dataset(path, name="en", split=split, streaming=True)
    except Exception as error:
        while error.__cause__ is not None:  # only the innermost error gives the reason
            error = error.__cause__
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"cannot load the dataset {path!r} from the hub: {reason}; set training.dataset_path (or "
            "validation.dataset_path) to a copy on this machine"
        ) from None


def _load_python_docs(path: str, split: str) -> Any:
    return load_local_documents(path) if path else PythonDocs(split)


def _text_of(sample: Any) -> str:
    if isinstance(sample, Mapping) and isinstance(sample.get("text"), str):
        return sample["text"]
    got = f"the keys {sorted(sample)}" if isinstance(sample, Mapping) else type(sample).__name__
    if isinstance(sample, Mapping) and "text" in sample:
        got = f"{sample['text']!r:.80} there"
    raise ValueError(
        f"need an object with a string under 'text', got {got}; register a dataset with a "
        "sample_processor for other keys"
    )


def _encode_tokens(data: TokenDocuments, tokenizer: BaseTokenizer, _: Training) -> Encoder:
    data.check_tokenizer(tokenizer)
    return Tokens


def _encode_chats(
    tokens: type[ChatTokens], _: Any, tokenizer: BaseTokenizer, training: Training
) -> Encoder:
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise ValueError(
            "chats and preference pairs need a tokenizer from Hugging Face files, got "
            f"{type(tokenizer).__name__}; set model.hf_assets_path to their folder"
        )
    keys = parse_keys(training.chat_keys)
    encoder = ChatEncoder.of_tokenizer(tokenizer, training.chat_template or "", keys)
    return tokens(encoder, training.seq_len, training.too_long)


# Looked up when a dataset is built, so entries may be added and removed until then.
DATASETS: dict[str, DatasetConfig] = {
    name: DatasetConfig(path, loader, _text_of, *make_encoder)
    for name, path, loader, *make_encoder in [
        ("c4", "allenai/c4", partial(_load_c4, split="train")),
        ("c4_test", "tests/assets/c4_test", lambda path: load_local_documents(find_shipped(path))),
        ("c4_validation", "allenai/c4", partial(_load_c4, split="validation")),
        ("local", "", load_local_documents),
        ("python_docs", "", partial(_load_python_docs, split="train")),
        ("python_docs_validation", "", partial(_load_python_docs, split="validation")),
        ("chat", "", load_chats, partial(_encode_chats, ChatTokens)),
        ("preference", "", load_pairs, partial(_encode_chats, PairTokens)),
        ("tokens", "", TokenDocuments, _encode_tokens),
    ]
}


def _validate_dataset(
    dataset_name: str, dataset_path: str | None = None
) -> tuple[str, Callable, Callable]:
    """Return (path, loader, sample_processor) of a dataset; ValueError if it is not registered."""
    if dataset_name not in DATASETS:
        named = f"{dataset_name!r}{guess(dataset_name, DATASETS)}"
        raise ValueError(f"unknown dataset {named}; registered are {', '.join(DATASETS)}")
    config = DATASETS[dataset_name]
    return dataset_path or config.path, config.loader, config.sample_processor


def open_source(
    dataset_name: str,
    dataset_path: str | None,
    tokenizer: BaseTokenizer,
    options: Training | None = None,
    **fields: Any,
) -> Source:
    """Return a registered dataset as a `Source`. options: settings for chats. fields: more fields of `Source`."""
    options = options or Training()
    name = dataset_name if dataset_name in DATASETS else dataset_name.lower()
    path, loader, _ = _validate_dataset(name, dataset_path)
    logger.info(f"Preparing dataset {name}" + (f" from {path}" if path else ""))
    if loader in (load_chats, load_pairs):
        loader = partial(loader, keys=parse_keys(options.chat_keys))
    data, make_encoder = loader(path), DATASETS[name].make_encoder
    encode = make_encoder(data, tokenizer, options) if make_encoder else text_encoder(name)
    return Source(name, data, encode, tokenizer, path, is_text=make_encoder is None, **fields)


def text_encoder(name: str) -> Encoder:
    """Return the function that converts a sample of a registered dataset to its text."""
    config = DATASETS[name]
    if config.make_encoder is not None:
        raise ValueError(f"the documents of dataset {name!r} are not strings; name another dataset")

    def checked_text(sample: Any) -> str:
        if isinstance(text := config.sample_processor(sample), str):
            return text
        raise ValueError(f"the text must be a string, got {text!r:.80}; correct the document")

    return checked_text


class HuggingFaceTextDataset(PackedDataset):
    """Sequences of `seq_len` tokens, cut from a dataset's documents laid end to end.

    Yields `({"input": x[:-1], "sample_ids": ids}, x[1:])` of LongTensors [seq_len], where x are the
    next seq_len + 1 tokens. Every document has its begin- and end-of-text ids.
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
        source = open_source(dataset_name, dataset_path, tokenizer)
        self.dataset_name = source.name
        super().__init__([source], Packing("concat", seq_len), dp_rank, dp_world_size, infinite)


def build_text_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    infinite: bool = True,
) -> ParallelAwareDataloader:
    """Return a dataloader of the dataset in `[training]`."""
    return _build(job_config, job_config.training, dp_world_size, dp_rank, tokenizer, infinite)


build_text_dataloader.registered_datasets = DATASETS  # `TrainSpec.fact` reads this attribute


def build_text_validation_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    infinite: bool = False,
) -> ParallelAwareDataloader:
    """Return a dataloader of the dataset in `[validation]`.

    If `validation.dataset` is unset, the dataset is `<training.dataset>_validation` or, if there is no such
    dataset, the training dataset, with a warning.
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


_VALIDATION_AGAIN = (
    "validation.steps takes more rows than the validation data have, so some documents count more than "
    "once in the validation loss; validation.steps = -1 takes each once"
)


def _build(
    job_config: JobConfig,
    section: Any,
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    infinite: bool,
) -> ParallelAwareDataloader:
    """Return a dataloader. section: `job_config.training` or `job_config.validation_data`."""
    training = job_config.training
    is_training = section is training
    # Validation with steps = -1 reads its data once.
    epochs = training.epochs if is_training else None if infinite else 1.0
    parts = [MixtureSource(section.dataset, section.dataset_path, epochs=epochs)]
    if training.mixture and is_training:
        parts = training.mixture
    sources = [
        open_source(
            part.dataset,
            part.dataset_path,
            tokenizer,
            replace(training, seq_len=section.seq_len),
            weight=part.weight,
            limit=part.epochs,
            seed=training.data_seed if is_training and training.shuffle else None,
            again="" if is_training else _VALIDATION_AGAIN,
        )
        for part in parts
    ]
    if is_training and epochs is not None and not sources[0].is_indexed:
        raise ConfigError(
            f"training.epochs = {epochs} needs documents that can be counted, and dataset "
            f"{sources[0].name!r} is a stream; set training.steps"
        )
    mask_type = job_config.model.attn_mask_type
    of_pairs = [s.encode for s in sources if isinstance(s.encode, PairTokens)]
    for encode in of_pairs:
        encode.has_reference = job_config.loss.reference == "precomputed"
    packing = Packing(
        training.packing,
        section.seq_len,
        getattr(tokenizer, "eos_id", None) or 0,
        positions=reads_positions(mask_type),
        # Document ids, because end-of-text tokens may also occur inside documents.
        document_ids=training.packing != "concat"
        or mask_type != "causal"
        or training.mask_boundary_loss is True
        or not all(s.is_text for s in sources),
        sources=len(sources) > 1,
        pair_ids=bool(of_pairs),
        ref_logprobs=any(encode.has_reference for encode in of_pairs),
    )
    planned = all(source.is_indexed and source.limit is not None for source in sources)
    rows = batch_size = section.local_batch_size
    if training.global_batch_size > 0 and infinite:
        rows = training.global_batch_size // dp_world_size
        batch_size = max(n for n in range(1, min(batch_size, rows) + 1) if rows % n == 0)
    elif is_training and dp_world_size > 1 and dp_rank == 0:
        logger.info("rows depend on the number of ranks: training.global_batch_size is not set")
    if not is_training and not sources[0].is_indexed:  # each rank reads one row stream
        rows = None
    dataset = PackedDataset(sources, packing, dp_rank, dp_world_size, infinite, rows, planned)
    loader_options = {**asdict(section.dataloader), "batch_size": batch_size}
    return ParallelAwareDataloader(dataset, dp_rank, dp_world_size, **loader_options)
