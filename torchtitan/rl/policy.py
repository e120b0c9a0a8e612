"""The trained policy, and the reference policy for losses with a KL term."""

import dataclasses
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.adapters.lora import redraw_adapters
from torchtitan.distributed.tied_copies import name_in_whole_model
from torchtitan.engine import TrainingEngine
from torchtitan.loss.distillation import Distilled
from torchtitan.loss.logprobs import TokenLogProbs, TokenOutputs, TopTokens
from torchtitan.models.batch_invariant import use_batch_invariant
from torchtitan.objective.distillation import Distillation
from torchtitan.rl.advantages import mean_and_std
from torchtitan.rl.checks import check_gradients_add_up, check_not_divided, check_trainer_config
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.learner import Learner
from torchtitan.rl.losses import LossWithTeacher, PolicyLoss, loss_from_config
from torchtitan.rl.snapshots import changing_weights, exchange
from torchtitan.rl.types import TrainingBatch
from torchtitan.rl.weight_sync import TakesWeights, push_weights
from torchtitan.step.runner import Head, on_error
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.logging import init_logger, logger


class PolicyTrainer(Learner):
    """A policy that learns from batches of samples, by default with the loss `[rl.loss]`.

    engine: an existing engine; None builds it from the config. tokenizer: the samples' tokenizer, compared
        with the teacher's; needed only with `rl.teacher.folder`.
    Raises ConfigError for a config that cannot run.
    """

    def __init__(
        self, job_config: JobConfig, *, engine: TrainingEngine | None = None, tokenizer: Any = None
    ):
        if not logger.handlers:
            # Ray and similar libraries start processes without log handlers.
            init_logger()
        self.job_config = job_config
        loss: PolicyLoss | LossWithTeacher = loss_from_config(job_config.rl.loss)
        check_trainer_config(job_config)
        teacher = job_config.rl.teacher
        if teacher.folder and tokenizer is None:
            raise ConfigError(
                f"rl.teacher.folder = {teacher.folder!r} needs the tokenizer of the samples, got None; pass it as "
                "PolicyTrainer(..., tokenizer=...), or remove [rl.teacher]"
            )
        if engine is None:
            check_not_divided(job_config)
            engine = TrainingEngine(job_config)
        else:
            check_gradients_add_up(engine.job_config)
        with on_error(engine.close):
            if job_config.rl.generator.exact:
                use_batch_invariant(engine.model_parts)
            is_linear = getattr(engine.model_args, "n_linear_layers", 0) > 0
            if job_config.rl.batch.share_prefixes and is_linear:
                raise ConfigError(
                    "rl.batch.share_prefixes = True needs a model without linear attention, got model.name = "
                    f"{engine.job_config.model.name!r}; set it to false"
                )
            if teacher.folder:
                given = engine, tokenizer, teacher, job_config.rl.sampling.temperature
                scorer = Distillation("rl.teacher.folder", teacher.folder, *given)
                loss = LossWithTeacher(loss, teacher.policy_weight, scorer)
        super().__init__(engine, loss)

    def close(self) -> None:
        super().close()
        if isinstance(self.loss, LossWithTeacher):
            self.loss.teacher.close()

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps and replacements of the weights; a resumed run keeps counting."""
        return self.engine.weights_version

    def _output_layer(self, loss_fn: PolicyLoss | LossWithTeacher | None = None) -> Head:
        config = self.job_config
        head = TokenLogProbs(
            temperature=config.rl.sampling.temperature,
            entropy=loss_fn is not None and loss_fn.needs_entropy,
            compile_backend=config.compile.backend_of("loss"),
            batch_invariant=config.rl.generator.exact,
        )
        if isinstance(loss_fn, LossWithTeacher):
            return dataclasses.replace(loss_fn.teacher.head, of_tokens=head)
        return head

    def _values(self, outputs: TokenOutputs | Distilled) -> tuple:
        if isinstance(outputs, Distilled):
            return outputs.logprobs, outputs.entropy, outputs
        return outputs

    def _metrics_of(self, passes: Sequence[Any]) -> dict[str, float]:
        advantages = [advantage for done in passes for advantage in done.advantages]
        return super()._metrics_of(passes) | mean_and_std(advantages)

    # ---- log-probs of a batch by the current weights ----

    def top_tokens(self, batch: TrainingBatch, k: int) -> list[Tensor | None]:
        """Return the k most probable tokens at each slot: a tensor [n, 2 k] per sample of n slots.

        The columns are those of `TopTokens`.
        """
        rl = self.job_config.rl
        exact, temperature = rl.generator.exact, rl.sampling.temperature
        return self.forward(batch, TopTokens(temperature, batch_invariant=exact, k=k))

    def rescore(self, batch: TrainingBatch) -> tuple[TrainingBatch, float]:
        """Replace the generator's log-probs by the trainer's; also returns the largest change on any rank.

        This forward uses the same microbatches as training, so until the weights change, training gets
        bitwise equal log-probs, and every ratio is exactly 1. Only this rank's microbatches get new
        log-probs, and in a pipeline only on the last stage. Raises ValueError as `forward_backward` does.
        """
        rescored = self._with_scores(batch, name := "generator_logprobs")
        pairs = zip(*(x.of_rank(self.engine.dp_rank) for x in (batch, rescored)), strict=True)
        changes = [(new.inputs[name] - old.inputs[name]).abs().max() for old, new in pairs]
        largest = torch.stack(changes).max().to(self.engine.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return rescored, largest.item()

    def with_old_logprobs(self, batch: TrainingBatch) -> TrainingBatch:
        """Add the current policy's log-probs as `old_logprobs`, for several updates on a batch."""
        return self._with_scores(batch, "old_logprobs")

    def _with_scores(self, batch: TrainingBatch, name: str) -> TrainingBatch:
        self._check_on_all_ranks(batch)
        dp_rank, rows = self.engine.dp_rank, [list(row) for row in batch.microbatches]
        for row, logprobs in zip(rows, self._score(batch) or (), strict=False):
            inputs: Any = row[dp_rank].inputs
            mask = inputs["loss_mask"]
            new = torch.where(mask > 0, logprobs.detach().to(mask.device, mask.dtype), 0.0)
            row[dp_rank] = dataclasses.replace(row[dp_rank], inputs={**inputs, name: new})
        return dataclasses.replace(batch, microbatches=tuple(tuple(row) for row in rows))

    # ---- state ----

    def skip_step(self) -> None:
        """Advance the step and the schedule without an update of the policy."""
        self.engine.step += 1
        # torch warns if a schedule steps before the optimizer.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self.engine.lr_schedulers.step()

    def save_checkpoint(self, path: str | None = None) -> None:
        """Save all that a run needs to resume. path: None saves to a step folder in `checkpoint.folder`."""
        self.engine.save(path)

    def load_checkpoint(self, path: str | None = None, *, model_only: bool = False) -> bool:
        """Load a checkpoint and zero the gradients; returns False if there is no checkpoint.

        path: None loads the run's newest checkpoint, or the config's initial checkpoint if the run has none.
        model_only: load only the weights; the optimizer starts with no state.
        """
        if not self.engine.load(path, model_only=model_only):
            return False
        if model_only:
            self._restart_optimizer()
        self.zero_grad()
        return True

    def replace_weights(self, weights: dict[str, Tensor]) -> None:
        """Replace the weights by a `snapshots.host_copy`; the optimizer starts with no state."""
        exchange(self.engine, weights)
        self.engine.weights_version += 1
        self._restart_optimizer()
        self.zero_grad()

    def start_adapters(self, seed: int, rank: int, layers: Collection[str]) -> None:
        """Begin with new adapters; see `redraw_adapters`. The optimizer starts with no state."""
        redraw_adapters(self.engine.model_parts, seed, rank, layers)
        self.engine.weights_version += 1
        self._restart_optimizer()
        self.zero_grad()

    def _restart_optimizer(self) -> None:
        for optimizer in self.engine.optimizers:
            optimizer.state.clear()

    def push_model_state_dict(self, generator: TakesWeights) -> int:
        """Send the weights to a generator; returns the version of the weights."""
        check_digest = self.job_config.rl.weight_sync.digest
        return push_weights(self.engine, generator, check_digest=check_digest)


class ReferencePolicy:
    """A fixed copy of this rank's part of the policy's weights, which gives reference log-probs.

    A forward swaps the copy with the live weights (and the biases that balance experts). With LoRA, only
    trained weights are copied; if only new adapters train, the reference is the base model, without a copy.
    is_loaded: True if the reference needs no checkpoint, or was loaded from one.
    """

    def __init__(self, trainer: PolicyTrainer):
        config = trainer.engine.job_config
        lora, has_adapters = config.lora, "lora" in config.model.converters
        self.is_base = has_adapters and not (lora.also_train or lora.adapter_path)
        self._trainer = trainer
        self.is_loaded = self.is_base
        self.take()

    def take(self) -> None:
        """Make the current weights the reference."""
        live = () if self.is_base else changing_weights(self._trainer.engine)
        self._weights = {name: weight.detach().clone() for name, weight in live}

    def logprobs(self, batch: TrainingBatch) -> list[Tensor | None]:
        """Return each sample's log-probs by the reference, as `PolicyTrainer.forward` does. Collective."""
        if self.is_base:
            with self._trainer.engine.adapters_off():
                return self._trainer.forward(batch)
        exchange(self._trainer.engine, self._weights)
        try:
            return self._trainer.forward(batch)
        finally:
            exchange(self._trainer.engine, self._weights)

    def _name_in_whole_model(self, name: str) -> str:
        for part in self._trainer.engine.model_parts:
            name = name_in_whole_model(part, name)
        return name

    def state_dict(self) -> dict[str, Tensor]:
        return {self._name_in_whole_model(name): w for name, w in self._weights.items()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Restore the weights; skips tensors that the checkpoint loader has filled in place."""
        self.is_loaded = True
        with torch.no_grad():
            for name, weight in self._weights.items():
                tensor = state_dict[self._name_in_whole_model(name)]
                if tensor is not weight:
                    weight.copy_(tensor)
