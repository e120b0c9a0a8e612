"""Direct preference optimization of the pairs in a trainer's data. B rows, T tokens."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchtitan.batch.batch import TokenBatch
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.engine import TrainingEngine
from torchtitan.loss.logprobs import TokenLogProbs, TokenOutputs
from torchtitan.loss.preference import dpo
from torchtitan.objective.scoring import reference_engine
from torchtitan.step.objective import Objective


class PreferenceObjective(Objective):
    """The loss of `loss.preference.dpo`, a mean over pairs, with the settings in `[loss]`.

    The batch has the `pair_ids` [B, T] of `data.row_streams.Packing`. If loss.reference is "precomputed",
    the batch also has `ref_logprobs`; otherwise a reference model computes them before each step.
    """

    replaces_loss = whole_rows = True

    _scorer: TrainingEngine | None
    _context: Any  # context manager for the reference's forward

    def __init__(self, trainer: TrainingEngine) -> None:
        config, lora = trainer.job_config, trainer.job_config.lora
        self.head = TokenLogProbs(compile_backend=config.compile.backend_of("loss"))
        self._settings, reference = config.loss, config.loss.reference
        self._scorer, self._context = None, contextlib.nullcontext
        # New adapters do not change the model's outputs.
        is_base = "lora" in config.model.converters and not (lora.adapter_path or lora.also_train)
        if reference == "adapters_off" or (reference == "initial" and is_base):
            self._scorer, self._context = trainer, trainer.adapters_off
        elif reference != "precomputed":
            self._scorer = reference_engine(trainer)

    def denominator(self, batch: TokenBatch) -> int:
        return int(_pair_ids(batch).amax(dim=1).sum())

    def prepare(self, batches: Sequence[TokenBatch]) -> Sequence[TokenBatch]:
        if self._scorer is None:
            scores = [batch.entries["ref_logprobs"] for batch in batches]
        else:
            with self._context():
                outputs = self._scorer.forward_step(batches, head=self.head)
            scores = [x.logprobs for x in self._scorer.from_last_stage(outputs)]
        return [
            replace(b, entries={**b.entries, "pair_ids": _pair_ids(b), "ref_logprobs": x})
            for b, x in zip(batches, scores, strict=True)
        ]

    def __call__(
        self, outputs: TokenOutputs, labels: Tensor, batch: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ids, settings = batch["pair_ids"], self._settings
        # Pair ids count from 1 in each row: make them unique. A row of T tokens has at most T // 2 pairs.
        rows = torch.arange(len(ids), device=ids.device)[:, None] * (ids.shape[1] // 2)
        loss, sums = dpo(
            outputs,
            labels,
            {**batch, "pair_ids": ids + ids.sign() * rows},
            beta=settings.beta,
            label_smoothing=settings.label_smoothing,
            length_normalized=settings.length_normalized,
        )
        return loss, {**sums, "pairs": ids.amax(dim=1).sum()}

    def metrics(self, sums: Mapping[str, Tensor], prefix: str) -> dict[str, float]:
        num_pairs = max(sums["pairs"].item(), 1)
        return {f"{prefix}{name}": sums[name].item() / num_pairs for name in ("accuracy", "margin")}

    def close(self) -> None:
        if self._scorer is not None and self._context is contextlib.nullcontext:
            self._scorer.close()


def _pair_ids(batch: TokenBatch) -> Tensor:
    """Return the pair id of each label, [B, T]; 0 for ignored labels.

    A rank that has run out of validation data repeats a batch, with all of its labels ignored.
    """
    return batch.entries["pair_ids"].masked_fill(batch.labels == IGNORE_INDEX, 0)
