"""The trainer: a `TrainingEngine` with a tokenizer, data, metrics, validation and a loop."""

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch

from torchtitan.batch.batch import Batch
from torchtitan.callbacks.isolation_probe import IsolationProbe
from torchtitan.callbacks.metrics import build_metrics_processor
from torchtitan.callbacks.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling
from torchtitan.checkpoint.folder import Contents, contents_of
from torchtitan.checkpoint.saver import AsyncMode
from torchtitan.checkpoint.states import DATALOADER
from torchtitan.compat import Batches, is_overridden
from torchtitan.config import JobConfig
from torchtitan.config.checks import ConfigError, check_tokenizer_fits
from torchtitan.config.checks.unused import tell_settings_without_effect
from torchtitan.data.dataloader import DataloaderExhaustedError
from torchtitan.data.packed_dataset import PackedDataset
from torchtitan.data.prefetch import Step, StepCounts, StepsAhead, read_step
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.processes.late_ranks import Progress
from torchtitan.distributed.processes.stop import StopRequest
from torchtitan.engine import TrainingEngine
from torchtitan.objective import build_objective, check_objective
from torchtitan.optim.lr_scheduler import LRSchedulersContainer, follow_own_schedule
from torchtitan.step.objective import Objective, Tally
from torchtitan.step.runner import on_error
from torchtitan.step.update import OptimStepResult
from torchtitan.tools import utils
from torchtitan.tools.events import event, recorded
from torchtitan.tools.logging import logger, saying_once_per


class Trainer(TrainingEngine):
    """Trains a model as the config says. Tokenizer, dataloader and validator are optional.

    Without a `build_dataloader_fn` in the train spec, the caller passes batches to the engine's steps.
    """

    builds_data = True
    objective = Objective()
    _stop: StopRequest | None = None  # not None while `train` runs

    def __init__(self, job_config: JobConfig, **options: Any):
        super().__init__(job_config, **options)
        with on_error(self.close):
            job_config = self.job_config
            tell_settings_without_effect(job_config)
            self._attended_pairs = self._attending_tokens = 0  # each log resets these counts
            build = self.train_spec.build_metrics_processor_fn or build_metrics_processor
            metrics = build(job_config, self.parallel_dims, self.model_args)
            metrics.num_flops_per_token = self.num_flops_per_token
            metrics.optimizers, metrics.lr_schedulers = self.optimizers, self.lr_schedulers
            metrics.model_parts, metrics.num_steps = self.model_parts, self.num_steps
            self.metrics_processor = metrics
            has_chats = getattr(getattr(self.dataloader, "dataset", None), "has_chats", False)
            shares_rows = job_config.training.packing != "none"
            if has_chats and shares_rows and not self.packing.separates_documents:
                logger.warning(
                    "chats in one row attend to each other, because model.attn_mask_type is 'causal': set it "
                    "to 'block_causal' with model.attn_type 'flex', or training.packing to 'none'"
                )
            self.objective = build_objective(self)
            self._tally = Tally(self.objective)
            self._build_validator()
            self.isolation_probe = None
            pp_mesh = self.parallel_dims.get_optional_mesh("pp")
            pp_group = None if pp_mesh is None else pp_mesh.get_group()
            self.progress = Progress(pp_group)
            if job_config.debug.check_document_isolation_freq > 0:
                self.isolation_probe = IsolationProbe(
                    lambda batch: next(iter(self.forward_step(batch) or ()), None),
                    self.model_parts,
                    self.packing,
                    self.model_args.vocab_size,
                    self.seed,
                    self.device,
                    pp_group,
                )
            training = job_config.training
            logger.info(
                f"trainer ready: local batch {training.local_batch_size}, global batch "
                f"{self.global_batch_size}, {self.gradient_accumulation_steps} accumulation "
                f"step(s), sequence length {training.seq_len}, {self.num_steps} steps "
                f"({job_config.lr_scheduler.warmup_steps} warm-up)"
            )

    # ---- construction ----

    def build_data(self) -> None:
        spec, config = self.train_spec, self.job_config
        if spec.build_tokenizer_fn is not None:
            self.tokenizer = spec.build_tokenizer_fn(config)
            check_tokenizer_fits(self.tokenizer, spec.model_args[config.model.flavor])
        if spec.build_dataloader_fn is not None:
            self.dataloader = spec.build_dataloader_fn(
                dp_world_size=self.dp_size,
                dp_rank=self.dp_rank,
                tokenizer=self.tokenizer,
                job_config=config,
            )
            self._count_documents()
        check_objective(self)

    def _count_documents(self) -> None:
        """Derive num_steps from `training.epochs`, and log chat statistics."""
        training = self.job_config.training
        dataset = getattr(self.dataloader, "dataset", None)
        if not isinstance(dataset, PackedDataset):
            if training.epochs is not None:
                raise ConfigError(
                    f"training.epochs = {training.epochs} needs a dataset whose documents are counted, "
                    f"and model {self.job_config.model.name!r} has a dataloader of its own; set "
                    "training.steps"
                )
            return
        if training.epochs is not None:
            self.num_steps = dataset.num_steps_left
            logger.info(
                f"training.epochs = {training.epochs:g}: {dataset.num_documents:,} documents fill "
                f"{dataset.num_planned_rows:,} rows of {training.seq_len}, so training.steps = "
                f"{self.num_steps}"
            )
        dataset.log_chats()

    def _build_validator(self) -> None:
        self.validator = None
        if not self.job_config.validation.enable:
            return
        build = self.train_spec.build_validator_fn
        if build is None:
            raise ConfigError(
                f"validation.enable is set, but model {self.job_config.model.name!r} has no "
                "build_validator_fn; turn validation off or give its train spec one"
            )
        self.validator = build(
            job_config=self.job_config,
            dp_world_size=self.dp_size,
            dp_rank=self.dp_rank,
            tokenizer=self.tokenizer,
            parallel_dims=self.parallel_dims,
            loss_fn=self.loss_fn,
            validation_context=self.train_context,
            maybe_enable_amp=self.maybe_enable_amp,
            metrics_processor=self.metrics_processor,
            pp_schedule=self.pp_schedule,
            pp_has_first_stage=self.pp_has_first_stage,
            pp_has_last_stage=self.pp_has_last_stage,
        )
        self.validator.objective = self.objective.for_validation

    # ---- data ----

    def batch_generator(
        self, data_iterable: Iterable[tuple[Batch, torch.Tensor]] | StepsAhead
    ) -> Batches:
        """Return an iterator over batches on the CPU. It counts their tokens and measures the reading time.

        Raises ValueError without a dataloader; the iterator raises DataloaderExhaustedError at the end.
        """
        refuse_missing_dataloader(data_iterable)
        return Batches(data_iterable, self._count_read)

    def _count_read(self, labels: list[int], seconds: float) -> None:
        """Count batches whose reading took `seconds`. labels: the number of labels of each batch."""
        self.ntokens_seen += sum(labels)
        self.metrics_processor.ntokens_since_last_log += sum(labels)
        self.metrics_processor.data_loading_times += [seconds / max(len(labels), 1)] * len(labels)

    @contextlib.contextmanager
    def _data(self) -> Iterator[Iterator[tuple[Batch, torch.Tensor]]]:
        """Yield an iterator over batches that reads one step ahead; checkpoints save its position."""
        # An overridden batch_generator gets the plain dataloader, because it may make other batches.
        if is_overridden(self, "batch_generator", Trainer):
            yield self.batch_generator(self.dataloader)
            return
        states = self.checkpointer.states
        steps = StepsAhead(
            self.dataloader,
            self.gradient_accumulation_steps,
            self.num_steps - self.step,
            self.packing.training_batch,
            self.objective.denominator,
            self.device,
            None if self.dp_group is None else self.parallel_dims.world_size // self.dp_size,
            timedelta(seconds=self.job_config.comm.init_timeout_seconds),
        )
        is_saved = states[DATALOADER] is self.dataloader and steps.keeps_position
        if is_saved:
            states[DATALOADER] = steps
        try:
            yield self.batch_generator(steps)
        finally:
            if is_saved:
                states[DATALOADER] = self.dataloader
            steps.close()

    def next_step(self, data_iterator: Iterator[tuple[Batch, torch.Tensor]]) -> Step:
        """Return the next step: its batches, and their loss denominator over all ranks.

        All ranks stop at the same step. At the end of the data every rank raises
        DataloaderExhaustedError; if reading fails on a rank, the other ranks raise ValueError.
        """
        # The trainer's iterator holds whole steps; a client's iterator yields (input_dict, labels).
        if isinstance(data_iterator, Batches) and data_iterator.steps is not None:
            step = data_iterator.next_step()
        else:
            n_batches, to_batch = self.gradient_accumulation_steps, self.packing.training_batch
            options = to_batch, self.objective.denominator, self._sum_over_ranks
            step = read_step(data_iterator, n_batches, *options)
        if step.error is not None:
            raise step.error
        if step.counts.num_failed:
            raise ValueError(
                f"{step.counts.num_failed} of {self.dp_size} data-parallel ranks could not read their "
                "data; these ranks' error messages say why"
            )
        if step.counts.num_ran_out:
            raise DataloaderExhaustedError(
                f"{step.counts.num_ran_out} of {self.dp_size} data-parallel ranks have no batch left"
            )
        for batch in step.batches:
            self._attended_pairs += self.packing.attended_pairs(batch)
            self._attending_tokens += batch.tokens.numel()
        return step

    def _sum_over_ranks(self, counts: StepCounts) -> StepCounts:
        if self.dp_group is None:
            return counts
        sums = torch.tensor(dataclasses.astuple(counts)).to(self.device)
        torch.distributed.all_reduce(sums, group=self.dp_group)
        return StepCounts(*sums.tolist())  # waits for the device

    # ---- one step ----

    def train_step(self, data_iterator: Iterator[tuple[Batch, torch.Tensor]]) -> None:
        """Fetch, forward, backward, update and log one step of the global batch."""
        read = self.next_step(data_iterator)
        if self.isolation_probe is not None:
            freq = self.job_config.debug.check_document_isolation_freq
            if (self.step - 1) % freq == 0:
                self.isolation_probe.check(self.step, read.batches[0])
        is_overridden_by_client = is_overridden(self, "forward_backward_step", TrainingEngine)
        options = {} if is_overridden_by_client else self._tally.step_options()
        losses = []
        for i, batch in enumerate(read.batches):
            (batch,) = self.objective.prepare([batch])
            assert batch.labels is not None
            given: Any = batch.as_dict() if is_overridden_by_client else batch
            is_last = i + 1 == len(read.batches)
            with contextlib.nullcontext() if is_last else self.runner.more_microbatches_follow():
                loss = self.forward_backward_step(
                    input_dict=given,
                    labels=batch.labels,
                    global_valid_tokens=max(read.counts.denominator, 1),
                    **options,
                )
            losses.append(loss)
        if self._stop is not None:
            self._stop.ask()  # the ranks exchange stop requests during the optimizer step
        result = self.optim_step()
        if self.metrics_processor.should_log(self.step):
            self.update.settle()  # no extra wait: logging waits for the gradient norm
            self._log_step(read, torch.stack(losses).sum(), result)

    def _log_step(self, read: Step, loss: torch.Tensor, result: OptimStepResult) -> None:
        """Log a step's metrics. loss: this rank's sum of losses / the denominator over all ranks."""
        dims, rows_loss = self.parallel_dims, loss
        if dims.cp_enabled:  # sum the loss of whole rows over the context-parallel ranks
            rows_loss = loss.clone()
            torch.distributed.all_reduce(rows_loss, group=dims.get_mesh("cp").get_group())
        # Divide by at least 1, so the mean loss of a rank without valid tokens is 0, not NaN.
        own_share = read.counts.denominator / max(read.own_denominator, 1)
        loss_mesh = dims.get_optional_mesh("loss")
        ntokens_seen = torch.tensor(self.ntokens_seen, dtype=torch.int64, device=self.device)
        self._count_flops()
        self.metrics_processor.log(
            self.step,
            dist_utils.dist_sum(loss, loss_mesh),
            dist_utils.dist_max(rows_loss * own_share, loss_mesh),
            result.grad_norm.item(),
            extra_metrics={
                "n_tokens_seen": dist_utils.dist_sum(ntokens_seen, dims.get_optional_mesh("batch")),
                "lr": result.lr,
                **self._tally.read("loss_metrics/", self.runner, self.loss_group),
            },
        )

    def _count_flops(self) -> None:
        """Set the FLOPs per token from the lengths of the documents since the last log."""
        if self.packing.separates_documents and self._attending_tokens:
            attended_length = self._attended_pairs / self._attending_tokens
            share = attended_length / self.job_config.training.seq_len
            attention = self.num_flops_per_token - self.flops_without_attention
            flops = self.flops_without_attention + share * attention
            self.metrics_processor.num_flops_per_token = flops
        self._attended_pairs = self._attending_tokens = 0

    # ---- the loop ----

    def should_continue_training(self) -> bool:
        return self.step < self.num_steps

    @recorded
    def train(self) -> None:
        """Load the newest checkpoint, if any, and train to step `num_steps`."""
        refuse_missing_dataloader(self.dataloader)
        config = self.job_config
        if not load_newest_checkpoint(self):
            return
        dataset = getattr(self.dataloader, "dataset", None)
        if isinstance(dataset, PackedDataset) and dataset.is_resumed:
            if config.training.epochs is not None:
                self._plan_steps(dataset.num_steps_left)
        self.metrics_processor.start(self.step)
        self.gc_handler = utils.GarbageCollection(
            gc_freq=config.training.gc_freq, debug=config.training.gc_debug
        )
        profiling: Any = {"global_step": self.step, "base_folder": config.job.dump_folder}
        try:
            with (
                saying_once_per(self._said),
                maybe_enable_profiling(config.profiling, **profiling) as profiler,
                maybe_enable_memory_snapshot(config.profiling, **profiling) as snapshot,
                StopRequest(config) as stop,
            ):
                self._stop = stop
                with self._data() as data_iterator:
                    profilers = [tool for tool in (profiler, snapshot) if tool is not None]
                    self._train_on(data_iterator, profilers, stop)
                self.update.settle()
        finally:
            self.gc_handler.close()
            self._stop = None
        if stop.reason is None:
            logger.info("training completed")

    def _plan_steps(self, num_steps_left: int) -> None:
        """Set the last step of a resumed run, whose global batch size may have changed."""
        self.num_steps = self.metrics_processor.num_steps = self.step + num_steps_left
        if isinstance(self.lr_schedulers, LRSchedulersContainer):
            config, build = self.job_config.lr_scheduler, self.train_spec.build_lr_schedulers_fn
            planned = build(self.optimizers, config, self.num_steps)
            for own, new in zip(self.lr_schedulers, planned, strict=True):
                own.lr_lambdas = new.lr_lambdas
            follow_own_schedule(self.lr_schedulers)

    def _train_on(
        self,
        data_iterator: Iterator[tuple[Batch, torch.Tensor]],
        profilers: list[Any],
        stop: StopRequest,
    ) -> None:
        config = self.job_config
        first_step = self.step + 1
        while self.should_continue_training():
            self.step += 1
            self.gc_handler.run(self.step)
            try:
                with self.progress.step(self.step):
                    self.train_step(data_iterator)
            except DataloaderExhaustedError as error:
                self.step -= 1
                logger.warning(
                    f"the data ended after step {self.step} of {self.num_steps} ({error}); saving and "
                    "stopping"
                )
                self.update.settle()
                if self.step > 0:
                    self.checkpointer.save(self.step, last_step=True)
                break
            is_last_step = self.step == self.num_steps
            if not is_last_step and (reason := stop.answer()):
                save_and_stop(self, reason)
                return
            saver = self.checkpointer
            if any(due(self.step, is_last_step) for due in (saver._should_save, saver.is_peft_due)):
                self.update.settle()  # raise before the save if the gradient norm stops the run
            started = time.monotonic()
            saver.save(self.step, last_step=is_last_step)
            stop.saved(time.monotonic() - started)
            if self.validator is not None and self.validator.should_validate(self.step):
                self.validator.validate(self.model_parts, self.step)
            for profiler in profilers:
                profiler.step()
            if self.step == first_step:
                # The first step, which compiles and connects, is over: use the short timeout.
                timeout = timedelta(seconds=config.comm.train_timeout_seconds)
                dist_utils.set_pg_timeouts(timeout=timeout, parallel_dims=self.parallel_dims)

    def close(self) -> None:
        if self.metrics_processor is not None:
            self.metrics_processor.close()
        self.objective.close()
        super().close()


def save_and_stop(engine: TrainingEngine, reason: str) -> None:
    """Save a full checkpoint, so the run can be resumed, and log the reason. Collective."""
    checkpointer = engine.checkpointer
    usual_mode, checkpointer.async_mode = checkpointer.async_mode, AsyncMode.DISABLED
    engine.save()  # synchronous, because async_mode is off here
    checkpointer.async_mode, checkpointer.has_stopped = usual_mode, True
    logger.warning(
        f"stopped after step {engine.step} of {engine.num_steps}: {reason}; its "
        "checkpoint is complete, and the same command continues the run",
        extra=event("stop", engine.step),
    )


def refuse_missing_dataloader(dataloader: Any) -> None:
    if dataloader is None:
        raise ValueError(
            "this trainer has no dataloader (its train spec's build_dataloader_fn is None): feed batches "
            "yourself with forward_backward_step and optim_step, or give the train spec a dataloader"
        )


def load_newest_checkpoint(engine: TrainingEngine) -> bool:
    """Resume from the newest checkpoint, if any; return False if the run is already complete.

    Raises ValueError if the checkpoint holds only weights, because a run from step 0 would overwrite it.
    """
    config, checkpointer = engine.job_config, engine.checkpointer
    checkpointer.claim_folder()
    newest = checkpointer.newest_step() if config.checkpoint.load_step == -1 else -1
    continues = newest > 0
    # With training.epochs, the last step is known only after the data position is loaded.
    if (
        continues
        and newest >= engine.num_steps
        and (config.training.epochs is None or checkpointer.holds_weights_only(newest))
    ):
        logger.info(
            f"this run is complete: its checkpoint of step {newest} reaches training.steps = "
            f"{engine.num_steps}; raise training.steps to go on, or set another job.dump_folder to train again"
        )
        checkpointer.finish_upload()
        return False
    excluded = config.checkpoint.exclude_from_loading
    if continues and "train_state" not in excluded and checkpointer.holds_weights_only(newest):
        raise ValueError(
            f"the newest checkpoint, of step {newest}, holds weights only "
            "(checkpoint.last_save_model_only), so the run cannot continue from it. Set "
            "checkpoint.load_step to an earlier full checkpoint, or start a new run from these "
            "weights: another checkpoint.folder, and this one as checkpoint.initial_load_path"
        )
    is_loaded = checkpointer.load(step=config.checkpoint.load_step)
    hf_config = config.model.hf_config
    if not is_loaded and hf_config and contents_of(hf_config) == Contents.HF:
        logger.warning(
            f"training starts from random weights, not from the weights in model.hf_config = {hf_config!r}: "
            "checkpoint.initial_load_in_hf = true loads the weights in model.hf_assets_path"
        )
    follow_own_schedule(engine.lr_schedulers)
    if engine.step > 0:
        logger.info("the run continues after step %d", engine.step)
    compiling = "; compiling, so the first step takes longer" if config.compile.enable else ""
    started = f"training starts at step {engine.step + 1}{compiling}"
    logger.info(started, extra=event("training", engine.step))
    return True
