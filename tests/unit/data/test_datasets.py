import gzip
import json
import os
from itertools import islice

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.config import JobConfig
from torchtitan.config.checks import check_datasets
from torchtitan.data import DatasetConfig, local_files, open_document, row_streams
from torchtitan.data.local_files import load_local_documents
from torchtitan.data.packed_dataset import PackedDataset
from torchtitan.data.row_streams import Packing
from torchtitan.data.text_datasets import (
    DATASETS,
    HuggingFaceTextDataset,
    build_text_dataloader,
    build_text_validation_dataloader,
    open_source,
)
from torchtitan.data.tokenizer import BaseTokenizer, HuggingFaceTokenizer

BOS, EOS = 1_000_001, 1_000_002


class NumberTokenizer(BaseTokenizer):
    """Encodes texts of numbers; each number is its own token id. Begin and end ids only if `marks`."""

    def __init__(self, marks=False):
        super().__init__()
        self.marks = marks

    def encode(self, text, add_bos=False, add_eos=False):
        numbers = [int(word) for word in text.split()]
        return [BOS] * (add_bos and self.marks) + numbers + [EOS] * (add_eos and self.marks)

    def decode(self, token_ids):
        return " ".join(map(str, token_ids))

    def get_vocab_size(self):
        return EOS + 1


def documents_of(lengths):
    """Return texts of the given lengths in tokens; no token occurs twice."""
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    return [
        {"text": " ".join(map(str, range(start, start + length)))}
        for start, length in zip(starts, lengths, strict=True)
    ]


@pytest.fixture(autouse=True)
def registry():
    """Restore DATASETS."""
    before = dict(DATASETS)
    yield
    DATASETS.clear()
    DATASETS.update(before)


def register(samples, name="numbers"):
    DATASETS[name] = DatasetConfig("", lambda path: samples, lambda sample: sample["text"])


def make_dataset(samples, seq_len=4, marks=False, **kwargs):
    register(samples)
    return HuggingFaceTextDataset("numbers", None, NumberTokenizer(marks), seq_len, **kwargs)


def tokens_of(input_dict, labels):
    """Return the seq_len + 1 tokens of a sequence."""
    return [*input_dict["input"].tolist(), labels.tolist()[-1]]


# ---- packing ----


def packed_slowly(samples, seq_len):
    stream = []
    for sample in samples:
        stream += [BOS, *[int(word) for word in sample["text"].split()], EOS]
    length = seq_len + 1
    return [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12), seq_len=st.integers(1, 9))
def test_packing_cuts_the_documents_laid_end_to_end(lengths, seq_len):
    samples = documents_of(lengths)
    expected = packed_slowly(samples, seq_len)
    dataset = make_dataset(samples, seq_len, marks=True)
    if not expected:
        with pytest.raises(ValueError, match="too small: reader 1 of 1 got"):
            next(iter(dataset))
        return
    sequences = list(dataset)
    assert [tokens_of(*sequence) for sequence in sequences] == expected
    assert [labels.tolist() for _, labels in sequences] == [row[1:] for row in expected]
    document_of = [i for i, length in enumerate(lengths) for _ in range(length + 2)]
    ids = [x["sample_ids"].tolist() for x, _ in sequences]
    n = seq_len + 1
    assert ids == [[document_of[i * n], document_of[i * n + seq_len]] for i in range(len(ids))]


def test_finite_data_end_and_start_over_when_iterated_again():
    samples = documents_of([7, 10])
    dataset = make_dataset(samples)
    first, second = list(dataset), list(dataset)
    assert len(first) == len(second) == 3
    assert tokens_of(*first[0]) == tokens_of(*second[0]) == [0, 1, 2, 3, 4]
    third, resumed = iter(dataset), make_dataset(samples)
    next(third)
    resumed.load_state_dict(dataset.state_dict())  # without the rest of the earlier passes
    assert sequences_of(resumed) == sequences_of(third)


@pytest.mark.parametrize("streamed", [False, True])
def test_iterating_again_before_the_end_goes_on(streamed):
    samples = Dataset.from_list(documents_of([6] * 10))
    expected = sequences_of(make_dataset(samples))
    dataset = make_dataset(samples.to_iterable_dataset() if streamed else samples)
    sequences = [sequences_of(islice(dataset, n)) for n in (3, 4, None)]
    assert sum(sequences, []) == expected


def test_data_without_documents_or_tokens_fail_instead_of_looping(monkeypatch):
    with pytest.raises(ValueError, match="'numbers' holds no documents"):
        make_dataset([], infinite=True)
    monkeypatch.setattr(row_streams, "MAX_EMPTY_DOCUMENTS_IN_A_ROW", 50)
    with pytest.raises(ValueError, match="50 consecutive documents gave no tokens"):
        next(iter(make_dataset([{"text": ""}], infinite=True)))
    mostly_empty = make_dataset([{"text": ""}] * 49 + documents_of([1]), infinite=True)
    assert tokens_of(*next(iter(mostly_empty))) == [0] * 5


def test_samples_loaders_and_streams_that_cannot_serve_are_named():
    with pytest.raises(ValueError, match="'numbers'.*must be a string, got 7"):
        next(iter(make_dataset([{"text": 7}])))
    with pytest.raises(ValueError, match="len.. and .i..*IterableDataset, got generator"):
        make_dataset(sample for sample in documents_of([9]))
    stream = Dataset.from_list(documents_of([9])).to_iterable_dataset()
    with pytest.raises(ValueError, match="no documents for this rank"):  # which would wait for ever
        next(iter(make_dataset(stream, dp_rank=1, dp_world_size=2, infinite=True)))


def test_stream_saved_by_two_ranks_names_the_remedies_on_three():
    stream = Dataset.from_list(documents_of([9] * 8)).to_iterable_dataset(num_shards=4)
    states = [make_dataset(stream, dp_rank=r, dp_world_size=2).state_dict() for r in range(2)]
    with pytest.raises(ValueError, match="on as many ranks.*exclude_from_loading = .'data"):
        make_dataset(stream, dp_world_size=3).inherit(states)


# ---- long documents ----


def sequences_of(dataset):
    return [tokens_of(*item) for item in dataset]


@pytest.fixture
def short_pieces(monkeypatch):
    monkeypatch.setattr(open_document, "PIECE_CHARACTERS", 640)
    monkeypatch.setattr(open_document, "_COMPARED_CHARACTERS", 64)


class MarkingTokenizer(NumberTokenizer):
    """Like a tokenizer whose post-processor always adds both marks."""

    hf_adds_bos = hf_adds_eos = True

    def encode(self, text, add_bos=False, add_eos=False):
        return super().encode(text, True, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "tokenizer", [NumberTokenizer(), NumberTokenizer(marks=True), MarkingTokenizer(marks=True)]
)
def test_document_in_pieces_has_the_tokens_of_the_whole(
    tokenizer, stream, monkeypatch, short_pieces
):
    samples = documents_of([3, 5000, 0, 700, 1])
    register(Dataset.from_list(samples).to_iterable_dataset() if stream else samples)
    in_pieces = sequences_of(HuggingFaceTextDataset("numbers", None, tokenizer, 4))
    monkeypatch.setattr(open_document, "PIECE_CHARACTERS", 10**9)
    register(samples)
    assert in_pieces == sequences_of(HuggingFaceTextDataset("numbers", None, tokenizer, 4))


def test_real_tokenizer_cuts_long_documents_without_a_trace_or_warns(short_pieces, caplog):
    tokenizer = HuggingFaceTokenizer("tests/assets/tokenizer")
    for text in ("It's 3.14 times\n\n  as long;\tnaïve — don't.\r\n" * 400, "a" * 5000):
        assert "document of" not in caplog.text
        register([{"text": text}])
        sequences = sequences_of(HuggingFaceTextDataset("numbers", None, tokenizer, 16))
        cut = [token for row in sequences for token in row]
        uncut = tokenizer.encode(text, add_bos=True, add_eos=True)
        assert cut == uncut[: len(cut)] or text[0] == "a"
        assert tokenizer.decode(uncut[1 : len(cut)]).startswith(tokenizer.decode(cut[1:])[:4000])
    assert "document of 5,000 characters" in caplog.text


@pytest.mark.parametrize("method, stream", [("concat", False), ("concat", True), ("fit", False)])
def test_resume_within_a_long_document_is_exact(method, stream, short_pieces):
    samples = documents_of([3, 5000, 2])
    register(Dataset.from_list(samples).to_iterable_dataset() if stream else samples)

    def dataset():
        source = open_source("numbers", None, NumberTokenizer(marks=True))
        return PackedDataset([source], Packing(method, 4))

    def rows_of(dataset):
        return [[*x["input"].tolist(), *labels.tolist()] for x, labels in dataset]

    unbroken = dataset()
    states = [unbroken.state_dict(), *(unbroken.state_dict() for _ in unbroken)]
    rows = rows_of(dataset())
    for num_before in (0, 1, 100, 900):
        if not stream:
            assert len(str(states[num_before])) < 250, "a position holds no text and no tokens"
        resumed = dataset()
        resumed.load_state_dict(states[num_before])
        assert rows_of(resumed) == rows[num_before:]


@pytest.mark.parametrize("mask_type", ["block_causal", None])
def test_separator_inside_of_a_text_begins_no_document(mask_type, tmp_path, caplog):
    tokenizer = HuggingFaceTokenizer("tests/assets/tokenizer")
    write_json_lines(tmp_path / "a.jsonl", [f"one {tokenizer.eos_token} two", "three"])
    config = JobConfig()
    config.model.attn_mask_type = mask_type
    training = config.training
    training.dataset, training.dataset_path = "local", str(tmp_path)
    training.seq_len, training.local_batch_size = 24, 1
    loader = build_text_dataloader(1, 0, tokenizer, config)
    for _, (batch, _) in zip(range(3), loader, strict=False):
        ids = batch["document_ids"][0].tolist()
        begins = [i for i in range(24) if i and ids[i] != ids[i - 1]]
        assert begins == [i for i in range(1, 24) if batch["input"][0, i] == tokenizer.bos_id]
    assert caplog.text.count("'<|end_of_text|>' (1 times), encoded") == 1
    assert "a.jsonl, line 1: the text contains" in caplog.text


# ---- files ----


def local_texts(path):
    documents = load_local_documents(str(path))
    return [documents[index]["text"] for index in range(len(documents))]


def write_json_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[1]", "list"),
        ('{"text": null}', "got None there"),
        ('{"text": 5}', "got 5 there"),
        ("9" * 4301, "not valid JSON .*4300 digits"),  # the limit of Python's integers
    ],
)
def test_corrupt_json_line_is_named_with_file_and_line(tmp_path, line, reason):
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"text": "1"}}\n\n{line}\n{{"text": "4"}}\n')
    with pytest.raises(ValueError, match=f"data.jsonl, line 3.*{reason}"):
        list(HuggingFaceTextDataset("local", str(path), NumberTokenizer(), seq_len=4))


@pytest.mark.parametrize("name", ["data.jsonl", "data.txt"])
def test_file_that_changes_while_it_is_read_is_named(tmp_path, name):
    path = tmp_path / name
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    documents = load_local_documents(str(path))
    assert documents[0]
    for content, now in [
        ('{"text": "one"}\n', "has 16 now"),
        ('{"text": "uno"}\n{"text": "due"}\n', "has 32 now, and was written to since"),
        (None, "has vanished"),
    ]:
        if content is None:
            path.unlink()
        else:
            (tmp_path / "other").write_text(content)
            os.utime(tmp_path / "other", ns=(0, path.stat().st_mtime_ns + 10**9))
            (tmp_path / "other").rename(path)
        with pytest.raises(ValueError, match=f"{name} had 32 bytes when .*, and {now}"):
            documents[len(documents) - 1]


def test_json_lines_and_lists_are_read_by_number_in_the_order_of_names(tmp_path):
    (tmp_path / "b.json").write_text('[{"text": "one"}, {"text": "two"}]')
    lines = '{"text": "one"}\n\n \f\v\n{"text": "zwölf", "id": 3}'
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "notes.csv").write_text("not data")
    assert local_texts(tmp_path) == ["one", "zwölf", "one", "two"]
    for index in (4, -1):
        with pytest.raises(IndexError):
            load_local_documents(str(tmp_path))[index]


def test_names_are_found_in_any_case_and_own_ones_with_capitals(monkeypatch):
    documents = [{"text": "one"}]
    own = DatasetConfig("", lambda path: documents, lambda sample: sample["text"])
    monkeypatch.setitem(DATASETS, "MyData", own)
    config = JobConfig()
    for name, found in (("MyData", "MyData"), ("C4_Test", "c4_test")):
        config.training.dataset = name
        check_datasets(config, DATASETS)
        dataset = HuggingFaceTextDataset(name, None, NumberTokenizer())
        assert dataset.dataset_name == found


def test_hidden_files_and_the_card_of_a_dataset_are_no_data_and_two_kinds_are_refused(tmp_path):
    write_json_lines(tmp_path / "a.jsonl", ["one"])
    (tmp_path / "._a.jsonl").write_bytes(bytes(range(256)))
    (tmp_path / ".ipynb_checkpoints").mkdir()
    write_json_lines(tmp_path / ".ipynb_checkpoints" / "a-checkpoint.jsonl", ["stale"])
    (tmp_path / "README.md").write_text("about these files")
    assert local_texts(tmp_path) == ["one"]
    (tmp_path / "b.txt").write_text("two")
    with pytest.raises(ValueError, match="one kind.*JSON, text"):
        load_local_documents(str(tmp_path))
    (tmp_path / "a.jsonl").unlink()  # among text files the card is a document
    assert len(local_texts(tmp_path)) == 2


def test_parquet_files_may_differ_in_columns_that_are_not_read(tmp_path):
    columns = {"text": ["one", "2024-05-01"], "score": [0.5, 1.0]}
    for name, more in {"a": {}, "b": {"perplexity": [3.0, 4.0]}}.items():
        pyarrow.parquet.write_table(pyarrow.table(columns | more), tmp_path / f"{name}.parquet")
    assert local_texts(tmp_path) == ["one", "2024-05-01"] * 2
    pyarrow.parquet.write_table(pyarrow.table({"body": ["one"]}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match=r"c.parquet needs .* text, got \['body'\]"):
        load_local_documents(str(tmp_path))


def test_copy_of_a_compressed_file_is_made_once_and_again_when_the_file_changes(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    path = tmp_path / "data.txt.gz"
    for text, changed, copies in [("one", 1, 1), ("one", 1, 1), ("two", 2, 2)]:
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
        os.utime(path, (changed, changed))
        assert local_texts(path) == [text]
        assert caplog.text.count("copying ") == copies
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    with pytest.raises(ValueError, match="cannot be copied to .*; set XDG_CACHE_HOME"):
        load_local_documents(str(path))


def test_splits_that_are_held_out_of_training_are_not_read(tmp_path, caplog):
    for name in ("data/train-00000-of-00001", "data/test-00000-of-00001", "latest", "valid/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_json_lines(tmp_path / f"{name}.jsonl", [name.split("/")[-1].split("-")[0]])
    assert local_texts(tmp_path) == ["train", "latest"]
    assert "of 4 files, 2 are named as a test or validation split" in caplog.text
    (tmp_path / "data" / "train-00000-of-00001.jsonl").unlink()
    assert local_texts(tmp_path) == ["test", "latest", "a"]
    caplog.clear()
    write_json_lines(tmp_path / "train.jsonl", ["train"])
    for name in ("data/test-00000-of-00001", "valid/a"):
        (tmp_path / f"{name}.jsonl").unlink()
    assert local_texts(tmp_path) == ["latest", "train"] and not caplog.text


@settings(max_examples=60)
@given(st.lists(st.text("aä€🙂\n", max_size=30), max_size=8))
def test_pieces_of_a_text_file_join_to_the_file(tmp_path_factory, parts):
    text = "".join(parts)
    path = tmp_path_factory.mktemp("text") / "data.txt"
    path.write_text(text, encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_files, "TEXT_DOCUMENT_BYTES", 16)
        pieces = local_texts(path)
    assert "".join(pieces) == text
    assert all(len(piece.encode()) < 2 * 16 + 4 for piece in pieces)


def test_short_text_file_is_one_document_in_utf_8(tmp_path):
    for name in ("b.txt", "a.txt", "empty.txt"):
        (tmp_path / name).write_text(f"line of {name}\n" * (name[0] != "e"), encoding="utf-8-sig")
    (tmp_path / "empty.txt").write_text("")
    assert local_texts(tmp_path) == ["line of a.txt\n", "line of b.txt\n"]
    (tmp_path / "c.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match="c.txt is not UTF-8 text.*byte 3"):
        local_texts(tmp_path)


# ---- registry and builders ----


@pytest.mark.parametrize("name", ["c4_test", "local", "python_docs", "c4"])
def test_local_file_works_under_every_built_in_name_and_a_missing_one_is_named(tmp_path, name):
    path = write_json_lines(tmp_path / "data.jsonl", ["1 2 3 4 5"])
    dataset = HuggingFaceTextDataset(name, str(path), NumberTokenizer(), seq_len=4)
    assert tokens_of(*next(iter(dataset))) == [1, 2, 3, 4, 5]
    if name != "c4":
        with pytest.raises(FileNotFoundError, match="training.dataset_path.*/nowhere/data.jsonl"):
            HuggingFaceTextDataset(name, "/nowhere/data.jsonl", NumberTokenizer())
    if name == "local":
        with pytest.raises(ValueError, match="this training.dataset needs training.dataset_path"):
            HuggingFaceTextDataset("local", None, NumberTokenizer())


ARGUMENTS = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": NumberTokenizer()}


def test_builders_take_their_own_section():
    config = JobConfig()
    for section, values in {"training": (4, 3, 100), "validation": (9, 2, 50)}.items():
        part = getattr(config, section)
        part.seq_len, part.local_batch_size, num_tokens = values
        part.dataset = f"{section}_numbers"
        register(documents_of([num_tokens]), part.dataset)
    batches = iter(build_text_dataloader(job_config=config, **ARGUMENTS))
    assert [next(batches)[1].shape for _ in range(30)] == [(3, 4)] * 30  # an infinite dataset
    validation = build_text_validation_dataloader(job_config=config, **ARGUMENTS)
    assert [labels.shape for _, labels in validation] == [(2, 9)] * 3  # a row is padding


def test_only_training_data_is_said_to_be_read_again(caplog):
    register(documents_of([50]), "read_again")
    config = JobConfig()
    for section in (config.training, config.validation):
        section.dataset, section.seq_len, section.local_batch_size = "read_again", 9, 2
    validation = build_text_validation_dataloader(job_config=config, infinite=True, **ARGUMENTS)
    assert len(list(islice(validation, 9))) == 9
    assert "being read again" not in caplog.text
    assert "validation.steps takes more rows than the validation data have" in caplog.text
    assert len(list(islice(build_text_dataloader(job_config=config, **ARGUMENTS), 9))) == 9
    assert "Dataset read_again is being read again from the beginning" in caplog.text


def test_validation_without_data_of_its_own_takes_the_training_section(caplog):
    register(documents_of([100]), "numbers")
    config = JobConfig()
    config.training.dataset, config.training.seq_len = "numbers", 4
    config.training.dataset_path, config.validation.local_batch_size = "somewhere", 2

    def shapes():
        validation = build_text_validation_dataloader(job_config=config, **ARGUMENTS)
        return {tuple(labels.shape) for _, labels in validation}

    assert shapes() == {(2, 4)}
    assert "validation reads the training data" in caplog.text
    caplog.clear()
    register(documents_of([18]), "numbers_validation")  # its held-out documents
    config.validation.seq_len = 3
    assert shapes() == {(2, 3)}
    assert not any("training data" in record.getMessage() for record in caplog.records)
    # With a path of its own, validation reads the training data's format, but other data.
    config.validation.dataset_path = "elsewhere"
    data = config.validation_data
    assert (data.dataset, data.dataset_path) == ("numbers", "elsewhere")
