"""Trainers of a small model, for which rows are dealt to ranks and microbatches: every layout sees
the same set of rows in each step."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from tests.reliability.jobs import flags_in
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.data.dataloader import BaseDataLoader

FOUR_LAYERS = "--model.flavor=four_layers"
SETTINGS = flags_in("""
    training.seq_len=32 training.mixed_precision_param=float32 activation_checkpoint.mode=none
    lr_scheduler.warmup_steps=5 optimizer.lr=1e-3 debug.seed=7 metrics.log_freq=1
""")


class DealtRows(BaseDataLoader):
    """Random rows; each data-parallel rank gets its share of every global batch.

    Labels are ignored at random, and more in some rows than in others, so that ranks and
    microbatches hold unequal numbers of valid tokens.
    with_positions: the rows are packed documents of random lengths.
    """

    def __init__(
        self,
        dp_rank: int,
        dp_size: int,
        local_batch_size: int,
        seq_len: int,
        with_positions: bool = False,
    ):
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.with_positions = with_positions
        self.local_batch_size, self.seq_len = local_batch_size, seq_len
        self.num_batches = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            first = (self.num_batches * self.dp_size + self.dp_rank) * self.local_batch_size
            self.num_batches += 1
            indices = range(first, first + self.local_batch_size)
            rows = [self._row(index) for index in indices]
            batch = {"input": torch.stack([tokens[:-1] for tokens, _ in rows])}
            if self.with_positions:
                batch["positions"] = torch.stack([self._positions(index) for index in indices])
            yield batch, torch.stack([labels for _, labels in rows])

    def _row(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 2048, (self.seq_len + 1,), generator=generator)
        labels = tokens[1:].clone()
        share_ignored = 0.1 + 0.2 * (index % 4)
        labels[torch.rand(self.seq_len, generator=generator) < share_ignored] = IGNORE_INDEX
        return tokens, labels

    def _positions(self, index: int) -> torch.Tensor:
        """Restart with every document, and with more of them in some rows than in others."""
        generator = torch.Generator().manual_seed(index)
        is_start = torch.rand(self.seq_len, generator=generator) < 0.1 * (index % 4)
        columns = torch.arange(self.seq_len)
        return columns - torch.where(is_start, columns, 0).cummax(0).values

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_batches = state_dict["num_batches"]


def build_dealt_rows(dp_world_size, dp_rank, tokenizer, job_config) -> DealtRows:
    training = job_config.training
    return DealtRows(
        dp_rank,
        dp_world_size,
        training.local_batch_size,
        training.seq_len,
        with_positions=job_config.model.attn_mask_type == "position_block_causal",
    )


def make_trainer(dump_folder: str, overrides: list[str]):
    """A trainer of the debug model on dealt rows, in fp32, that logs every step.

    The model has a quarter of the width, and 2 layers, or with a flag 4 (`FOUR_LAYERS`).
    """
    from torchtitan.config import ConfigManager
    from torchtitan.protocols import train_spec as train_spec_module
    from torchtitan.train import Trainer

    name = "llama3_on_dealt_rows"
    if name not in train_spec_module._extra_train_specs:
        spec = train_spec_module.get_train_spec("llama3")
        small = dataclasses.replace(spec.model_args["debugmodel"], dim=64, n_heads=4)
        train_spec_module.register_train_spec(
            name,
            dataclasses.replace(
                spec,
                model_args={
                    "shallow": dataclasses.replace(small, n_layers=2),
                    "four_layers": dataclasses.replace(small, n_layers=4),
                },
                build_dataloader_fn=build_dealt_rows,
                build_tokenizer_fn=None,
            ),
        )
    config = ConfigManager().parse_args(
        [
            f"--model.name={name}",
            "--model.flavor=shallow",
            f"--job.dump_folder={dump_folder}",
            *SETTINGS,
            *overrides,
        ]
    )
    return Trainer(config)


def full_tensors(trainer) -> dict[str, torch.Tensor]:
    """Every parameter, gathered. All ranks have to call this."""
    return {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
        for part in trainer.model_parts
        for name, p in part.named_parameters()
    }


def max_relative_difference(ours: list[float], theirs: list[float]) -> float:
    assert len(ours) == len(theirs) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
