"""Reading a step ahead changes nothing but when data are read."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.training_runs import make_trainer
from torchtitan.batch.batch import TokenBatch
from torchtitan.compat import Batches
from torchtitan.data import prefetch
from torchtitan.data.dataloader import BaseDataLoader
from torchtitan.data.prefetch import StepsAhead


class Numbers(BaseDataLoader):
    """Batches 1, 2, ...: batch n has n valid tokens. `error` comes in place of batch `end`.

    The position is one dict, which each batch changes.
    """

    def __init__(self, end=1000, error=None):
        self.position, self.end, self.error, self.n_read = {"last": 0}, end, error, 0
        self.threads = set()

    @property
    def last(self):
        return self.position["last"]

    def __iter__(self):
        while self.last + 1 < self.end:
            self.threads.add(threading.current_thread())
            self.position["last"] += 1
            self.n_read += 1
            yield {"input": torch.full((1, self.last), self.last)}, torch.ones(1, self.last)
        if self.error is not None:
            raise self.error

    def state_dict(self):
        return self.position

    def load_state_dict(self, state_dict):
        self.position = dict(state_dict)


def ahead(loader, n_steps=5, to_batch=TokenBatch.from_dict, n_duplicates=None):
    seconds = timedelta(seconds=5)
    options = n_steps, to_batch, lambda batch: batch.num_valid, torch.device("cpu")
    return StepsAhead(loader, 2, *options, n_duplicates, seconds)


def numbers(step) -> list[int]:
    return [batch.tokens[0, 0].item() for batch in step.batches]


def wait_until_idle(steps):
    for _ in range(1000):
        if steps._next.done():
            return
        threading.Event().wait(0.005)
    raise AssertionError("the next step was never read")


def test_position_is_that_of_the_step_that_trains_while_the_next_one_is_read():
    loader = Numbers()
    steps = ahead(loader)
    for n in range(4):
        step = steps.next_step()
        assert numbers(step) == [2 * n + 1, 2 * n + 2]
        assert step.counts.denominator == step.own_denominator == 4 * n + 3
        wait_until_idle(steps)
        assert loader.last == 2 * n + 4
        assert steps.state_dict() == {"last": 2 * n + 2}
    steps.close()
    assert loader.state_dict() == {"last": 8}  # read up to 10
    assert threading.main_thread() not in loader.threads


def test_nothing_is_read_beyond_the_last_step():
    loader = Numbers()
    steps = ahead(loader, n_steps=2)
    assert [numbers(steps.next_step()) for _ in range(2)] == [[1, 2], [3, 4]]
    steps.close()
    assert loader.last == loader.n_read == 4


def test_failure_on_some_of_the_ranks_that_read_the_same_data_counts_once(monkeypatch):
    def all_reduce(sums, group):
        assert group == "of the data"
        sums += torch.tensor([sums[0].item(), 0, 1])  # another rank's: as many tokens, one failure

    group = SimpleNamespace(
        get_backend=lambda: "gloo",
        new_group=lambda **_: "of the data",
        all_reduce=all_reduce,
        is_initialized=lambda: False,
    )
    monkeypatch.setattr(prefetch, "dist", group)
    steps = ahead(Numbers(), n_duplicates=2)
    step = steps.next_step()
    assert numbers(step) == [1, 2]
    assert step.counts == prefetch.StepCounts(3, 0, 1)
    steps.close()


def test_data_that_end_within_a_step_leave_the_position_before_it():
    loader = Numbers(end=4)
    steps = ahead(loader)
    whole, last = steps.next_step(), steps.next_step()
    assert (numbers(whole), numbers(last)) == ([1, 2], [3])
    assert (last.counts.num_ran_out, last.counts.num_failed) == (1, 0)
    again = steps.next_step()
    assert again.batches == [] and again.counts == last.counts
    assert steps.state_dict() == {"last": 2}
    steps.close()
    assert loader.last == 2


def test_own_step_of_a_client_reads_the_batches_as_the_dataloader_made_them():
    counted = []
    steps = ahead(Numbers(end=6, error=ValueError("line 7 is not JSON")))
    batches = Batches(steps, lambda labels, seconds: counted.extend(labels))
    items = [next(batches) for _ in range(5)]
    assert [input_dict["input"][0, 0].item() for input_dict, _ in items] == [1, 2, 3, 4, 5]
    assert counted == [labels.numel() for _, labels in items] == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="line 7 is not JSON"):
        next(batches)
    assert (steps._last.counts.num_ran_out, steps._last.counts.num_failed) == (0, 1)
    steps.close()


def test_error_while_packing_is_one_of_the_data_and_loading_then_is_refused():
    def to_batch(input_dict, labels):
        raise ValueError("no positions")

    steps = ahead(Numbers(), to_batch=to_batch)
    assert str(steps.next_step().error) == "no positions"
    with pytest.raises(RuntimeError, match="load a checkpoint before or after"):
        steps.load_state_dict({})
    steps.close()


def test_generator_of_ones_own_gets_the_dataloader_itself(tmp_path):
    trainer = make_trainer(str(tmp_path), ["--training.steps=2", "--training.local_batch_size=1"])
    seen, original = [], trainer.batch_generator

    def own_generator(data):
        seen.append(data)
        yield from original(data)

    trainer.batch_generator = own_generator
    trainer.train()
    trainer.close()
    assert seen == [trainer.dataloader] and trainer.step == 2
