"""The trainer's half of RL: gradients of a policy loss and optimizer steps, on a `TrainingEngine`.

The engine has the layouts (FSDP, TP, PP, CP and products), the checkpoints and the schedule; this
adds losses on log-probs, and numbers reduced over all ranks. Every method is collective: all ranks
call it with the same `TrainingBatch` and get the same result.

B rows, T slots of a microbatch (see `torchtitan.rl.types`).
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.batch.batch import Batch
from torchtitan.distributed.ranks import on_all_ranks
from torchtitan.engine import TrainingEngine
from torchtitan.loss.logprobs import TokenLogProbs, TokenOutputs
from torchtitan.rl.checks import check_gradients_add_up, check_trainer_config
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.losses import PolicyLoss, finalize_metrics, loss_from_config
from torchtitan.rl.snapshots import exchange
from torchtitan.rl.types import (
    ForwardBackwardOutput,
    OptimParams,
    OptimStepOutput,
    TrainingBatch,
)
from torchtitan.rl.weight_sync import TakesWeights, WeightSync
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.logging import init_logger, logger


class PolicyTrainer:
    """Learns from batches of samples, in steps that the caller decides on.

    `forward_backward` only adds to the gradients; `optim_step` uses them and zeroes them.
    engine: one that exists already; None builds it from the config.
    Raises ConfigError for a config that cannot run.
    """

    def __init__(self, job_config: JobConfig, *, engine: TrainingEngine | None = None):
        if not logger.handlers:
            init_logger()  # the process of an actor library has none
        self.job_config = job_config
        self.loss = loss_from_config(job_config.rl.loss)
        check_trainer_config(job_config)
        if engine is not None:
            check_gradients_add_up(engine.job_config)
        elif job_config.ranks_apart:
            raise ConfigError(
                f"rl.generator.ranks = {job_config.ranks_apart} divides the job's ranks before there "
                "is a Controller, PolicyTrainer or client on them; start with torchtitan.rl.train "
                "or rl.controller.build_part, or set it to 0"
            )
        self.engine = TrainingEngine(job_config) if engine is None else engine
        self._begin_step()

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps and of loads of only weights; a resumed run counts on."""
        return self.engine.weights_version

    # ---- one step ----

    def forward_backward(
        self,
        batch: TrainingBatch,
        loss_fn: PolicyLoss | None = None,
        *,
        return_logprobs: bool = False,
    ) -> ForwardBackwardOutput:
        """Add the gradients of the batch's loss to those that are there.

        loss_fn: None takes the config's, `rl.loss`.
        return_logprobs: also gather and return the log-probs of the labels.

        If it raises, part of the batch may be in the gradients: those of the whole step are
        zeroed, and the step begins again. Raises ValueError on all ranks, before anything is
        computed, if on one of them the batch is for another layout or differs from the others'.
        """
        loss_fn = self.loss if loss_fn is None else loss_fn
        if loss_fn.needs_whole_sequences and self.engine.parallel_dims.cp_enabled:
            raise ValueError(
                f"{loss_fn} takes ratios over whole sequences, which context parallelism splits, "
                f"got parallelism.context_parallel_degree = {self.engine.parallel_dims.cp}; set it "
                f"to 1, or take GRPOLoss with corrections per token"
            )
        if self._num_accumulated and (batch.denominator is None) != (self._denominator is None):
            raise ValueError(
                "the batches of one optimizer step must all have final weights or all leave the "
                "normalisation to the step; batch them in one way, or call optim_step in between"
            )
        self._check_on_all_ranks(batch, loss_fn)
        try:
            output = self._forward_backward(batch, loss_fn, return_logprobs)
        except BaseException:
            self.zero_grad()
            raise
        self._num_accumulated += 1
        if batch.denominator is not None:
            self._denominator = (self._denominator or 0.0) + batch.denominator
        return output

    def _forward_backward(
        self, batch: TrainingBatch, loss_fn: PolicyLoss, return_logprobs: bool
    ) -> ForwardBackwardOutput:
        # Under context parallelism the loss sees parts of rows, which only `forward` joins.
        is_split = return_logprobs and self.engine.parallel_dims.cp_enabled
        whole = self.forward(batch) if is_split else None
        # Metrics of all microbatches on this rank: maxima (of absolute values) or sums.
        max_names = [name for name in loss_fn.metric_names if name.endswith("_max")]
        sum_names = [name for name in loss_fn.metric_names if name not in max_names]
        sums = torch.zeros(len(sum_names), device=self.engine.device)
        maxima = torch.zeros(len(max_names), device=self.engine.device)
        logprobs: list[Tensor] = []

        def loss_of(outputs: TokenOutputs, labels: Tensor, engine_batch: Batch) -> Tensor:
            loss, metrics = loss_fn(outputs.logprobs, outputs.entropy, engine_batch)
            sums.add_(torch.stack([metrics[name].float() for name in sum_names]))
            if max_names:
                new = torch.stack([metrics[name].float() for name in max_names])
                torch.maximum(maxima, new, out=maxima)
            if return_logprobs and not is_split:
                logprobs.append(outputs.logprobs.detach())
            return loss

        microbatches = batch.of_rank(self.engine.dp_rank)
        loss = self.engine.forward_backward_step(
            input_dict=[microbatch.engine_batch() for microbatch in microbatches],
            labels=[microbatch.labels for microbatch in microbatches],
            global_valid_tokens=1.0,  # the weights in the batch are shares of the whole step
            loss_fn=loss_of,
            head=self._head(loss_fn.needs_entropy),
        )
        # Over all ranks; under pipeline parallelism only those of the last stage have the metrics.
        loss_and_sums = torch.cat([loss.reshape(1).float(), sums])
        mesh = self.engine.parallel_dims.get_optional_mesh("loss")
        if mesh is not None:
            dist.all_reduce(loss_and_sums, group=mesh.get_group())
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=mesh.get_group())
        numbers = torch.cat([loss_and_sums, maxima])
        if self.engine.pp_schedule is not None:
            numbers = self.engine.pp_schedule.broadcast_from_last_stage(numbers)
        loss_sum, *values = numbers.tolist()
        metrics = dict(zip(sum_names + max_names, values, strict=True))
        if return_logprobs and not is_split:
            whole = self._per_sample(batch, logprobs)
        return ForwardBackwardOutput(
            loss=loss_sum,
            metrics=finalize_metrics(metrics, batch.num_measured_tokens),
            logprobs=whole,
        )

    def forward(self, batch: TrainingBatch) -> list[Tensor | None]:
        """Log-probs of the labels, one 1-D fp32 tensor per sample, on the CPU; no gradients.

        0 where the loss does not count; None for samples that are in no row. Raises
        ValueError as `forward_backward` does.
        """
        self._check_on_all_ranks(batch)
        return self._per_sample(batch, self._score(batch) or [])

    def rescore(self, batch: TrainingBatch) -> tuple[TrainingBatch, float]:
        """The batch with log-probs by today's weights, and the largest change over all ranks.

        The forward sees the same microbatches that are trained on: until the weights change, a
        training forward gives the same bits, and every ratio is exactly 1. Cached decoding sums in
        another order and differs by 1e-6 in fp32. Raises ValueError as `forward_backward` does.

        Only this rank's microbatches change; under pipeline parallelism, only on the ranks with the
        last stage, where the loss is computed.
        """
        rescored = self._with_scores(batch, "generator_logprobs")
        largest = torch.zeros((), device=self.engine.device)
        dp_rank = self.engine.dp_rank
        for old, new in zip(batch.of_rank(dp_rank), rescored.of_rank(dp_rank), strict=True):
            change = (new.generator_logprobs - old.generator_logprobs).abs().max()
            largest = torch.maximum(largest, change.to(largest.device))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return rescored, largest.item()

    def with_old_logprobs(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch with `old_logprobs` by today's weights, for several updates on it.

        Collective; the note on ranks of `rescore` holds. Raises ValueError as `forward_backward`.
        """
        return self._with_scores(batch, "old_logprobs")

    def optim_step(self, params: OptimParams | None = None) -> OptimStepOutput:
        """Clip, update the weights, advance the schedule, run the converters' hooks, zero.

        params: settings for this step only; None, as a whole or in it, takes the config's.
        Raises ValueError if there was no `forward_backward` since the last step.
        """
        if not self._num_accumulated:
            raise ValueError("optim_step found no gradients; call forward_backward before it")
        params = OptimParams() if params is None else params
        # The batch counts tokens of all ranks, and the engine sums shares over ranks.
        share = self._denominator
        if share is not None and self.engine.dp_rank != 0:
            share = 0.0
        changes = {"betas": params.betas, "eps": params.eps, "weight_decay": params.weight_decay}
        changes = {name: value for name, value in changes.items() if value is not None}
        groups = [group for optimizer in self.engine.optimizers for group in optimizer.param_groups]
        before = [{name: group[name] for name in changes} for group in groups]
        self.engine.step += 1
        try:
            for group in groups:
                group.update(changes)
            result = self.engine.optim_step(
                lr=params.lr, max_norm=params.max_norm, denominator=share
            )
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)
        self._begin_step()
        return OptimStepOutput(
            policy_version=self.policy_version,
            grad_norm=result.grad_norm.item(),
            lr=result.lr,
            skipped=result.skipped,
        )

    def zero_grad(self) -> None:
        """Drop the gradients since the last step."""
        self.engine.optimizers.zero_grad()
        self._begin_step()

    def _begin_step(self) -> None:
        self._denominator: float | None = None
        self._num_accumulated = 0

    # ---- state ----

    def save_checkpoint(self, path: str | None = None) -> None:
        """Save everything that a run needs to continue.

        path: the folder to write; None is a step folder below `checkpoint.folder`.
        """
        self.engine.save(path)

    def load_checkpoint(self, path: str | None = None, *, model_only: bool = False) -> bool:
        """Load what `save_checkpoint` wrote, and zero the gradients; False if there is none.

        path: None is the run's newest checkpoint, or the initial one that the config names.
        model_only: take the weights; the optimizer starts from nothing.
        """
        if not self.engine.load(path, model_only=model_only):
            return False
        if model_only:
            self._restart_optimizer()
        self.zero_grad()
        return True

    def replace_weights(self, weights: dict[str, Tensor]) -> None:
        """Take these weights (`snapshots.host_copy`); the optimizer starts from nothing."""
        exchange(self.engine, weights)
        self.engine.weights_version += 1
        self._restart_optimizer()
        self.zero_grad()

    def _restart_optimizer(self) -> None:
        for optimizer in self.engine.optimizers:
            optimizer.state.clear()

    def push_model_state_dict(self, generator: TakesWeights) -> int:
        """Give a generator the weights; returns their version. Raises as `WeightSync.update`."""
        check_digest = self.job_config.rl.weight_sync.digest
        return WeightSync(self.engine, generator, check_digest=check_digest).update()

    def close(self) -> None:
        """Finish pending checkpoint writes. Safe to call twice."""
        self.engine.close()

    # ---- helpers ----

    def _check_on_all_ranks(self, batch: TrainingBatch, loss_fn: PolicyLoss | None = None) -> None:
        """Collective, and before all other collectives, in which ranks would wait for each other."""
        dp_size = self.engine.dp_size

        def check() -> tuple:
            for of_ranks in batch.microbatches:
                if len(of_ranks) != dp_size:
                    raise ValueError(
                        f"the batch was made for {len(of_ranks)} data-parallel ranks, got a "
                        f"trainer with {dp_size}; make it with Batcher(dp_size={dp_size})"
                    )
                for microbatch in of_ranks if loss_fn is not None else ():
                    loss_fn.check(microbatch.engine_batch())
            return len(batch.microbatches), batch.num_samples, batch.num_global_valid_tokens

        found = on_all_ranks(check)
        if len(set(found)) > 1:
            listed = "; ".join(
                f"rank {rank}: {n} microbatches of {samples} samples with {tokens} tokens"
                for rank, (n, samples, tokens) in enumerate(found[:8])
            )
            raise ValueError(f"all ranks must give the same batch, got {listed}")

    def _head(self, entropy: bool) -> TokenLogProbs:
        # Logits were divided by this temperature when tokens were drawn.
        return TokenLogProbs(temperature=self.job_config.rl.sampling.temperature, entropy=entropy)

    def _score(self, batch: TrainingBatch) -> list[Tensor] | None:
        """Log-probs [B, T] of this rank's microbatches; None without the last stage."""
        return self.engine.forward_step(
            [microbatch.engine_batch() for microbatch in batch.of_rank(self.engine.dp_rank)],
            output_fn=lambda outputs, _: outputs.logprobs,
            head=self._head(entropy=False),
        )

    def _with_scores(self, batch: TrainingBatch, name: str) -> TrainingBatch:
        """The batch whose tensors of this name hold log-probs by today's weights, on this rank."""
        self._check_on_all_ranks(batch)
        dp_rank, rows = self.engine.dp_rank, [list(row) for row in batch.microbatches]
        for row, logprobs in zip(rows, self._score(batch) or (), strict=False):
            mask = row[dp_rank].loss_mask
            new = torch.where(mask > 0, logprobs.detach().to(mask.device, mask.dtype), 0.0)
            row[dp_rank] = dataclasses.replace(row[dp_rank], **{name: new})
        return dataclasses.replace(batch, microbatches=tuple(tuple(row) for row in rows))

    def _per_sample(self, batch: TrainingBatch, logprobs: list[Tensor]) -> list[Tensor | None]:
        """Cut [B, T] log-probs into samples, and gather those of all ranks."""
        schedule = self.engine.pp_schedule
        samples: dict[int, Tensor] = {}
        for i, microbatch in enumerate(batch.of_rank(self.engine.dp_rank)):
            if schedule is None or self.engine.pp_has_last_stage:
                values = logprobs[i].float()
            else:
                values = torch.zeros(microbatch.labels.shape, device=self.engine.device)
            if schedule is not None:
                values = schedule.broadcast_from_last_stage(values)
            samples |= microbatch.per_sample(values.cpu())
        if self.engine.dp_group is not None:
            parts: list[Any] = [None] * self.engine.dp_size
            dist.all_gather_object(parts, samples, group=self.engine.dp_group)
            samples = {index: values for part in parts for index, values in part.items()}
        return [samples.get(index) for index in range(batch.num_samples)]
