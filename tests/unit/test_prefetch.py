"""Reading a step ahead changes nothing but when data are read."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from torchtitan.batch.batch import TokenBatch
from torchtitan.data import prefetch
from torchtitan.data.dataloader import BaseDataLoader
from torchtitan.data.prefetch import StepsAhead


class Numbers(BaseDataLoader):
    """Batches 1, 2, ...: batch n has n valid tokens. `error` comes in place of batch `end`."""

    def __init__(self, end=1000, error=None):
        self.last, self.end, self.error, self.n_read = 0, end, error, 0
        self.threads = set()

    def __iter__(self):
        while self.last + 1 < self.end:
            self.threads.add(threading.current_thread())
            self.last += 1
            self.n_read += 1
            yield {"input": torch.full((1, self.last), self.last)}, torch.ones(1, self.last)
        if self.error is not None:
            raise self.error

    def state_dict(self):
        return {"last": self.last}

    def load_state_dict(self, state_dict):
        self.last = state_dict["last"]


def ahead(loader, n_steps=5):
    return StepsAhead(
        loader,
        items_per_step=2,
        n_steps=n_steps,
        pack=lambda item: TokenBatch.of(*item),
        device=torch.device("cpu"),
        n_duplicates=None,
        timeout=timedelta(seconds=5),
    )


def number(item) -> int:
    return item[0]["input"][0, 0].item()


def wait_until_idle(steps):
    for _ in range(1000):
        if not steps._steps.empty():
            return
        threading.Event().wait(0.005)
    raise AssertionError("the next step was never read")


def test_position_is_that_of_the_step_that_trains_while_the_next_one_is_read():
    loader = Numbers()
    steps = ahead(loader)
    items = iter(steps)
    for n in range(4):
        assert [number(next(items)), number(next(items))] == [2 * n + 1, 2 * n + 2]
        assert steps.counts.num_valid_tokens == 4 * n + 3
        wait_until_idle(steps)
        assert loader.last == 2 * n + 4
        assert steps.state_dict() == {"last": 2 * n + 2}
    steps.close()
    assert loader.state_dict() == {"last": 8}  # read up to 10
    assert threading.main_thread() not in loader.threads


def test_nothing_is_read_beyond_the_last_step():
    loader = Numbers()
    steps = ahead(loader, n_steps=2)
    items = iter(steps)
    assert [number(next(items)) for _ in range(4)] == [1, 2, 3, 4]
    steps.close()
    assert loader.last == loader.n_read == 4


def test_position_that_the_loader_changes_in_place_is_copied():
    class Live(Numbers):
        position = {"last": 0}

        def state_dict(self):
            self.position["last"] = self.last
            return self.position

    steps = ahead(Live())
    next(iter(steps))
    wait_until_idle(steps)
    assert steps._dataloader.state_dict() == {"last": 4} and steps.state_dict() == {"last": 2}
    steps.close()


def test_failure_on_some_of_the_ranks_that_read_the_same_data_counts_once(monkeypatch):
    def all_reduce(sums, group):
        assert group == "of the data"
        sums += torch.tensor(
            [sums[0].item(), 0, 1]
        )  # the other rank's: as many tokens, one failure

    group = SimpleNamespace(
        get_backend=lambda: "gloo",
        new_group=lambda **_: "of the data",
        all_reduce=all_reduce,
        is_initialized=lambda: False,
    )
    monkeypatch.setattr(prefetch, "dist", group)
    second = timedelta(seconds=1)
    pack = lambda item: TokenBatch.of(*item)  # noqa: E731
    steps = prefetch.StepsAhead(Numbers(), 2, 5, pack, torch.device("cpu"), 2, second)
    assert [number(item) for item, _ in zip(steps, range(3), strict=False)] == [1, 2]
    assert steps.counts == prefetch.StepCounts(3, 0, 1)
    steps.close()


def test_data_that_end_within_a_step_leave_the_position_before_it():
    loader = Numbers(end=4)
    steps = ahead(loader)
    items = iter(steps)
    assert [number(item) for item in items] == [1, 2, 3]
    assert (steps.counts.num_ran_out, steps.counts.num_failed) == (1, 0)
    assert steps.state_dict() == {"last": 2}
    steps.close()
    assert loader.last == 2


def test_error_of_the_data_is_raised_after_the_items_before_it():
    steps = ahead(Numbers(end=4, error=ValueError("line 7 is not JSON")))
    items = iter(steps)
    assert [number(next(items)) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="line 7 is not JSON"):
        next(items)
    assert steps.counts.num_failed == 1
    steps.close()


def test_error_while_packing_is_one_of_the_data():
    steps = ahead(Numbers())
    steps.close()

    def pack(item):
        raise ValueError("no positions")

    steps = StepsAhead(Numbers(), 2, 5, pack, torch.device("cpu"), None, timedelta(seconds=5))
    with pytest.raises(ValueError, match="no positions"):
        next(iter(steps))
    steps.close()


def test_loading_while_data_are_read_is_refused():
    steps = ahead(Numbers())
    with pytest.raises(RuntimeError, match="load a checkpoint before or after"):
        steps.load_state_dict({})
    steps.close()


def test_generator_of_ones_own_gets_the_dataloader_itself(tmp_path):
    from tests.distributed.training_runs import make_trainer

    trainer = make_trainer(str(tmp_path), ["--training.steps=2", "--training.local_batch_size=1"])
    seen, original = [], trainer.batch_generator

    def own_generator(data):
        seen.append(data)
        yield from original(data)

    trainer.batch_generator = own_generator
    trainer.train()
    trainer.close()
    assert seen == [trainer.dataloader] and trainer.step == 2


def test_trainer_saves_the_position_of_the_steps_it_has_trained(tmp_path):
    from tests.distributed.training_runs import make_trainer

    trainer = make_trainer(
        str(tmp_path),
        [
            "--training.steps=4",
            "--training.local_batch_size=1",
            "--training.global_batch_size=2",
            "--checkpoint.enable",
        ],
    )
    positions, tokens = [], []

    def save(step, last_step=False):
        wait = trainer._steps_ahead
        if step < 4:
            wait_until_idle(wait)
        positions.append(trainer.checkpointer.states["dataloader"].state_dict()["num_batches"])
        tokens.append(trainer.ntokens_seen)

    trainer.checkpointer.save = save
    trainer.train()
    assert positions == [2, 4, 6, 8]
    assert tokens == [64, 128, 192, 256]
    assert trainer.checkpointer.states["dataloader"] is trainer.dataloader
    trainer.close()
