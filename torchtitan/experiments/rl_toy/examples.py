"""Prompts of an RL task with correct answers, for supervised training before RL."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.config.checks import ConfigError
from torchtitan.data.dataloader import BaseDataLoader
from torchtitan.rl.tasks import build_task


class SolvedExamples(BaseDataLoader):
    """Batches with one example per row; only the answer and its end-of-text token have labels.

    Row i of the global batch is the same for any number of ranks.
    """

    def __init__(self, job_config: Any, dp_world_size: int, dp_rank: int, tokenizer: None = None):
        if not hasattr(job_config, "rl"):
            raise ConfigError(
                "model.name = 'rl_toy' learns the task of the section [rl.task], which this config "
                "does not have; set job.custom_config_module = 'torchtitan.rl.job_config'"
            )
        self.task = build_task(job_config.rl)
        self.dp_world_size, self.dp_rank = dp_world_size, dp_rank
        self.n_rows = job_config.training.local_batch_size
        self.seq_len = job_config.training.seq_len
        self.num_batches = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = (self.num_batches * self.dp_world_size + self.dp_rank) * self.n_rows
            self.num_batches += 1
            tokens = torch.zeros(self.n_rows, self.seq_len, dtype=torch.int64)
            labels = torch.full((self.n_rows, self.seq_len), IGNORE_INDEX)
            for row in range(self.n_rows):
                prompt = self.task.prompt(first + row)
                answer = self.task.tokenizer.encode(prompt.answer, add_eos=True)
                example = torch.tensor([*prompt.token_ids, *answer])
                n = len(example) - 1
                if n > self.seq_len:
                    raise ValueError(
                        f"training.seq_len must be at least {n}, the tokens of an example, got "
                        f"{self.seq_len}; raise it"
                    )
                tokens[row, :n] = example[:-1]
                labels[row, n - len(answer) : n] = example[-len(answer) :]
            yield {"input": tokens}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_batches = state_dict["num_batches"]
