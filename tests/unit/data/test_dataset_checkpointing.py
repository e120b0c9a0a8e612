"""A run with data workers that is resumed continues with exactly the batches of the unbroken run."""

from itertools import islice

import pytest
import torch
from datasets import interleave_datasets, load_dataset

from torchtitan.config import ConfigManager
from torchtitan.data.text_datasets import DATASETS, build_text_dataloader
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets import DatasetConfig

pytestmark = pytest.mark.long

SEQ_LEN = 256


@pytest.fixture(scope="module")
def c4_test():
    return load_dataset("tests/assets/c4_test", split="train")


@pytest.fixture
def registered(c4_test):
    """Register the first 32 documents, by index and as a stream of 4 parts; they are read several times."""
    small = c4_test.select(range(32))
    halves = [small.select(range(16)), small.select(range(16, 32))]

    def stream(part):
        return part.to_iterable_dataset(num_shards=4)

    data = {
        "small_indexed": small,
        "small_stream": stream(small),
        "small_shuffled_stream": stream(small).shuffle(seed=3, buffer_size=1),
        "small_mixed_stream": interleave_datasets(
            [stream(half) for half in halves], probabilities=[0.3, 0.7], seed=3
        ),
    }
    names = {
        name: DatasetConfig("", lambda path, x=x: x, lambda sample: sample["text"])
        for name, x in data.items()
    }
    DATASETS.update(names)
    yield
    for name in names:
        del DATASETS[name]


def build(dataset, world_size, rank, num_workers=0):
    flags = f"dataset={dataset} local_batch_size=1 seq_len={SEQ_LEN} dataloader.num_workers={num_workers}"
    config = ConfigManager().parse_args([f"--training.{flag}" for flag in flags.split()])
    return build_text_dataloader(
        world_size, rank, HuggingFaceTokenizer("tests/assets/tokenizer"), config
    )


def assert_resume_repeats(dataset, world_size, rank, num_before, num_after, num_workers=0):
    unbroken = build(dataset, world_size, rank, num_workers)
    batches = iter(unbroken)
    for _ in range(num_before):
        next(batches)
    state = unbroken.state_dict()

    resumed = build(dataset, world_size, rank, num_workers)
    resumed.load_state_dict(state)
    resumed_batches = iter(resumed)
    for _ in range(num_after):
        (inputs, labels), (again_inputs, again_labels) = next(batches), next(resumed_batches)
        assert torch.equal(inputs["input"], again_inputs["input"])
        assert torch.equal(labels, again_labels)


@pytest.mark.parametrize(
    "dataset, num_before",
    [("small_indexed", 70), ("small_mixed_stream", 70), ("small_shuffled_stream", 1)],
)
def test_resumed_run_repeats_the_unbroken_one_with_two_workers(registered, dataset, num_before):
    assert_resume_repeats(dataset, 2, 1, num_before, num_after=30, num_workers=2)


@pytest.mark.parametrize("dataset", ["small_indexed", "small_mixed_stream"])
def test_position_saved_before_the_first_batch_is_the_beginning(registered, dataset):
    """Each validation goes back to the start of the data."""
    loader = build(dataset, 1, 0, num_workers=2)
    start = loader.state_dict()
    first = [labels for _, labels in islice(loader, 5)]
    for _ in range(2):
        loader.load_state_dict(start)
        again = [labels for _, labels in islice(loader, 5)]
        assert torch.equal(torch.stack(first), torch.stack(again))


@pytest.mark.parametrize("dataset", ["small_indexed", "small_stream"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_position_saved_right_after_loading_is_the_loaded_one(registered, dataset, num_workers):
    first, second, third = (build(dataset, 1, 0, num_workers) for _ in range(3))
    batches = iter(first)
    for _ in range(9):
        next(batches)
    second.load_state_dict(first.state_dict())
    third.load_state_dict(second.state_dict())
    for (_, labels), (_, again) in zip(islice(batches, 5), third, strict=False):
        assert torch.equal(labels, again)
