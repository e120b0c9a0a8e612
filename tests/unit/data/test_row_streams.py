"""Row streams, packing, order and mixtures: which documents make which row."""

import pickle
import re
from itertools import islice

import numpy as np
import pytest
import torch
from datasets import Dataset, interleave_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.test_datasets import NumberTokenizer, documents_of
from torchtitan.batch.documents import IGNORE_INDEX, document_ids_from_positions
from torchtitan.config import ConfigManager
from torchtitan.data import DatasetConfig
from torchtitan.data.dataloader import ParallelAwareDataloader
from torchtitan.data.document_sources import STREAM_BLOCK, Order, Source
from torchtitan.data.open_document import Tokens
from torchtitan.data.packed_dataset import PackedDataset
from torchtitan.data.row_streams import Packing
from torchtitan.data.text_datasets import DATASETS, build_text_validation_dataloader

TOKENIZER = NumberTokenizer()


class Numbered:
    """Documents of these lengths; token k of document i is the id 1,000 i + k."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return 1000 * index + np.arange(self.lengths[index])


def tokens_of(lengths):
    return [1000 * i + k for i, length in enumerate(lengths) for k in range(length)]


def source(lengths, **fields):
    return Source("numbers", Numbered(lengths), Tokens, TOKENIZER, **fields)


def rows_of(dataset, n=None):
    return [(x, labels) for x, labels in islice(dataset, n)]


def documents_in(rows):
    """Return the documents' parts in the rows, as (row, list of ids); without padding."""
    parts = []
    for number, (x, _) in enumerate(rows):
        ids = x["document_ids"].tolist()
        for document in sorted(set(ids) - {-1}):
            tokens = [t for t, i in zip(x["input"].tolist(), ids, strict=True) if i == document]
            parts.append((number, tokens))
    return parts


# ---- order ----


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**53))
def test_each_pass_is_a_permutation(n, seed):
    order = Order(n, str(seed))
    passes = [[order.index(p * n + i) for i in range(n)] for p in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(n))
    assert n < 10 or passes[0] != passes[1]


@pytest.mark.parametrize("n", [10, 64])
def test_every_document_is_at_every_place_equally_often(n):
    """Pearson's test over 200 passes: chi-squared of n x n counts has a normal distribution."""
    order = Order(n, seed="3")
    counts = np.zeros((n, n))
    for p in range(200):
        counts[np.arange(n), [order.index(p * n + i) for i in range(n)]] += 1
    expected, degrees = 200 / n, (n - 1) ** 2
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_squared - degrees) < 3 * (2 * degrees) ** 0.5


# ---- packing ----


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.sampled_from(["fit", "none"]))
def test_only_documents_longer_than_a_row_are_cut(lengths, method):
    if not any(lengths):
        return
    packing = Packing(method, 16, padding_id=7, positions=True, document_ids=True)
    rows = rows_of(PackedDataset([source(lengths)], packing))
    parts = documents_in(rows)
    for index, length in enumerate(lengths):
        whole = [1000 * index + k for k in range(length)]
        own = [tokens for _, tokens in parts if tokens and tokens[0] // 1000 == index]
        assert [t for tokens in own for t in tokens] == whole
        assert len(own) == -(-length // 16)
    assert method == "fit" or all(len(set(x["document_ids"].tolist()) - {-1}) == 1 for x, _ in rows)
    for x, labels in rows:
        ids, tokens = x["document_ids"], x["input"]
        assert tokens[ids == -1].eq(7).all() and labels[ids == -1].eq(IGNORE_INDEX).all()
        assert document_ids_from_positions(x["positions"][None])[0].equal(ids)
        for t, label in zip(tokens[ids >= 0].tolist(), labels[ids >= 0].tolist(), strict=True):
            is_last = t % 1000 == lengths[t // 1000] - 1
            assert label == (IGNORE_INDEX if is_last else t + 1)


def test_fitted_rows_are_97_percent_full_at_log_normal_lengths():
    lengths = np.random.default_rng(0).lognormal(np.log(600) - 0.5, 1, 20_000).astype(int) + 1
    packing = Packing("fit", 2048, document_ids=True)
    dataset = PackedDataset([source(lengths)], packing, infinite=True, rows=4)
    padding = [(x["document_ids"] < 0).float().mean() for x, _ in rows_of(dataset, 400)]
    assert sum(padding) / len(padding) <= 0.03
    dataset = PackedDataset([source([9] * 10)], Packing("fit", 18, document_ids=True))
    assert [(x["document_ids"] < 0).sum().item() for x, _ in rows_of(dataset)] == [0] * 5


def test_trained_tokens_are_the_labels_that_count():
    def encode(ids):
        return Tokens(ids, ids % 2 == 0)

    for method in ("concat", "fit"):
        chats = Source("numbers", Numbered([9, 9]), encode, TOKENIZER)
        rows = rows_of(PackedDataset([chats], Packing(method, 6, document_ids=True)))
        for x, labels in rows:
            counted = labels[labels != IGNORE_INDEX]
            assert len(counted) and counted.remainder(2).eq(0).all()
            if method == "fit":
                assert counted.equal(x["input"][labels != IGNORE_INDEX] + 1)


# ---- mixtures ----


@pytest.mark.parametrize("n_rows", [4, 64])
@pytest.mark.parametrize("method", ["concat", "fit"])
def test_shares_of_a_mixture_follow_the_weights(method, n_rows):
    """After a million tokens, although documents of one source are ten times longer than another's."""
    generator = np.random.default_rng(1)
    weights = [0.5, 0.3, 0.2]
    sources = [
        source(generator.lognormal(mean, 0.7, 500).astype(int) + 1, weight=weight, seed=i)
        for i, (mean, weight) in enumerate(zip([4, 6.5, 5], weights, strict=True))
    ]
    packing = Packing(method, 512, document_ids=True, sources=True)
    dataset = PackedDataset(sources, packing, infinite=True, rows=n_rows)
    rows = iter(dataset)
    tokens = torch.zeros(3)
    while tokens.sum() < 1_000_000:
        x, _ = next(rows)
        tokens += x["sources"][x["document_ids"] >= 0].bincount(minlength=3)
    assert (tokens / tokens.sum() - torch.tensor(weights)).abs().max() <= 0.005


def test_sources_of_equal_length_have_orders_of_their_own():
    sources = [source([3] * 50, seed=7), source([3] * 50, seed=7)]
    rows = rows_of(PackedDataset(sources, Packing("none", 4, sources=True)))
    order = [[x["sample_ids"][0].item() for x, _ in rows if x["sources"][0] == i] for i in (0, 1)]
    assert sorted(order[0]) == sorted(order[1]) and order[0] != order[1]


def test_source_with_a_limit_leaves_the_mixture_and_the_end_of_all_ends_the_data():
    sources = [source([5] * 4, limit=1.0), source([5] * 40, limit=0.5, weight=0.1)]
    packing = Packing("concat", 4, sources=True)
    rows = rows_of(PackedDataset(sources, packing, infinite=True))
    assert [int(x["sources"][0]) for x, _ in rows].count(0) == 4
    assert len(rows) == 24


def test_bad_document_is_named_by_its_index_though_the_order_is_shuffled():
    samples = [{"text": "1 2"}] * 20 + [{"text": "half a pair \ud800"}]

    def dataset(planned):
        texts = Source("texts", samples, lambda sample: sample["text"], TOKENIZER, limit=3, seed=5)
        return PackedDataset([texts], Packing("none", 4), rows=2, planned=planned)

    for read in (lambda: dataset(True), lambda: rows_of(dataset(False), 40)):
        with pytest.raises(ValueError, match="'texts', document 20 .*half of a surrogate pair"):
            read()


# ---- streams ----


def stream_of(n, num_shards):
    samples = [{"text": " ".join([str(i)] * 5)} for i in range(n)]
    return Dataset.from_list(samples).to_iterable_dataset(num_shards=num_shards)


def stream_rows(rank, ranks, rows, states=(), n=None, seed=None, num_shards=4, count=400):
    text = Source("stream", stream_of(count, num_shards), lambda s: s["text"], TOKENIZER, seed=seed)
    dataset = PackedDataset([text], Packing("concat", 4), rank, ranks, True, rows)
    if states:
        dataset.inherit(list(states))
    return [x["input"][0].item() for x, _ in rows_of(dataset, n)], dataset.state_dict()


def test_ranks_share_the_files_of_a_stream():
    """8 rows of 4 files: each file fills two rows of a step."""
    alone, _ = stream_rows(0, 1, 8, n=80)
    for ranks in (2, 4):
        of_ranks = [stream_rows(rank, ranks, 8 // ranks, n=80 // ranks) for rank in range(ranks)]
        n = 8 // ranks
        steps = [r[i : i + n] for i in range(0, 80 // ranks, n) for r, _ in of_ranks]
        assert [token for step in steps for token in step] == alone
        rest = [
            stream_rows(0, 1, 8, [state for _, state in of_ranks], n=16)[0],
            stream_rows(0, 1, 8, n=96)[0][80:],
        ]
        assert rest[0] == rest[1]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_validation_reads_each_document_of_a_stream_once_on_any_number_of_ranks(ranks, monkeypatch):
    """Also on ranks whose number and the global batch have no divisor in common with the files."""
    entry = DatasetConfig(
        "", lambda path: stream_of(24, 6 if ranks == 3 else 5), lambda s: s["text"]
    )
    monkeypatch.setitem(DATASETS, "stream", entry)
    flags = ["dataset=stream", "seq_len=8", "local_batch_size=2", "steps=-1", "enable"]
    config = ConfigManager().parse_args(
        ["--training.global_batch_size=12", "--training.packing=none"]
        + [f"--validation.{flag}" for flag in flags]
    )
    loaders = [build_text_validation_dataloader(ranks, r, TOKENIZER, config) for r in range(ranks)]
    rows = [row for loader in loaders for x, _ in loader for row in x["input"].tolist()]
    assert sorted(row[1] for row in rows) == list(range(24))


SETS = {
    "indexed": lambda: documents_of([9, 2, 31] * 8),
    "stream": lambda: stream_of(40, 4),
    "shuffled stream": lambda: stream_of(40, 4).shuffle(seed=3, buffer_size=1),
    "mixed stream": lambda: interleave_datasets(
        [stream_of(40, 4), stream_of(12, 4)], probabilities=[0.3, 0.7], seed=3
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name, workers",
    [
        ("indexed", 2),
        ("stream", 2),
        ("shuffled stream", 0),
        ("mixed stream", 0),
        # `datasets` reads a mixture with threads. After that, a forked worker may hang.
        pytest.param("mixed stream", 2, marks=pytest.mark.slow),
    ],
)
def test_position_at_any_time_is_that_of_the_rows_with_or_without_data_workers(name, workers):
    """`datasets` would split a worker's part among the workers once more."""

    def loader_with(workers, position=None):
        text = Source("data", SETS[name](), lambda s: s["text"], TOKENIZER)
        dataset = PackedDataset([text], Packing("concat", 4), infinite=True, rows=4)
        loader = ParallelAwareDataloader(dataset, 0, 1, batch_size=4, num_workers=workers)
        loader.load_state_dict(position or {})
        return loader

    def rows(batches, n):
        return [x["input"][:, 0].tolist() for x, _ in islice(batches, n)]

    expected = rows(loader_with(0), 120)
    loader = loader_with(workers)
    start = loader.state_dict()
    batches = iter(loader)
    assert rows(batches, 70) == expected[:70]
    resumed = loader_with(workers, loader.state_dict())
    again = loader_with(workers, resumed.state_dict())  # saved right after loading
    for each in (batches, resumed, again):
        assert rows(each, 20) == expected[70:90]
    loader.load_state_dict(start)  # as each validation does
    assert rows(loader, 20) == expected[:20]


def test_shuffled_stream_goes_on_within_a_block():
    n = 3 * STREAM_BLOCK
    unbroken, _ = stream_rows(0, 1, 2, n=n, seed=5, num_shards=2, count=n // 2)
    in_file_order = sorted(unbroken[: n // 2])
    assert in_file_order == list(range(n // 2)) != unbroken[: n // 2]
    assert sorted(unbroken[n // 2 :]) == in_file_order and unbroken[n // 2 :] != unbroken[: n // 2]
    for at in (7, STREAM_BLOCK + 3, n // 2 + 11):
        _, state = stream_rows(0, 1, 2, n=at, seed=5, num_shards=2, count=n // 2)
        resumed, _ = stream_rows(0, 1, 2, [state], n=n - at, seed=5, num_shards=2, count=n // 2)
        assert resumed == unbroken[at:]


# ---- the position ----


@pytest.mark.parametrize("method", ["concat", "fit"])
def test_position_takes_200_bytes_of_a_row_stream(method):
    lengths = np.random.default_rng(0).integers(1, 900, 1_000_000)
    dataset = PackedDataset([source(lengths, seed=1)], Packing(method, 512), infinite=True, rows=64)
    state = dataset.state_dict()
    state["lanes"] = [([], [(100_000_000, 0, [])], [0])] * 64  # far on
    dataset.load_state_dict(state)
    loader = ParallelAwareDataloader(dataset, 0, 1, batch_size=64)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    assert len(loader.state_dict()["dp_rank_0"]) <= 64 * 200
    assert len(pickle.dumps(dataset.state_dict())) <= 64 * 200


def test_waiting_document_of_another_length_than_at_the_save_is_refused():
    lengths = [5, 9, 5, 9]
    dataset = PackedDataset([source(lengths)], Packing("fit", 16))
    rows_of(dataset, 1)
    state = dataset.state_dict()
    lengths[2] = 6
    with pytest.raises(ValueError, match="document 2 .* had 5 tokens .* has 6; resume with"):
        PackedDataset([source(lengths)], Packing("fit", 16)).load_state_dict(state)


def test_other_data_and_another_order_are_refused():
    state = PackedDataset([source([5] * 9, seed=1)], Packing("concat", 4)).state_dict()
    for identities in ([(9, 2)], [(9, None)], [(8, 1)], [(10, 1)], [(9, 1), (1, None)]):
        sources = [source([5] * n, seed=seed) for n, seed in identities]
        message = re.escape(f"= [(9, 1)], and this run has {identities} (")
        with pytest.raises(ValueError, match=f"{message}.*exclude_from_loading"):
            PackedDataset(sources, Packing("concat", 4)).load_state_dict(state)


@pytest.mark.parametrize("method", ["concat", "fit"])
def test_another_global_batch_loses_no_token_and_repeats_none(method):
    lengths = np.random.default_rng(3).integers(1, 30, 400)
    states, seen = [], []
    for rows, n in [(4, 40), (6, 30), (1, 25), (8, None)]:
        packing = Packing(method, 16, padding_id=-1)
        dataset = PackedDataset([source(lengths, seed=4)], packing, rows=rows)
        if states:
            dataset.inherit(states)
        for x, labels in rows_of(dataset, n):
            seen += x["input"][x["input"] >= 0].tolist()
            seen += [labels[-1].item()] * (method == "concat")
        states = [dataset.state_dict()]
    # Fewer than a row of each stream.
    left = [t for places, *_ in states[0]["lanes"] for place in places for t in place["tokens"]]
    assert sorted(seen + left) == tokens_of(lengths)


def test_another_global_batch_divides_the_counts_of_a_mixture_s_tokens():
    def dataset(rows):
        sources = [source([5] * 40, seed=1), source([9] * 40, seed=2)]
        return PackedDataset(sources, Packing("concat", 16), rows=rows)

    first, resumed = dataset(2), dataset(4)
    rows_of(first, 8)
    resumed.inherit([first.state_dict()])
    totals = [np.sum([lane[2] for lane in x.state_dict()["lanes"]], 0) for x in (first, resumed)]
    assert totals[0].all() and abs(totals[0] - totals[1]).max() < 4  # rounded down
