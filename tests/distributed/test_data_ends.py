"""Data that end, or break, on one rank: all ranks stop at the same step, and none hangs."""

from pathlib import Path

import pytest

from tests.distributed.layout_matrix import DealtRows
from tests.distributed.training_runs import make_trainer
from torchtitan.testing.gloo import run_ranks

TWO_RANKS = "parallelism.data_parallel_shard_degree=2 training.local_batch_size=2 training.steps=5 checkpoint.enable"


class EndsOnRankOne(DealtRows):
    error = None

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if self.dp_rank == 1 and number == 2:
                if self.error is not None:
                    raise self.error
                return
            yield batch


class BreaksOnRankOne(EndsOnRankOne):
    error = ValueError("line 7 of data.jsonl is not JSON")


def steps_trained(dump_folder, loader_class):
    folder = f"{dump_folder}/{loader_class.__name__}"
    trainer = make_trainer(folder, [f"--{flag}" for flag in TWO_RANKS.split()])
    rows = trainer.dataloader
    sizes = rows.dp_rank, rows.dp_size, rows.local_batch_size, rows.seq_len
    trainer.dataloader = loader_class(*sizes)
    trainer.train()
    trainer.close()
    return trainer.step


def outcomes(dump_folder):
    """Return the steps until the data end, and what is raised if they break."""
    steps = steps_trained(dump_folder, EndsOnRankOne)
    assert Path(dump_folder, "EndsOnRankOne/checkpoint/step-2/.metadata").exists()
    with pytest.raises(ValueError) as failure:
        steps_trained(dump_folder, BreaksOnRankOne)
    return steps, str(failure.value)


def test_all_ranks_stop_and_are_told_when_the_data_of_one_end_or_break(tmp_path):
    first, second = run_ranks(outcomes, 2, str(tmp_path), init_process_group=False)
    assert first[0] == second[0] == 2
    assert second[1] == "line 7 of data.jsonl is not JSON"
    assert "1 of 2 data-parallel ranks could not read" in first[1]
