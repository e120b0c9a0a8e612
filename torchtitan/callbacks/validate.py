"""Loss on held-out text, between training steps."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from torchtitan.batch.batch import Batch, TokenBatch
from torchtitan.batch.context import ContextSharding
from torchtitan.batch.dummy_microbatches import num_dummies
from torchtitan.batch.policy import DocumentPolicy
from torchtitan.callbacks.metrics import MetricsProcessor
from torchtitan.compat import is_overridden
from torchtitan.config import JobConfig
from torchtitan.data import text_datasets
from torchtitan.data.dataloader import BaseDataLoader
from torchtitan.data.tokenizer import BaseTokenizer
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.dtensor import whole_tensor
from torchtitan.loss.cross_entropy import IGNORE_INDEX, LossFunction, default_head
from torchtitan.step.objective import Objective, Tally
from torchtitan.step.runner import Microbatch, ModelInputs, Runner, model_inputs
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import get_device_type

ValidationContext: TypeAlias = Callable[[], AbstractContextManager[None]]


class BaseValidator:
    def __init__(self, job_config: JobConfig) -> None:
        self.job_config = job_config

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Evaluate the model. step: number of training steps so far."""
        raise NotImplementedError(f"{type(self).__name__} must define validate")

    def should_validate(self, step: int) -> bool:
        """True for step 1 and every `validation.freq` steps."""
        is_due = step % self.job_config.validation.freq == 0
        return is_due or step == 1


class Validator(BaseValidator):
    """Reports the mean loss per token over the validation batches of all ranks.

    The loss does not depend on batch size or number of ranks; every validation reads the same batches.
    """

    validation_dataloader: BaseDataLoader
    objective = Objective()  # the trainer replaces this

    def __init__(
        self,
        job_config: JobConfig,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        parallel_dims: ParallelDims,
        loss_fn: LossFunction,
        validation_context: ValidationContext,
        maybe_enable_amp: AbstractContextManager[None],
        metrics_processor: MetricsProcessor | None = None,
        pp_schedule: Any | None = None,
        pp_has_first_stage: bool | None = None,
        pp_has_last_stage: bool | None = None,
    ) -> None:
        if metrics_processor is None:
            raise ValueError("build_validator needs a metrics_processor to report the loss to")
        super().__init__(job_config)
        self.tokenizer = tokenizer
        self._dp_world_size = dp_world_size
        self.parallel_dims = parallel_dims
        self.loss_fn, self.metrics_processor = loss_fn, metrics_processor
        self.validation_context, self.maybe_enable_amp = validation_context, maybe_enable_amp
        self.pp_schedule, self.pp_has_first_stage = pp_schedule, pp_has_first_stage
        self.pp_has_last_stage = pp_has_last_stage
        self.validation_dataloader = text_datasets.build_text_validation_dataloader(
            job_config=job_config,
            dp_world_size=dp_world_size,
            dp_rank=dp_rank,
            tokenizer=tokenizer,
            infinite=job_config.validation.steps != -1,
        )
        self._start_of_data: dict[str, Any] | None = None

    def post_dataloading_process(
        self,
        input_dict: Batch | TokenBatch,
        labels: torch.Tensor,
        model_parts: list[nn.Module],
    ) -> ModelInputs:
        """Return (inputs [B, T], labels [B, T], extra inputs, extra keyword arguments) for the model.

        With context parallelism all tensors are this rank's slice, [B, T/cp]. Overrides get a dict as input_dict.
        """
        policy = self._policy(model_parts)
        sharding = ContextSharding.from_parallelism(self.parallel_dims, self.job_config.parallelism)
        batch = policy.token_batch(input_dict, labels)
        return model_inputs(policy, batch, model_parts[0], sharding)

    def _policy(self, model_parts: list[nn.Module]) -> DocumentPolicy:
        model_args = getattr(model_parts[0], "model_args", None)
        return DocumentPolicy.from_job(self.job_config.training, model_args, self.tokenizer)

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Log the mean loss over `validation.steps` global batches, or over all data if -1."""

        def client_inputs(batch: TokenBatch) -> ModelInputs | None:
            if not is_overridden(self, "post_dataloading_process", Validator):
                return None
            given = self.post_dataloading_process(batch.as_dict(), batch.labels, model_parts)
            return ModelInputs(*given)

        runner = Runner(
            model_parts,
            torch.device(get_device_type()),
            self.validation_context,
            self.maybe_enable_amp,
            sharding=ContextSharding.from_parallelism(
                self.parallel_dims, self.job_config.parallelism
            ),
            schedule=self.pp_schedule,
            client_inputs=client_inputs,
        )
        with runner.mode(training=False), _measured_apart(self.metrics_processor):
            losses, own_denominator, tally = [], 0, Tally(self.objective)
            for input_dict, labels in self._batches():
                loss, denominator = self._forward(runner, input_dict, labels, tally)
                losses.append(loss)
                own_denominator += denominator
            denominator = 0.0
            if losses:
                of_loss, of_batch = map(self.parallel_dims.get_optional_mesh, ("loss", "batch"))
                # In fp64, because the validation set may be large.
                loss_sum = dist_utils.dist_sum(torch.stack(losses).double().sum(), of_loss)
                total = torch.tensor(float(own_denominator), device=runner.device)
                denominator = dist_utils.dist_sum(total, of_batch)
                group = None if of_loss is None else of_loss.get_group()
                metrics = tally.read("validation_metrics/", runner, group)
            if not denominator:
                logger.warning(
                    "validation.dataset %r has no token with a label, so no loss is reported",
                    self.job_config.validation_data.dataset,
                )
                return
            extra = {"extra_metrics": metrics} if metrics else {}
            self.metrics_processor.log_validation(loss=loss_sum / denominator, step=step, **extra)

    def _batches(self) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Yield the same number of batches on every rank. Ranks without data repeat a batch, unlabelled."""
        # Every validation starts at the same position, so losses are comparable, also after resuming.
        if self._start_of_data is None:
            self._start_of_data = self.validation_dataloader.state_dict()
        else:
            self.validation_dataloader.load_state_dict(self._start_of_data)
        batches = iter(self.validation_dataloader)
        config = self.job_config.validation_data
        # A dummy batch, for a rank whose share of the data has no batch at all.
        tokens = torch.zeros(config.local_batch_size, config.seq_len, dtype=torch.int64)
        input_dict, labels = {"input": tokens}, tokens
        max_batches, global_batch_size = config.steps, self.job_config.training.global_batch_size
        batch_size = getattr(self.validation_dataloader, "batch_size", None)
        if max_batches != -1 and global_batch_size > 0 and batch_size:
            max_batches *= max(1, global_batch_size // self._dp_world_size // batch_size)
        num_batches = 0
        if max_batches:
            batch = next(batches, None)
            is_over = self._all_ranks_finished(batch is None)
        while num_batches != max_batches:
            if is_over():
                return
            if batch is None:
                labels = torch.full_like(labels, IGNORE_INDEX)
            else:
                input_dict, labels = batch
                self.metrics_processor.ntokens_since_last_log += labels.numel()
            num_batches += 1
            if num_batches != max_batches:
                # The all-reduce starts before this batch's forward, so reading its result is not delayed.
                batch = next(batches, None)
                is_over = self._all_ranks_finished(batch is None)
            yield input_dict, labels

    def _forward(
        self, runner: Runner, input_dict: Batch, labels: torch.Tensor, tally: Tally
    ) -> tuple[torch.Tensor, int]:
        """Return (this rank's share of the loss, the batch's denominator); all pipeline ranks return the same."""
        policy, objective = self._policy(runner.model_parts), self.objective
        (batch,) = objective.prepare([policy.training_batch(input_dict, labels)])
        batches = [batch]
        if self.pp_schedule is not None:
            n_rows = self.job_config.parallelism.pipeline_parallel_microbatch_size
            batches = batch.split(n_rows)
        head: Any = objective.head
        if not objective.replaces_loss:
            head = default_head(self.loss_fn, runner.model_parts, self.job_config)
        joins_rows = objective.whole_rows and runner.sharding is not None
        microbatches = [runner.prepare(batch, policy, head, joins_rows) for batch in batches]

        def loss_of(outputs: Any, microbatch: Microbatch) -> torch.Tensor:
            if not objective.replaces_loss:
                return self.loss_fn(outputs, microbatch.labels) if head is None else outputs
            outputs = whole_tensor(outputs)
            outputs = microbatch.join(outputs) if joins_rows else outputs
            return tally(outputs, microbatch.labels, microbatch.batch)

        losses = runner.run(microbatches, loss_of)
        loss = torch.zeros((), device=runner.device) if not losses else torch.stack(losses).sum()
        if joins_rows:
            loss = loss / runner.num_context_ranks
        if self.pp_schedule is not None:
            loss = self.pp_schedule.broadcast_from_last_stage(loss)
        return loss, objective.denominator(batch)

    def _all_ranks_finished(self, is_finished: bool) -> Callable[[], bool]:
        """Start an all-reduce; the returned function returns True if all ranks are out of data."""
        mesh = self.parallel_dims.get_optional_mesh("batch")
        group = None if mesh is None else mesh.get_group()
        n_more = num_dummies(int(not is_finished), group, torch.device(get_device_type()))
        return lambda: is_finished and not n_more()


build_validator = Validator


@contextmanager
def _measured_apart(metrics_processor: MetricsProcessor) -> Iterator[None]:
    """Exclude the tokens and the time of this context from the next training metrics."""
    num_tokens = metrics_processor.ntokens_since_last_log
    seconds = time.perf_counter() - metrics_processor.time_last_log
    metrics_processor.ntokens_since_last_log = 0
    metrics_processor.time_last_log = time.perf_counter()
    try:
        yield
    finally:
        metrics_processor.ntokens_since_last_log = num_tokens
        metrics_processor.time_last_log = time.perf_counter() - seconds
