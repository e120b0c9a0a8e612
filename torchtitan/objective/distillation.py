"""The objective of a student that learns what a teacher predicts.

B rows, T tokens, k the number of the teacher's most probable tokens, M_t the teacher's model dim.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan.batch.batch import TokenBatch
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.engine import TrainingEngine
from torchtitan.loss.distillation import DistillationLoss, Distilled, TeacherStates
from torchtitan.loss.logprobs import TopTokens
from torchtitan.objective.scoring import check_scorer
from torchtitan.step.objective import Objective


class Distillation(Objective):
    """Computes a student's loss from its own logits and those of a teacher, which is not trained.

    The teacher has the student's parallel layout. settings: `[loss]` or `[rl.teacher]`. key, folder,
    tokenizer: see `check_scorer`, also for the errors raised.
    """

    replaces_loss = True

    def __init__(
        self,
        key: str,
        folder: str,
        student: TrainingEngine,
        tokenizer: Any,
        settings: Any,
        temperature: float,
    ):
        config = check_scorer(key, folder, student, tokenizer, settings.top_k)
        options: Any = {"layout": student.layout, "forward_only": True}
        self.teacher = TrainingEngine.from_hf(folder, config, **options)
        self.teacher.eval_mode()
        sizes = student.model_args.vocab_size, self.teacher.model_args.vocab_size
        n_entries = None if sizes[0] == sizes[1] else min(sizes)
        states = None if settings.top_k else TeacherStates(sizes[0])
        top = {"k": settings.top_k, "with_rest": True, "n_entries": n_entries}
        self._scores: Any = states or TopTokens(temperature, **top)
        chunk = config.training.loss_chunk
        self.head = DistillationLoss(
            settings.divergence,
            settings.kl_weight,
            getattr(settings, "label_weight", 0.0),
            temperature,
            states,
            n_entries,
            chunk_tokens={-1: None, 0: 10**12}.get(chunk, chunk),
        )

    def prepare(self, batches: Sequence[TokenBatch]) -> list[TokenBatch]:
        return [
            dataclasses.replace(batch, entries={**batch.entries, "teacher": self._score(batch)})
            for batch in batches
        ]

    def _score(self, batch: TokenBatch) -> Tensor:
        """Return the teacher's top tokens [B, T, 2 k + 1] or states [B, T, M_t].

        Pipeline ranks without the last stage return zeros [B, T, 1].
        """
        others = {key: x for key, x in batch.entries.items() if key != "routed_experts"}
        rows: Any = dataclasses.replace(batch, entries=others)
        if self.teacher.pp_schedule is not None:
            rows = rows.split(self.teacher.job_config.parallelism.pipeline_parallel_microbatch_size)
        outputs = self.teacher.forward_step(rows, head=self._scores)
        if outputs is None:
            return torch.zeros((), device=self.teacher.device).expand(*batch.tokens.shape, 1)
        return torch.cat(outputs)

    def __call__(
        self, outputs: Distilled, labels: Tensor, batch: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = (labels != IGNORE_INDEX).sum()
        return outputs.loss, {"kl": outputs.kl, "label_loss": outputs.label_loss, "tokens": tokens}

    def metrics(self, sums: Mapping[str, Tensor], prefix: str) -> dict[str, float]:
        tokens = max(sums["tokens"].item(), 1)
        return {prefix + name: sums[name].item() / tokens for name in ("kl", "label_loss")}

    def close(self) -> None:
        self.teacher.close()
