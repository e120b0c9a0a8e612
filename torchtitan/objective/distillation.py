"""The objective of a student that learns what a teacher predicts.

B rows, T tokens, k tokens that the teacher finds most probable, M_t its model dim.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan.batch.batch import TokenBatch
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.build import derive_model_args, job_of_hf
from torchtitan.config import JobConfig
from torchtitan.config.job_config import LoRA, Model, Optimizer, Quantize
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.engine import TrainingEngine
from torchtitan.job import resolve_job
from torchtitan.loss.distillation import DistillationLoss, Distilled, TeacherStates
from torchtitan.loss.logprobs import TopTokens
from torchtitan.objective.scoring import scoring_config
from torchtitan.step.objective import Objective
from torchtitan.tools.errors import ConfigError


class Distillation(Objective):
    """A fixed teacher that scores a student's rows in the student's layout, and the loss of its scores.

    settings: `[loss]` or `[rl.teacher]`. The other arguments, and the errors, are those of `check_teacher`.
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
        config = check_teacher(key, folder, student, tokenizer, settings.top_k)
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
        scored = ({**batch.entries, "teacher": self._score(batch)} for batch in batches)
        pairs = zip(batches, scored, strict=True)
        return [dataclasses.replace(batch, entries=entries) for batch, entries in pairs]

    def _score(self, batch: TokenBatch) -> Tensor:
        """Return [B, T, 2 k + 1] or [B, T, M_t]; zeros [B, T, 1] on ranks without the last pipeline stage."""
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


def check_teacher(
    key: str, folder: str, student: TrainingEngine, tokenizer: Any, top_k: int
) -> JobConfig:
    """Return the config of a teacher's engine; the student has no model yet.

    key: the setting that names the folder. tokenizer: the student's. Raises ConfigError if the folder has no
    model that the student's layout can run, another tokenizer, or no more than top_k vocabulary entries.
    """
    config = scoring_config(student)
    args = derive_model_args(config, student.train_spec)
    attention = {name: getattr(args, name, None) for name in ("attn_type", "attn_mask_type")}
    config.model = Model(fp32_head=config.model.fp32_head, **attention)
    config.lora, config.quantize, config.optimizer = LoRA(), Quantize(), Optimizer()
    config.activation_checkpoint.mode = "none"
    layout = config.parallelism
    layout.always_fsdp = student.parallel_dims.always_fsdp
    layout.module_fqns_per_model_part = layout.pipeline_parallel_layers_per_stage = None
    try:
        job, spec = job_of_hf(folder, config, None, False)
        resolve_job(job, False, spec)
        args_of_teacher = spec.model_args[job.model.flavor]
        sizes = args.vocab_size, args_of_teacher.vocab_size
        n_common = 0 if args_of_teacher.value_head else min(sizes)
        if top_k >= n_common:
            raise ValueError(
                f"it has logits of {n_common} vocabulary entries, which must be more than top_k = {top_k}"
            )
        own, others = (x.get_vocab() for x in (tokenizer, HuggingFaceTokenizer(folder)))
        different = sorted(own.items() ^ others.items(), key=lambda item: item[::-1])
        if different:
            token = different[0][0]
            raise ValueError(
                f"its tokenizer has another table of ids, where {token!r} has id {others.get(token)}, and "
                f"{own.get(token)} in the student's; choose a teacher with the same vocabulary"
            )
    except (AttributeError, OSError, ValueError) as error:
        raise ConfigError(f"{key} = {folder!r} cannot score the student's rows: {error}") from error
    return config
