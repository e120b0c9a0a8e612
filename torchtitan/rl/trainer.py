"""The trainer's half of RL: gradients of a policy loss and optimizer steps, on a `TrainingEngine`.

The engine has the layouts (FSDP, TP, PP, CP and products), the checkpoints and the schedule; this
adds losses on log-probs, and numbers reduced over all ranks.
"""

import dataclasses
import warnings

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.engine import TrainingEngine
from torchtitan.loss.logprobs import TokenLogProbs, TokenOutputs
from torchtitan.rl.checks import (
    check_gradients_add_up,
    check_not_divided,
    check_trainer_config,
)
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.learner import Learner
from torchtitan.rl.losses import PolicyLoss, loss_from_config
from torchtitan.rl.snapshots import exchange
from torchtitan.rl.types import ForwardBackwardOutput, TrainingBatch
from torchtitan.rl.weight_sync import TakesWeights, WeightSync
from torchtitan.tools.logging import init_logger, logger


class PolicyTrainer(Learner):
    """Learns from batches of samples, in steps that the caller decides on; see `Learner`.

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
        else:
            check_not_divided(job_config)
        super().__init__(TrainingEngine(job_config) if engine is None else engine)

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
        return self._accumulate(batch, loss_fn, return_logprobs)

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

    def skip_step(self) -> None:
        """Count a step, for the schedule too, in which the policy stays as it is."""
        self.engine.step += 1
        with warnings.catch_warnings():  # torch expects the optimizer to have stepped before
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self.engine.lr_schedulers.step()

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

    # ---- helpers ----

    def _head(self, loss_fn: PolicyLoss | None = None) -> TokenLogProbs:
        # Logits were divided by this temperature when tokens were drawn.
        entropy = loss_fn is not None and loss_fn.needs_entropy
        return TokenLogProbs(temperature=self.job_config.rl.sampling.temperature, entropy=entropy)

    def _loss_inputs(self, outputs: TokenOutputs) -> TokenOutputs:
        return outputs

    def _with_scores(self, batch: TrainingBatch, name: str) -> TrainingBatch:
        """The batch whose tensors of this name hold log-probs by today's weights, on this rank."""
        self._check_on_all_ranks(batch)
        dp_rank, rows = self.engine.dp_rank, [list(row) for row in batch.microbatches]
        for row, logprobs in zip(rows, self._score(batch) or (), strict=False):
            mask = row[dp_rank].loss_mask
            new = torch.where(mask > 0, logprobs.detach().to(mask.device, mask.dtype), 0.0)
            row[dp_rank] = dataclasses.replace(row[dp_rank], **{name: new})
        return dataclasses.replace(batch, microbatches=tuple(tuple(row) for row in rows))
