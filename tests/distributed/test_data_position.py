"""The data position in a real checkpoint, resumed on other numbers of ranks."""

from collections import Counter
from itertools import islice

import torch
import torch.distributed as dist

from tests.unit.data.test_datasets import build, documents_of, tokens_left_in_buffers
from torchtitan.checkpoint.manager import CheckpointManager
from torchtitan.config.job_config import Checkpoint
from torchtitan.testing.gloo import run_ranks

LENGTHS = [3 + (index * 7) % 23 for index in range(90)]


class NoState:
    """In place of optimizers and schedulers, which this test is not about."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def resume_draw_save(folder: str, step: int, num_batches: int | None):
    """One run of a job: (tokens this rank drew, its data position at the end)."""
    loader = build(documents_of(LENGTHS), dist.get_world_size(), dist.get_rank(), num_workers=0)
    checkpointer = CheckpointManager(
        loader, [torch.nn.Linear(2, 2)], NoState(), NoState(), {},
        Checkpoint(enable=True, interval=1, keep_latest_k=0), None, folder,
    )  # fmt: skip
    checkpointer.load()
    drawn = []
    for input_dict, labels in islice(loader, num_batches):
        drawn += input_dict["input"].flatten().tolist() + labels[:, -1].tolist()
    checkpointer.save(step)
    return drawn, loader.state_dict()


def test_no_token_is_lost_or_repeated_through_checkpoints_of_2_3_and_1_ranks(tmp_path):
    drawn: list[int] = []
    for step, (world_size, num_batches) in enumerate([(2, 5), (3, 5), (1, None)], start=1):
        states: dict = {}
        for tokens, state in run_ranks(
            resume_draw_save, world_size, str(tmp_path), step, num_batches
        ):
            drawn += tokens
            states |= state
    assert Counter(drawn + tokens_left_in_buffers(states)) == Counter(range(sum(LENGTHS)))
