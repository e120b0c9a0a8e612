"""The trainer's half of RL: gradients of a policy loss and optimizer steps, on a `TrainingEngine`.

The engine brings the layouts (FSDP, TP, PP, CP and products), the checkpoints and the schedule;
what is added here is losses on log-probs, numbers reduced over all ranks, and a policy version.
Every method is collective: all ranks call it with the same `TrainingBatch`, and all get the same
back.

B rows, T slots of a microbatch (see `torchtitan.rl.types`).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.components.logprobs import TokenLogProbs, TokenOutputs
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.engine import Batch, TrainingEngine
from torchtitan.rl.checks import check_gradients_add_up, check_trainer_config
from torchtitan.rl.generator import Generator
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.losses import PolicyLoss, finalize_metrics, loss_from_config
from torchtitan.rl.rescore import rescore
from torchtitan.rl.types import (
    ForwardBackwardOutput,
    OptimParams,
    OptimStepOutput,
    TrainingBatch,
    TrainingMicrobatch,
)
from torchtitan.rl.weight_sync import build_weight_sync
from torchtitan.tools.logging import init_logger, logger


class PolicyTrainer:
    """Learns from batches of samples; whoever calls decides what a step is.

    `forward_backward` adds to the gradients and nothing else, `optim_step` uses them up.
    engine: one that exists already; None builds it from the config.
    Raises ConfigError for a config that cannot run.
    """

    def __init__(self, job_config: JobConfig, *, engine: TrainingEngine | None = None):
        if not logger.handlers:
            init_logger()  # in a process that an actor library started, nobody else does
        self.job_config = job_config
        self.loss = loss_from_config(job_config.rl.loss)
        check_trainer_config(job_config)
        if engine is not None:
            check_gradients_add_up(engine.job_config)
        self.engine = TrainingEngine(job_config) if engine is None else engine
        self._begin_step()

    @property
    def policy_version(self) -> int:
        """Optimizer steps that made these weights, and loads of weights alone; a resumed run goes
        on counting.
        """
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
        return_logprobs: also return the log-probs of the labels, which have to be gathered.

        If it raises, a part of the batch may have counted: then the gradients of the whole step
        are zeroed, and the step begins anew.
        """
        loss_fn = self.loss if loss_fn is None else loss_fn
        self._check_step(batch, loss_fn)
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
        # Ranks that share rows see parts of them below; `forward` joins those.
        is_split = return_logprobs and self.engine.parallel_dims.cp_enabled
        whole = self.forward(batch) if is_split else None
        totals = _Totals(loss_fn.metric_names, self.engine.device)
        microbatches = batch.of_rank(self.engine.dp_rank)
        logprobs: list[Tensor] = []

        def loss_of(outputs: TokenOutputs, labels: Tensor, engine_batch: Batch) -> Tensor:
            output = loss_fn(outputs.logprobs, outputs.entropy, engine_batch)
            totals.add(output.metrics)
            if return_logprobs and not is_split:
                logprobs.append(outputs.logprobs.detach())
            return output.loss

        loss = self.engine.forward_backward_step(
            input_dict=[microbatch.engine_batch() for microbatch in microbatches],
            labels=[microbatch.labels for microbatch in microbatches],
            global_valid_tokens=1.0,  # the weights in the batch are shares of the whole step
            loss_fn=loss_of,
            head=self._head(loss_fn.needs_entropy),
        )
        loss_sum, metrics = self._reduce(loss, totals)
        if return_logprobs and not is_split:
            whole = self._per_sample(batch, microbatches, logprobs)
        return ForwardBackwardOutput(
            loss=loss_sum,
            metrics=finalize_metrics(metrics, batch.num_global_valid_tokens),
            logprobs=whole,
        )

    def forward(self, batch: TrainingBatch) -> list[Tensor | None]:
        """Log-probs of the labels, one 1-D fp32 tensor per sample, on the CPU; no gradients.

        0 where the loss does not count; None for samples that did not fit a row.
        """
        microbatches = batch.of_rank(self.engine.dp_rank)
        logprobs = self.engine.forward_step(
            [microbatch.engine_batch() for microbatch in microbatches],
            output_fn=lambda outputs, _: outputs.logprobs,
            head=self._head(entropy=False),
        )
        return self._per_sample(batch, microbatches, logprobs or [])

    def rescore(self, batch: TrainingBatch) -> tuple[TrainingBatch, float]:
        """The batch with log-probs by today's weights, and the largest change; see `rescore`."""
        temperature = self.job_config.rl.sampling.temperature
        batch, largest = rescore(self.engine, batch, temperature)
        of_ranks = torch.tensor(largest, device=self.engine.device)
        dist.all_reduce(of_ranks, op=dist.ReduceOp.MAX)
        return batch, of_ranks.item()

    def optim_step(self, params: OptimParams | None = None) -> OptimStepOutput:
        """Clip, update the weights, advance the schedule, run the converters' hooks, zero.

        params: settings for this step alone; what is None in it, or all if it is None, comes
            from the config and its schedule.
        Raises ValueError if there was no `forward_backward` since the last step.
        """
        if not self._num_accumulated:
            raise ValueError("optim_step found no gradients; call forward_backward before it")
        params = OptimParams() if params is None else params
        self.engine.step += 1
        with _settings_of_step(self.engine.optimizers, params):
            result = self.engine.optim_step(
                lr=params.lr, max_norm=params.max_norm, denominator=self._own_denominator()
            )
        self._begin_step()
        return OptimStepOutput(
            policy_version=self.policy_version,
            grad_norm=result.grad_norm.item(),
            lr=result.lr,
            skipped=result.skipped,
        )

    def zero_grad(self) -> None:
        """Forget what was added up since the last step."""
        self.engine.optimizers.zero_grad()
        self._begin_step()

    def _begin_step(self) -> None:
        self._denominator: float | None = None
        self._num_accumulated = 0

    # ---- state ----

    def save_checkpoint(self, path: str | None = None) -> None:
        """Save everything that a run continues from.

        path: the folder to write; None is a step folder below `checkpoint.folder`.
        """
        self.engine.save(path)

    def load_checkpoint(self, path: str | None = None, *, model_only: bool = False) -> bool:
        """Load what `save_checkpoint` wrote, and zero the gradients; False if there is none.

        path: None is the run's newest checkpoint, or the initial one that the config names.
        model_only: take the weights; the optimizer begins anew.
        """
        if not self.engine.load(path, model_only=model_only):
            return False
        if model_only:
            for optimizer in self.engine.optimizers:
                optimizer.state.clear()
        self.zero_grad()
        return True

    def push_model_state_dict(self, generator: Generator) -> int:
        """Hand the weights to a generator in its dtype; returns their version.

        Raises as `WeightSync.update` does if the generator does not hold them afterwards.
        """
        return build_weight_sync(self.job_config, self.engine, generator).update()

    def close(self) -> None:
        """Finish pending checkpoint writes. Safe to call twice."""
        self.engine.close()

    # ---- helpers ----

    def _head(self, entropy: bool) -> TokenLogProbs:
        # The behaviour policy was divided by this temperature, so the trained one is too.
        return TokenLogProbs(temperature=self.job_config.rl.sampling.temperature, entropy=entropy)

    def _check_step(self, batch: TrainingBatch, loss_fn: PolicyLoss) -> None:
        if loss_fn.needs_whole_sequences and self.engine.parallel_dims.cp_enabled:
            raise ValueError(
                f"{type(loss_fn).__name__} takes a ratio over whole sequences, which context "
                f"parallelism splits, got parallelism.context_parallel_degree = "
                f"{self.engine.parallel_dims.cp}; set it to 1, or take GRPOLoss"
            )
        if self._num_accumulated and (batch.denominator is None) != (self._denominator is None):
            raise ValueError(
                "the batches of one optimizer step must all have final weights or all leave the "
                "normalisation to the step; batch them in one way, or call optim_step in between"
            )

    def _own_denominator(self) -> float | None:
        """This rank's share; the engine sums over data-parallel ranks, and batches are global."""
        if self._denominator is None:
            return None
        return self._denominator if self.engine.dp_rank == 0 else 0.0

    def _reduce(self, loss: Tensor, totals: "_Totals") -> tuple[float, dict[str, float]]:
        """The loss and the metrics over all ranks; only those of the last stage knew the latter."""
        sums, maxima = torch.cat([loss.reshape(1).float(), totals.sums]), totals.maxima
        mesh = self.engine.parallel_dims.get_optional_mesh("loss")
        if mesh is not None:
            dist.all_reduce(sums, group=mesh.get_group())
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=mesh.get_group())
        numbers = torch.cat([sums, maxima])
        if self.engine.pp_schedule is not None:
            numbers = self.engine.pp_schedule.broadcast_from_last_stage(numbers)
        loss_sum, *values = numbers.tolist()
        return loss_sum, dict(zip(totals.names, values, strict=True))

    def _per_sample(
        self,
        batch: TrainingBatch,
        microbatches: list[TrainingMicrobatch],
        logprobs: list[Tensor],
    ) -> list[Tensor | None]:
        """Cut [B, T] log-probs into samples and bring those of all ranks together."""
        schedule = self.engine.pp_schedule
        samples: dict[int, Tensor] = {}
        for i, microbatch in enumerate(microbatches):
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


class _Totals:
    """Metrics of all microbatches of a call on this rank: maxima for names in `_max`, else sums."""

    def __init__(self, metric_names: Sequence[str], device: torch.device):
        self._max_names = [name for name in metric_names if name.endswith("_max")]
        self._sum_names = [name for name in metric_names if name not in self._max_names]
        self.sums = torch.zeros(len(self._sum_names), device=device)
        self.maxima = torch.zeros(len(self._max_names), device=device)  # of absolute values

    @property
    def names(self) -> list[str]:
        return self._sum_names + self._max_names

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        if self._sum_names:
            self.sums += torch.stack([metrics[name].float() for name in self._sum_names])
        if self._max_names:
            new = torch.stack([metrics[name].float() for name in self._max_names])
            self.maxima = torch.maximum(self.maxima, new)


@contextlib.contextmanager
def _settings_of_step(optimizers: OptimizersContainer, params: OptimParams) -> Iterator[None]:
    """Give the optimizers other betas, eps and weight decay, and then their own back."""
    changes = {"betas": params.betas, "eps": params.eps, "weight_decay": params.weight_decay}
    changes = {name: value for name, value in changes.items() if value is not None}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    before = [{name: group[name] for name in changes} for group in groups]
    for group in groups:
        group.update(changes)
    try:
        yield
    finally:
        for group, values in zip(groups, before, strict=True):
            group.update(values)
