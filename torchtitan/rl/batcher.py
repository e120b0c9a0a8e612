"""From samples to the microbatches of all ranks, with the weights that make the loss a plain sum.

Tokens and sequences are counted here, where the whole optimizer step is known, so that every split
into rows, microbatches and ranks has the same gradients.

B rows, T slots per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.loss.aggregation import aggregation_weights
from torchtitan.rl.job_config import JobConfig, batch_seq_len
from torchtitan.rl.types import Slot, TrainingBatch, TrainingMicrobatch, TrainingSample
from torchtitan.tools.logging import logger

# What padding holds; the other entries of a microbatch are 0 there.
_PADDING = {"labels": IGNORE_INDEX, "positions": -1, "sequence_ids": -1}


@dataclass(frozen=True)
class Batcher:
    """Puts samples into rows, and deals the rows to microbatches and data-parallel ranks.

    dp_size: ranks that read different microbatches. All get equally many, of the same shape
        [B, T], filled up with rows of padding.
    seq_len: slots of the longest row. Longer samples are left out and counted.
    rows: the largest B. max_tokens: instead, B is as many rows as hold this many tokens.
    packing: put several samples into a row; otherwise each has its own, padded on the right.
    pad_multiple: T is the longest row's length, rounded up to a multiple of this.
    agg_mode, norm: as in `aggregation_weights`.
    deferred: leave out the last denominator of the weights, for a caller that does not know the
        whole step; see `TrainingBatch.denominator`.
    """

    dp_size: int = 1
    seq_len: int = 2048
    rows: int = 8
    max_tokens: int | None = None
    packing: bool = False
    pad_multiple: int = 1
    agg_mode: str = "token-mean"
    norm: float | None = None
    deferred: bool = False

    @classmethod
    def from_config(cls, job_config: JobConfig, dp_size: int) -> "Batcher":
        """The batcher that the sections `[rl.batch]` and `[rl.loss]` describe."""
        batch, loss = job_config.rl.batch, job_config.rl.loss
        rows = batch.local_batch_size
        return cls(
            dp_size=dp_size,
            seq_len=batch_seq_len(job_config),
            rows=job_config.training.local_batch_size if rows is None else rows,
            max_tokens=batch.max_tokens_per_microbatch,
            packing=batch.packing,
            pad_multiple=batch.pad_multiple,
            agg_mode=loss.agg_mode,
            norm=loss.norm or None,
        )

    def batch(self, samples: Sequence[TrainingSample]) -> TrainingBatch:
        """Return the microbatches of one step, or of one call of it if `deferred`.

        A token with a log-prob that is not finite, by generator, reference or old policy, is left
        out of the loss and its denominator. Samples with weights keep them. Without samples every rank gets one microbatch
        of padding.
        Raises ValueError if only some of the samples have weights, ref_logprobs or old_logprobs.
        """
        has = {}
        for name in ("weights", "ref_logprobs", "old_logprobs"):
            count = sum(getattr(sample, name) is not None for sample in samples)
            if count not in (0, len(samples)):
                raise ValueError(
                    f"either all samples of a batch have {name} or none has, got {count} of "
                    f"{len(samples)}; fill in the others"
                )
            has[name] = count > 0
        kept = [i for i, sample in enumerate(samples) if len(sample) <= self.seq_len]
        if len(kept) < len(samples):
            logger.warning(
                "%d of %d samples do not fit rl.batch.seq_len = %d and are left out, the longest "
                "has %d tokens; raise seq_len, or lower rl.sampling.max_tokens",
                len(samples) - len(kept),
                len(samples),
                self.seq_len,
                max(map(len, samples)),
            )
        lengths = [len(samples[i]) for i in kept]

        def joined(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
            """All samples' entries, one after another; the last tensor is for a batch of none."""
            of_samples = [getattr(samples[i], name) for i in kept]
            return torch.cat([*of_samples, torch.zeros(0, dtype=dtype)])

        wanted, logprobs = joined("loss_mask") != 0, joined("logprobs")
        mask = wanted & logprobs.isfinite()
        others = [name for name in ("ref_logprobs", "old_logprobs") if has[name]]
        for name in others:
            mask &= joined(name).isfinite()
        num_dropped = int(wanted.sum() - mask.sum())
        if num_dropped:
            logger.warning("%d tokens without a finite log-prob are left out", num_dropped)
        masks = mask.split(lengths) if lengths else []
        denominator = None
        if has["weights"]:
            weights = joined("weights") * mask
        else:
            per_sample = aggregation_weights(
                masks,
                self.agg_mode,
                norm=self.norm,
                prompt_ids=[samples[i].group_id for i in kept],
                normalize=not self.deferred,
            )
            if self.deferred:
                per_sample, denominator = per_sample
            weights = torch.cat([*per_sample, torch.zeros(0)])

        values = {
            "token_ids": joined("token_ids", torch.int64),
            "labels": joined("labels", torch.int64).masked_fill(~wanted, IGNORE_INDEX),
            "loss_mask": mask.float(),
            "loss_weights": weights,
            "generator_logprobs": logprobs.masked_fill(~mask, 0),
            "advantages": joined("advantages").masked_fill(~mask, 0),
        }
        for name in others:
            values[name] = joined(name).masked_fill(~mask, 0)
        return TrainingBatch(
            microbatches=self._deal(lengths, kept, values),
            num_global_valid_tokens=int(mask.sum()),
            num_global_sequences=sum(bool(of_sample.any()) for of_sample in masks),
            num_samples=len(samples),
            denominator=denominator,
            min_policy_version=min((samples[i].policy_version for i in kept), default=None),
            oversize=tuple(sorted(set(range(len(samples))) - set(kept))),
            num_dropped_tokens=num_dropped,
        )

    def _rows_of(self, lengths: Sequence[int]) -> list[list[int]]:
        """The samples of each row, by their place in `lengths`."""
        if not self.packing:
            return [[place] for place in range(len(lengths))]
        # The longest first, each into the first row with room. `sorted` keeps equals in order.
        rows: list[list[int]] = []
        room: list[int] = []
        for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
            length = lengths[place]
            row = next((i for i, free in enumerate(room) if free >= length), len(rows))
            if row == len(rows):
                rows.append([])
                room.append(self.seq_len)
            rows[row].append(place)
            room[row] -= length
        return rows

    def _deal(
        self, lengths: Sequence[int], indices: Sequence[int], values: dict[str, Tensor]
    ) -> tuple[tuple[TrainingMicrobatch, ...], ...]:
        """Deal rows to ranks and microbatches in turn, so that their work differs by one row at most.

        indices: of the samples, in the order of `lengths`; values: of all their tokens, one sample
            after another.
        """
        rows = self._rows_of(lengths)
        n_slots = max((sum(lengths[place] for place in row) for row in rows), default=1)
        n_slots = -(-n_slots // self.pad_multiple) * self.pad_multiple
        most_rows = self.rows if self.max_tokens is None else max(1, self.max_tokens // n_slots)
        n_microbatches = max(1, -(-len(rows) // (most_rows * self.dp_size)))
        n_cells = n_microbatches * self.dp_size  # a cell is one rank's part of a microbatch
        n_rows = max(1, -(-len(rows) // n_cells))

        slots: list[list[Slot]] = [[] for _ in range(n_cells)]
        first_slot, number_in_row = [0] * len(lengths), [0] * len(lengths)
        for number, row in enumerate(rows):
            cell, row_of_cell, start = number % n_cells, number // n_cells, 0
            for i, place in enumerate(row):
                slots[cell].append(Slot(indices[place], row_of_cell, start, lengths[place]))
                first_slot[place] = (cell * n_rows + row_of_cell) * n_slots + start
                number_in_row[place] = i
                start += lengths[place]

        # For every token: its place in its sequence, the sequence's in the row, its slot of all.
        repeats = torch.tensor(lengths, dtype=torch.int64)

        def of_tokens(of_samples: Sequence[int] | Tensor) -> Tensor:
            return torch.as_tensor(of_samples, dtype=torch.int64).repeat_interleave(repeats)

        positions = torch.arange(int(repeats.sum())) - of_tokens(repeats.cumsum(0) - repeats)
        slot_of_token = of_tokens(first_slot) + positions
        values = values | {"positions": positions, "sequence_ids": of_tokens(number_in_row)}
        cells: dict[str, Tensor] = {}
        for name, of_all in values.items():
            dtype = torch.int64 if of_all.dtype == torch.int64 else torch.float32
            cells[name] = torch.full((n_cells, n_rows, n_slots), _PADDING.get(name, 0), dtype=dtype)
            cells[name].view(-1)[slot_of_token] = of_all.to(dtype)
        microbatches = [
            TrainingMicrobatch(
                **{name: of_all[cell] for name, of_all in cells.items()}, slots=tuple(slots[cell])
            )
            for cell in range(n_cells)
        ]
        return tuple(
            tuple(microbatches[first : first + self.dp_size])
            for first in range(0, n_cells, self.dp_size)
        )
