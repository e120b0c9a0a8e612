"""A teacher that scores a student's rows, and the objective that moves the student to the teacher.

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
from torchtitan.step.runner import on_error
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.logging import logger


class Teacher:
    """A fixed model from a Hugging Face folder, which scores a student's rows in the student's layout.

    key: the setting that names the folder. top_k: score each position's k most probable tokens; 0: all.
    Raises ConfigError as `check_teacher`.
    """

    def __init__(
        self,
        key: str,
        folder: str,
        student: TrainingEngine,
        tokenizer: Any,
        top_k: int,
        temperature: float,
    ):
        config = check_teacher(key, folder, student, tokenizer, top_k)
        logger.info("loading the teacher in %s", folder)
        options: Any = {"layout": student.layout, "forward_only": True}
        self.engine = engine = TrainingEngine.from_hf(folder, config, **options)
        with on_error(engine.close):
            engine.eval_mode()
            sizes = student.model_args.vocab_size, engine.model_args.vocab_size
            # Models of one family pad the same vocabulary to different sizes.
            n_entries = min(sizes) if sizes[0] != sizes[1] else None
            states = TeacherStates(sizes[0])
            top = TopTokens(temperature, k=top_k, with_rest=True, n_entries=n_entries)
            self._head: Any = top if top_k else states
            self._settings = dict(
                temperature_of_kl=temperature,
                n_entries=n_entries,
                teacher_states=None if top_k else states,
            )

    def loss(self, **settings: Any) -> DistillationLoss:
        """Return the student's head. settings: its other fields."""
        return DistillationLoss(**settings, **self._settings)

    def score(self, batch: TokenBatch) -> Tensor:
        """Return the batch's entry "teacher" for the student's head, [B, T, 2 k + 1] or [B, T, M_t].

        Collective. Zeros [B, T, 1] on a pipeline's ranks without the last stage, which compute no head.
        """
        others = {key: x for key, x in batch.entries.items() if key != "routed_experts"}
        rows: Any = dataclasses.replace(batch, entries=others)
        if self.engine.pp_schedule is not None:
            rows = rows.split(self.engine.job_config.parallelism.pipeline_parallel_microbatch_size)
        outputs = self.engine.forward_step(rows, head=self._head)
        if outputs is None:
            return torch.zeros((), device=self.engine.device).expand(*batch.tokens.shape, 1)
        return torch.cat(outputs)

    def close(self) -> None:
        self.engine.close()


class Distillation(Objective):
    """The weighted sum of the divergence from the teacher in `[loss]` and of the cross entropy."""

    replaces_loss = True

    def __init__(self, student: TrainingEngine):
        config = student.job_config
        loss, chunk = config.loss, config.training.loss_chunk
        given = student, student.tokenizer, loss.top_k, loss.temperature
        self.teacher = Teacher("loss.teacher", loss.teacher, *given)
        self.head = self.teacher.loss(
            divergence=loss.divergence,
            kl_weight=loss.kl_weight,
            label_weight=loss.label_weight,
            chunk_tokens=chunk if chunk > 0 else None,
            compile_backend=config.compile.backend_of("loss"),
        )

    def prepare(self, batches: Sequence[TokenBatch]) -> Sequence[TokenBatch]:
        def scored(batch: TokenBatch) -> TokenBatch:
            entries = {**batch.entries, "teacher": self.teacher.score(batch)}
            return dataclasses.replace(batch, entries=entries)

        return [scored(batch) for batch in batches]

    def __call__(
        self, outputs: Distilled, labels: Tensor, batch: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        num_tokens = (labels != IGNORE_INDEX).sum()
        return outputs.loss, {**outputs._asdict(), "tokens": num_tokens}

    def metrics(self, sums: Mapping[str, Tensor], prefix: str) -> dict[str, float]:
        """Return the means over the tokens with labels."""
        tokens = max(sums["tokens"].item(), 1)
        return {prefix + name: sums[name].item() / tokens for name in ("kl", "label_loss")}

    def close(self) -> None:
        self.teacher.close()


def check_teacher(
    key: str, folder: str, student: TrainingEngine, tokenizer: Any, top_k: int
) -> JobConfig:
    """Return the config of a teacher's engine; needs no model of the student.

    tokenizer: the student's. Raises ConfigError if the folder has no model that the student's layout can
    run, another tokenizer, or a vocabulary without more than top_k entries.
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
        if args_of_teacher.value_head:
            raise ValueError("its model has a value head in place of logits")
        own, others = _ids_of(tokenizer), _ids_of(HuggingFaceTokenizer(folder))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} = {folder!r} cannot score the student's rows: {error}") from error
    different = sorted(own.items() ^ others.items(), key=lambda pair: (pair[1], pair[0]))
    if different:
        token = different[0][0]
        raise ConfigError(
            f"{key} = {folder!r} must have the student's tokenizer, and its table of ids differs in "
            f"{len({name for name, _ in different})} tokens: {token!r} has id {own.get(token)} in the "
            f"student's and {others.get(token)} in the teacher's; choose a teacher with the same vocabulary"
        )
    n_common = min(args.vocab_size, args_of_teacher.vocab_size)
    if not top_k < n_common:
        raise ConfigError(
            f"{key.rpartition('.')[0]}.top_k must be below the vocabulary's {n_common} entries, got {top_k}; "
            "set it to 0 for all entries"
        )
    return config


def _ids_of(tokenizer: Any) -> dict[str, int]:
    if not hasattr(tokenizer, "get_vocab"):
        raise ValueError(
            f"the student's tokenizer, {type(tokenizer).__name__}, has no get_vocab to compare with the "
            "teacher's; take one from a folder of Hugging Face files, model.hf_assets_path"
        )
    return tokenizer.get_vocab()
