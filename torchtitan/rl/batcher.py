"""Builds the microbatches of all ranks from samples; token weights make the loss a weighted sum.

Denominators count tokens and sequences over the whole optimizer step, so gradients don't depend on the
split into rows, microbatches and ranks. B rows, T slots per row.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan.batch.documents import IGNORE_INDEX, PARENT_IDS, ids_of_branches
from torchtitan.batch.trees import Tree, columns_of, fill_rows, grow_trees, lone_trees
from torchtitan.loss.aggregation import aggregation_weights
from torchtitan.rl.job_config import JobConfig, batch_seq_len
from torchtitan.rl.types import Slot, TrainingBatch, TrainingMicrobatch, TrainingSample
from torchtitan.tools.logging import logger

# Optional tensors of samples.
_OTHER_LOGPROBS, _OF_CRITIC = ("ref_logprobs", "old_logprobs"), ("old_values", "returns")

# Padding values; the other tensors of a microbatch are padded with 0.
_PADDING = {"labels": IGNORE_INDEX, "positions": -1, "sequence_ids": -1, "routed_experts": -1}

# The next rows, one per rank, join a bucket if the longest fills at least this share of a row.
_LEAST_FILLED = 0.8


@dataclass(frozen=True)
class Batcher:
    """Places samples in rows, and distributes the rows over microbatches and data-parallel ranks.

    All ranks get the same number of microbatches, of the same shapes [B, T].

    dp_size: number of data-parallel ranks.
    seq_len: the largest T; longer samples are left out.
    rows: the largest B. max_tokens: the largest B * T; replaces the limit `rows`.
    packing: put several samples into a row; False gives each sample its own row.
    share_prefixes: samples with a common prefix share its slots, see `batch.trees`.
    bucketing: group rows of similar length into microbatches, each with its own T, long rows first.
        Otherwise all microbatches have the same shape.
    pad_multiple: T is the length of the longest row, rounded up to a multiple of this number.
    skip_zero_advantage: leave out samples whose advantage is 0; denominators still count them.
    scores_masked: keep labels outside the loss, for callers that read their log-probs.
    agg_mode, norm, count_empty: see `aggregation_weights`.
    deferred: don't divide weights by the step's denominator, because `optim_step` divides the gradients.
    """

    dp_size: int = 1
    seq_len: int = 2048
    rows: int = 8
    max_tokens: int | None = None
    packing: bool = False
    share_prefixes: bool = False
    bucketing: bool = False
    pad_multiple: int = 1
    skip_zero_advantage: bool = False
    scores_masked: bool = False
    agg_mode: str = "token-mean"
    norm: float | None = None
    count_empty: bool = False
    deferred: bool = False

    @classmethod
    def from_config(cls, job_config: JobConfig, dp_size: int) -> "Batcher":
        """Return the batcher that the sections `[rl.batch]` and `[rl.loss]` describe."""
        batch, loss = job_config.rl.batch, job_config.rl.loss
        return cls(
            dp_size=dp_size,
            seq_len=batch_seq_len(job_config),
            rows=batch.local_batch_size or job_config.training.local_batch_size,
            max_tokens=batch.max_tokens_per_microbatch,
            packing=batch.packing,
            share_prefixes=batch.share_prefixes,
            bucketing=batch.bucketing,
            pad_multiple=batch.pad_multiple,
            skip_zero_advantage=batch.skip_zero_advantage,
            agg_mode=loss.agg_mode,
            norm=loss.norm or None,
            count_empty=loss.count_empty,
        )

    def batch(
        self, samples: Sequence[TrainingSample], models: Sequence[int] | None = None
    ) -> TrainingBatch:
        """Return the microbatches of a step's samples. With `deferred`, a step may have several batches.

        models: for each sample, the index of the model that trains on it. All samples of a row train
            the same model, and rows of the same model are adjacent.
        A token with a non-finite log-prob is left out of the loss and of its denominator.
        Samples with `weights` keep these weights. Without samples, every rank gets one microbatch of padding.
        Raises ValueError if only some samples have an optional tensor.
        """
        has = _optional_fields(samples)
        kept = self._indices_that_fit(samples)
        fitting = [samples[i] for i in kept]
        lengths = [len(sample) for sample in fitting]

        def joined(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
            of_samples = [getattr(sample, name) for sample in fitting]
            return torch.cat([*of_samples, torch.zeros(0, dtype=dtype)])

        wanted, logprobs = joined("loss_mask") != 0, joined("logprobs")
        mask = wanted & logprobs.isfinite()
        for name in filter(has.get, _OTHER_LOGPROBS):
            mask &= joined(name).isfinite()
        if num_dropped := int(wanted.sum() - mask.sum()):
            logger.warning("%d tokens without a finite log-prob are left out", num_dropped)
        denominator = None
        if has["weights"]:
            weights = joined("weights") * mask
        else:
            masks = mask.split(lengths) if lengths else ()
            weights, denominator = self._weights(masks, [sample.group_id for sample in fitting])
        labels = joined("labels", torch.int64)
        values = {
            "input": joined("token_ids", torch.int64),
            "labels": labels if self.scores_masked else labels.masked_fill(~wanted, IGNORE_INDEX),
            "loss_mask": mask.float(),
            "loss_weights": weights,
            "generator_logprobs": logprobs.masked_fill(~mask, 0),
            "advantages": joined("advantages").masked_fill(~mask, 0),
        }
        for name in filter(has.get, (*_OTHER_LOGPROBS, *_OF_CRITIC)):
            values[name] = joined(name).masked_fill(~mask, 0)
        if has["routed_experts"] and kept:
            values["routed_experts"] = _joined_experts(fitting)
        # For each sample in a row, its index in `kept`.
        in_rows = list(range(len(kept)))
        if self.skip_zero_advantage and kept:
            of_samples = values["advantages"].split(lengths)
            is_in_row = torch.tensor([bool(own.any()) for own in of_samples])
            in_rows = is_in_row.nonzero()[:, 0].tolist()
            tokens_in_rows = is_in_row.repeat_interleave(torch.tensor(lengths))
            values = {name: of_all[tokens_in_rows] for name, of_all in values.items()}
        lengths = [lengths[place] for place in in_rows]
        indices = [kept[place] for place in in_rows]
        models = [models[i] if models else 0 for i in indices]
        trees = lone_trees(lengths)
        if self.share_prefixes and lengths:
            names = ["input", "labels", "loss_mask", *values.keys() & {"routed_experts"}]
            tokens, own_labels, masks, *experts = (values[name].split(lengths) for name in names)
            is_scored = [mask != 0 for mask in masks]
            trees = grow_trees(tokens, own_labels, is_scored, self.seq_len, models, *experts)
        return TrainingBatch(
            microbatches=self._deal(trees, lengths, indices, models, values),
            num_global_valid_tokens=int(mask.sum()),
            num_measured_tokens=int(values["loss_mask"].sum()),
            num_samples=len(samples),
            denominator=denominator,
            oversize=tuple(sorted(set(range(len(samples))) - set(kept))),
            num_skipped=len(kept) - len(in_rows),
            scores_masked=self.scores_masked,
        )

    def _indices_that_fit(self, samples: Sequence[TrainingSample]) -> list[int]:
        kept = [i for i, sample in enumerate(samples) if len(sample) <= self.seq_len]
        if len(kept) < len(samples):
            logger.warning(
                f"{len(samples) - len(kept)} of {len(samples)} samples do not fit rl.batch.seq_len = "
                f"{self.seq_len} and are left out, the longest has {max(map(len, samples))} tokens; raise "
                "seq_len, or lower rl.sampling.max_tokens"
            )
        return kept

    def _weights(
        self, masks: Sequence[Tensor], prompt_ids: Sequence[int]
    ) -> tuple[Tensor, float | None]:
        options: Any = {"norm": self.norm, "count_empty": self.count_empty}
        options |= {"prompt_ids": prompt_ids, "normalize": not self.deferred}
        found: Any = aggregation_weights(masks, self.agg_mode, **options)
        per_sample, denominator = found if self.deferred else (found, None)
        return torch.cat([*per_sample, torch.zeros(0)]), denominator

    def _groups_of(self, row_lengths: Sequence[int]) -> list[tuple[list[int], int, int]]:
        """Return (row indices of all ranks, rows per rank, slots per row) of each microbatch.

        row_lengths: number of tokens in each row. In each list of row indices, positions r,
            r + dp_size, ... belong to rank r.
        """
        n_slots = self._rounded(max(row_lengths, default=1))
        if not self.bucketing or not row_lengths:
            n_groups = max(1, -(-len(row_lengths) // (self._most_rows(n_slots) * self.dp_size)))
            n_rows = max(1, -(-len(row_lengths) // (n_groups * self.dp_size)))
            of_group: list[list[int]] = [[] for _ in range(n_groups)]
            for row in range(len(row_lengths)):
                of_group[row // self.dp_size % n_groups].append(row)
            return [(own, n_rows, n_slots) for own in of_group]
        groups: list[tuple[list[int], int, int]] = []
        in_order = sorted(range(len(row_lengths)), key=lambda row: -row_lengths[row])
        for first in range(0, len(in_order), self.dp_size):
            new = in_order[first : first + self.dp_size]
            longest = self._rounded(row_lengths[new[0]])
            if groups:
                rows, n_rows, n_slots = groups[-1]
                if n_rows < self._most_rows(n_slots) and longest >= _LEAST_FILLED * n_slots:
                    groups[-1] = rows + new, n_rows + 1, n_slots
                    continue
            groups.append((new, 1, longest))
        return groups

    def _rounded(self, length: int) -> int:
        return -(-length // self.pad_multiple) * self.pad_multiple

    def _most_rows(self, n_slots: int) -> int:
        return self.rows if self.max_tokens is None else max(1, self.max_tokens // n_slots)

    def _deal(
        self,
        trees: Sequence[Tree],
        lengths: Sequence[int],
        indices: Sequence[int],
        models: Sequence[int],
        values: dict[str, Tensor],
    ) -> tuple[tuple[TrainingMicrobatch, ...], ...]:
        """Build the microbatches: rows go to ranks in turn, so row counts of ranks differ by at most 1.

        lengths, indices, models: one entry per sample. values: name -> one entry per token.
        """
        sizes = [tree.size for tree in trees]
        of_trees = [models[tree.sequences[0]] for tree in trees]
        rows = [[i] for i in range(len(trees))]
        if self.packing:
            rows = fill_rows(sizes, self.seq_len, of_trees)
        groups = self._groups_of([sum(sizes[i] for i in row) for row in rows])
        shapes = [(self.dp_size, n_rows, n_slots) for _, n_rows, n_slots in groups]
        # For each (group, rank): the slots of samples, and the model of each row that has samples.
        slots: dict[tuple[int, int], list[Slot]] = defaultdict(list)
        models_of_rows: dict[tuple[int, int], list[int]] = defaultdict(list)
        nothing = torch.empty(0, dtype=torch.int64)
        slots_of_sample, number_in_row = [nothing] * len(lengths), [0] * len(lengths)
        first_of_group = 0
        for group, (of_group, n_rows, n_slots) in enumerate(groups):
            for n, row in enumerate(sorted(of_group, key=lambda row: of_trees[rows[row][0]])):
                rank, row_of_cell = n % self.dp_size, n // self.dp_size
                models_of_rows[group, rank].append(of_trees[rows[row][0]])
                first_of_row = first_of_group + (rank * n_rows + row_of_cell) * n_slots
                of_samples = columns_of((trees[i] for i in rows[row]), lengths)
                for number, (place, columns) in enumerate(of_samples.items()):
                    slots[group, rank].append(Slot(indices[place], row_of_cell, columns, number))
                    slots_of_sample[place] = first_of_row + columns
                    number_in_row[place] = number
            first_of_group += math.prod(shapes[group])

        # For each token: position in its sequence, index of its slot, index of its sequence in the row.
        slot_of_token = torch.cat([nothing, *slots_of_sample])
        numbers, counts = (torch.tensor(x, dtype=torch.int64) for x in (number_in_row, lengths))
        values = values | {
            "positions": torch.cat([nothing, *(torch.arange(n) for n in lengths)]),
            "sequence_ids": numbers.repeat_interleave(counts),
        }
        is_shared = any(any(tree.shared) for tree in trees)
        if is_shared:
            # If samples share a slot, use the values of a sample that trains on the slot, or else of a sample
            # that has a label there.
            n_tokens = len(slot_of_token)
            rank_of_token = (values["loss_mask"] != 0).long() + (values["labels"] != IGNORE_INDEX)
            order = torch.arange(n_tokens) + n_tokens * rank_of_token
            best = torch.full((first_of_group,), -1)
            best.scatter_reduce_(0, slot_of_token, order, "amax")
            fills_slot = best[slot_of_token] == order
            slot_of_token = slot_of_token[fills_slot]
            values = {name: of_all[fills_slot] for name, of_all in values.items()}
        of_groups: dict[str, list[Tensor]] = {}
        for name, of_all in values.items():
            dtype = torch.float32 if of_all.is_floating_point() else of_all.dtype
            padding, rest = _PADDING.get(name, 0), of_all.shape[1:]
            padded = torch.full((first_of_group, *rest), padding, dtype=dtype)
            padded[slot_of_token] = of_all.to(dtype)
            parts = padded.split([math.prod(shape) for shape in shapes])
            pairs = zip(parts, shapes, strict=True)
            of_groups[name] = [part.view(*shape, *rest) for part, shape in pairs]

        def microbatch(group: int, rank: int) -> TrainingMicrobatch:
            inputs: Any = {name: parts[group][rank] for name, parts in of_groups.items()}
            if any(models):
                own = models_of_rows[group, rank]
                inputs["models"] = own + [max(models)] * (len(inputs["labels"]) - len(own))
            if is_shared:
                inputs["document_ids"], inputs[PARENT_IDS] = ids_of_branches(inputs["positions"])
            return TrainingMicrobatch(inputs, tuple(slots[group, rank]))

        ranks = range(self.dp_size)
        return tuple(tuple(microbatch(i, rank) for rank in ranks) for i in range(len(groups)))


def _joined_experts(samples: Sequence[TrainingSample]) -> Tensor:
    experts = [sample.routed_experts for sample in samples]
    if len(shapes := {tuple(x.shape[1:]) for x in experts}) > 1:
        raise ValueError(
            "routed_experts of all samples of a batch must have the same numbers of layers and of experts "
            f"per token, got {sorted(shapes)}; take all samples from one model"
        )
    return torch.cat(experts)


def _optional_fields(samples: Sequence[TrainingSample]) -> dict[str, bool]:
    """Return for each optional field whether the samples have it; raises ValueError if only some do."""
    has = {}
    for name in ("weights", "routed_experts", *_OTHER_LOGPROBS, *_OF_CRITIC):
        count = sum(getattr(sample, name) is not None for sample in samples)
        if count not in (0, len(samples)):
            raise ValueError(
                f"either all samples of a batch have {name} or none has, got {count} of "
                f"{len(samples)}; add it to the other samples"
            )
        has[name] = count > 0
    return has
