"""Data that end, or break, on one rank: all ranks stop at the same step, and none hangs."""

import pytest

from tests.distributed.training_runs import DealtRows, make_trainer
from torchtitan.testing.gloo import run_ranks

TWO_RANKS = [
    "--parallelism.data_parallel_shard_degree=2",
    "--training.local_batch_size=2",
    "--training.steps=5",
]


class EndsOnRankOne(DealtRows):
    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if self.dp_rank == 1 and number == 2:
                self.end()
                return
            yield batch

    def end(self):
        pass


class BreaksOnRankOne(EndsOnRankOne):
    def end(self):
        raise ValueError("line 7 of data.jsonl is not JSON")


def steps_trained(dump_folder, loader_class):
    trainer = make_trainer(dump_folder, TWO_RANKS)
    rows = trainer.dataloader
    trainer.dataloader = loader_class(
        rows.dp_rank, rows.dp_size, rows.local_batch_size, rows.seq_len
    )
    trainer.train()
    trainer.close()
    return trainer.step


def test_ranks_stop_together_when_the_data_of_one_end(tmp_path):
    steps = run_ranks(steps_trained, 2, str(tmp_path), EndsOnRankOne, init_process_group=False)
    assert steps == [2, 2]


def message_of_failure(dump_folder):
    with pytest.raises(ValueError) as failure:
        steps_trained(dump_folder, BreaksOnRankOne)
    return str(failure.value)


def test_every_rank_is_told_when_one_cannot_read_its_data(tmp_path):
    messages = run_ranks(message_of_failure, 2, str(tmp_path), init_process_group=False)
    assert messages[1] == "line 7 of data.jsonl is not JSON"
    assert "1 of 2 data-parallel ranks could not read" in messages[0]
