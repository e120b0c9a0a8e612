import pickle

import numpy
import pytest
import torch
from torch.utils.data import IterableDataset

from tests import hostile
from tests.unit.data.test_datasets import NumberTokenizer
from torchtitan.config import ConfigManager
from torchtitan.data.dataloader import ParallelAwareDataloader
from torchtitan.data.text_datasets import build_text_dataloader
from torchtitan.distributed.processes.stop import leave_signals_to_trainer


class Counting(IterableDataset):
    """`({"input": i}, i)` for 100 numbers; no state of its own."""

    def __iter__(self):
        return (({"input": number}, number) for number in range(100))


def loader(dp_rank=0, dp_world_size=1, **kwargs):
    return ParallelAwareDataloader(Counting(), dp_rank, dp_world_size, **kwargs)


def test_options_that_are_unknown_are_named_and_those_without_use_dropped(recwarn):
    for name in ("bach_size", "dataset"):
        with pytest.raises(ValueError, match=f"Invalid dataloader kwargs: {name}; Stateful"):
            ParallelAwareDataloader._validate_kwargs({name: 4})
    data = loader(persistent_workers=True, prefetch_factor=2, pin_memory=True)
    assert not data.persistent_workers and data.prefetch_factor is None
    assert not data.pin_memory  # without an accelerator
    next(iter(data))
    assert not [w for w in recwarn if "pin" in str(w.message)]
    assert loader(num_workers=1).worker_init_fn is leave_signals_to_trainer
    assert loader(num_workers=1, worker_init_fn=print).worker_init_fn is print


def test_builder_takes_its_options_from_the_config():
    flags = "local_batch_size=8 dataloader.num_workers=2 dataloader.prefetch_factor=4"
    flags = [f"--training.{flag}" for flag in flags.split()]
    config = ConfigManager().parse_args([*flags, "--training.dataloader.persistent_workers"])
    data = build_text_dataloader(1, 0, NumberTokenizer(), config)
    assert (data.batch_size, data.num_workers, data.prefetch_factor) == (8, 2, 4)
    assert data.persistent_workers


def test_empty_state_is_no_position_and_missing_rank_warns(caplog):
    data = loader(dp_rank=1, dp_world_size=2, batch_size=4)
    data.load_state_dict({})
    with caplog.at_level("WARNING", logger="torchtitan"):
        data.load_state_dict({"world_size": 2})
    assert "dp_rank_1" in caplog.text
    assert next(iter(data))[1].tolist() == [0, 1, 2, 3]


class Numbered(IterableDataset):
    """100 numbers in turn; divisible among other numbers of readers."""

    can_reshard = True

    def __init__(self):
        self.next, self.inherited = 0, None

    def __iter__(self):
        while self.next < 100:
            self.next += 1
            yield {"input": self.next - 1}, self.next - 1

    def state_dict(self):
        return {"next": self.next, "extra": torch.arange(3), "sizes": torch.Size([2])}

    def load_state_dict(self, state):
        self.next = state["next"]

    def inherit(self, states):
        self.inherited = [state["next"] for state in states]


def saved_by_ranks(count, **kwargs):
    merged = {}
    for rank in range(count):
        data = ParallelAwareDataloader(Numbered(), rank, count, batch_size=4, **kwargs)
        for _, _ in zip(range(rank + 1), data, strict=False):
            pass
        merged |= data.state_dict()
    return merged


def test_position_is_one_pickle_under_the_ranks_name_that_survives_save_and_load():
    """The position may hold tensors."""
    saved = saved_by_ranks(2)
    assert saved.keys() == {"dp_rank_0", "dp_rank_1", "world_size"}
    assert isinstance(saved["dp_rank_1"], bytes)
    data = ParallelAwareDataloader(Numbered(), 1, 2, batch_size=4)
    data.load_state_dict(saved)
    assert next(iter(data))[1].tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize(
    ("ranks", "saved_workers", "workers", "positions"),
    [
        (3, 0, 0, [4, 8, 12]),
        (3, 1, 0, [4, 8, 12]),
        (1, 0, 1, [4]),
        (1, 1, 0, [4]),
        (1, 2, 0, [4, 0]),
    ],
)
def test_positions_of_other_ranks_and_workers_are_handed_to_the_dataset(
    ranks, saved_workers, workers, positions
):
    dataset = Numbered()
    data = ParallelAwareDataloader(dataset, 0, 1, batch_size=4, num_workers=workers)
    data.load_state_dict(saved_by_ranks(ranks, num_workers=saved_workers))
    assert dataset.inherited == positions


class Dealt(Numbered):
    def inherit(self, states):
        self.next = 50


def test_position_that_is_dealt_out_replaces_the_present_one():
    loaded = ParallelAwareDataloader(Dealt(), 0, 1, batch_size=4)
    loaded.load_state_dict(saved_by_ranks(1))
    with_worker = ParallelAwareDataloader(Dealt(), 0, 1, batch_size=4, num_workers=1)
    with_worker.state_dict()  # has started the worker
    for data in (loaded, with_worker):
        data.load_state_dict(saved_by_ranks(3))
        assert next(iter(data))[1].tolist() == [50, 51, 52, 53]


def test_one_hostile_position_among_those_of_other_ranks_executes_nothing(tmp_path):
    saved = saved_by_ranks(3) | {"dp_rank_2": hostile.pickle_that_creates(tmp_path / "canary")}
    with pytest.raises(ValueError, match="data position of dp_rank_2.*names .*nothing was exec"):
        ParallelAwareDataloader(Numbered(), 0, 1, batch_size=4).load_state_dict(saved)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (b"", "data position of dp_rank_0 cannot be read: Ran out of input"),
        (b"(" * 10_000_000, "data position of dp_rank_0 cannot be read"),
        (b"]" * 100_000 + b"a" * 99_999 + b".", "data position of dp_rank_0 is a list, not a dict"),
        ("text", "data position of dp_rank_0 must be bytes, got a str"),
        (pickle.dumps({"_snapshot": 3}), "does not fit this dataset.*exclude_from_loading"),
    ],
    ids=["empty", "marks", "nested list", "text", "other"],
)
def test_damaged_position_is_named(state, message):
    data = loader(batch_size=4)
    with pytest.raises(ValueError, match=message):
        data.load_state_dict({"world_size": 1, "dp_rank_0": state})
        iter(data)


def test_position_that_cannot_be_dealt_out_among_two_ranks_is_named():
    between = saved_by_ranks(1, num_workers=1, snapshot_every_n_steps=2)  # after one batch
    alone, of_three = loader().state_dict(), loader(0, 3).state_dict()
    for data, saved, message in [
        (Counting(), alone, "does not divide: resume on 1 .*exclude_from_loading = .'dataloader'"),
        (Counting(), of_three, "dp_rank_1, dp_rank_2 are missing: resume on 3"),
        (Numbered(), between, "snapshot_every_n_steps > 1"),
        *((Numbered(), {"world_size": n}, "number of ranks is") for n in (0, 10**12, "2")),
    ]:
        with pytest.raises(ValueError, match=message):
            ParallelAwareDataloader(data, 0, 2, batch_size=4).load_state_dict(saved)


def test_position_that_could_not_be_read_again_is_refused_when_it_is_saved():
    dataset = Numbered()
    dataset.state_dict = lambda: {"next": numpy.int64(3)}
    data = ParallelAwareDataloader(dataset, 0, 1, batch_size=4)
    next(iter(data))
    with pytest.raises(ValueError, match="which a checkpoint is to hold.*it names numpy"):
        data.state_dict()
