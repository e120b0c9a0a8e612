"""A critic for PPO, on a second engine. A slot's value is the expected reward of the tokens after it.

B rows, T slots of a microbatch (see `torchtitan.rl.types`).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchtitan.distributed.dtensor import forget_scales, local_tensor
from torchtitan.engine import TrainingEngine
from torchtitan.job import resolve_job
from torchtitan.loss.aggregation import weighted_sum
from torchtitan.optim.lr_scheduler import follow_own_schedule
from torchtitan.rl.advantages import GAE
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.learner import Learner
from torchtitan.rl.losses import LossOutput
from torchtitan.rl.snapshots import exchange, host_copy, own_weights
from torchtitan.rl.types import LossInputs, TrainingBatch, TrainingSample
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.logging import logger


@dataclass(frozen=True)
class ValueLoss:
    """Half the squared error of a value, where the value may be clipped to a range around the old value:

        max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2

    V is a token's value and R its return. The formula is that of OpenAI baselines, ppo2 (Schulman et al.
    2017, arXiv:1707.06347). Losses of tokens are summed with the batch's weights.
    value_clip: c; 0 turns clipping off.
    """

    metric_names: ClassVar[tuple[str, ...]] = ("value_loss", "value_clipped_frac")
    needs_whole_sequences: ClassVar[bool] = False

    value_clip: float = 0.2

    def check(self, batch: LossInputs) -> None:
        """Raise ValueError if a microbatch lacks a tensor that the loss reads."""
        for name in ("old_values", "returns"):
            if batch.get(name) is None:
                raise ValueError(
                    f"a critic learns from {name} in the samples, got none; add it with "
                    "Critic.with_advantages"
                )

    def __call__(self, values: Tensor, batch: LossInputs) -> LossOutput:
        """Return the loss of one microbatch and its metrics. values: [B, T]."""
        old, returns = batch["old_values"], batch["returns"]
        error = (values - returns) ** 2
        largest = error
        if self.value_clip:
            bounded = values.clamp(old - self.value_clip, old + self.value_clip)
            largest = torch.maximum(error, (bounded - returns) ** 2)
        loss = weighted_sum(largest, batch["loss_weights"]) / 2
        clipped = weighted_sum(largest > error, batch["loss_mask"])
        return LossOutput(loss, {"value_loss": loss.detach(), "value_clipped_frac": clipped})


class Critic(Learner):
    """Learns the values of tokens, and computes advantages from them.

    It shares the policy's layout and process groups. It starts from the policy's weights and a random value
    head, or from `rl.critic.initial_load_path`. The policy's checkpoints include the critic.
    Raises ConfigError for a model that cannot have a value head.
    """

    def __init__(self, job_config: JobConfig, policy: TrainingEngine):
        config, advantage = job_config.rl.critic, job_config.rl.advantage
        self.config, self._policy = config, policy
        self._estimate = GAE(advantage.gamma, advantage.lam, advantage.whiten)
        batcher = Batcher.from_config(job_config, policy.dp_size)
        self.batcher = replace(batcher, agg_mode=config.agg_mode or batcher.agg_mode)
        self.is_loaded = False
        engine = TrainingEngine(critic_config(job_config), layout=policy.layout)
        super().__init__(engine, ValueLoss(config.value_clip))

    def begin(self) -> None:
        """Load initial weights unless resuming. Collective.

        With LoRA, always load initial weights, because checkpoints lack the base weights.
        """
        if self.is_loaded:
            if "lora" in self.engine.job_config.model.converters:
                loaded = host_copy(self.engine)
                self._take_first_weights()
                exchange(self.engine, loaded)
            return
        if self._policy.step > 0:
            logger.warning(
                "the checkpoint of step %d has no rl_critic: the critic begins untrained",
                self._policy.step,
            )
        self._take_first_weights()

    def _take_first_weights(self) -> None:
        if self.config.initial_load_path:
            self.engine.load(self.config.initial_load_path, model_only=True)
            return
        of_policy = dict(own_weights(self._policy))
        with torch.no_grad():
            for name, weight in own_weights(self.engine):
                # The policy has no value head.
                if name in of_policy:
                    local_tensor(weight).copy_(local_tensor(of_policy[name]))
        forget_scales(weight for _, weight in own_weights(self.engine))

    def with_advantages(
        self, samples: Sequence[TrainingSample], rewards: Sequence[float]
    ) -> tuple[list[TrainingSample], dict[str, float]]:
        """Return (a step's samples with advantages, old values and returns; metrics). Collective.

        rewards: one per sample, for its last sampled token. Tokens that were not sampled are skipped.
        """
        values = self.forward(self.batcher.batch(samples))
        fitting = [i for i, of_sample in enumerate(values) if of_sample is not None]
        sampled = [samples[i].loss_mask != 0 for i in fitting]
        old = [values[i][mask] for i, mask in zip(fitting, sampled, strict=True)]
        advantages, returns = self._estimate([rewards[i] for i in fitting], old)

        # Samples that fit no row get zeros, because all samples of a batch must have the same tensors.
        names = ("advantages", "old_values", "returns")
        zeros: Any = [{name: torch.zeros(len(sample)) for name in names} for sample in samples]
        for i, mask, *of_tokens in zip(fitting, sampled, advantages, old, returns, strict=True):
            for name, entries in zip(names, of_tokens, strict=True):
                zeros[i][name][mask] = entries.float()
        found = [replace(sample, **own) for sample, own in zip(samples, zeros, strict=True)]
        return found, _fit_of_values(old, returns)

    def update(self, batch: TrainingBatch) -> dict[str, float]:
        """Make one optimizer step on the batch; returns metrics."""
        output = self.forward_backward(batch)
        # A checkpoint of the policy may still be copying the critic's weights.
        self._policy.checkpointer.maybe_wait_for_staging()
        done = self.optim_step()
        return output.metrics | {"grad_norm": done.grad_norm, "lr": done.lr}

    def _output_layer(self, loss_fn: Any = None) -> None:
        return None

    def _values(self, outputs: Tensor) -> tuple[Tensor]:
        return (outputs.squeeze(-1),)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the state of model, optimizer and schedule, and the counters."""
        states = self.engine.checkpointer.states
        return {name: state.state_dict() for name, state in states.items() if state is not None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.is_loaded = True
        for name, state in self.engine.checkpointer.states.items():
            if state is not None:
                state.load_state_dict(state_dict[name])
        follow_own_schedule(self.engine.lr_schedulers)


def critic_config(job_config: JobConfig) -> JobConfig:
    """Return the config of the critic's engine; raises ConfigError if it cannot run."""
    job, critic = copy.deepcopy(job_config), job_config.rl.critic
    job.job.description = f"critic of {job.job.description}"
    job.job.print_config, job.job.save_config_file = False, None
    # A value head is always in fp32, so it needs no fp32_head.
    job.model.value_head, job.model.fp32_head = True, False
    for name in ("lr", "weight_decay"):
        if (value := getattr(critic, name)) is not None:
            setattr(job.optimizer, name, value)
    # The policy's checkpoints include the critic.
    job.checkpoint.enable = False
    try:
        resolved = resolve_job(job, builds_data=False).config
    except ConfigError as error:
        raise ConfigError(
            f"rl.advantage.name = 'gae' trains a critic, which is the policy's model with a value "
            f"head, and {error}; or take 'group_mean', which needs no critic"
        ) from None
    assert isinstance(resolved, JobConfig)
    return resolved


def _fit_of_values(values: Sequence[Tensor], returns: Sequence[Tensor]) -> dict[str, float]:
    """Return how well values predict returns: explained_variance is 1 - Var(R - V) / Var(R), or 0 if all
    returns are equal.
    """
    predicted = torch.cat([*values, torch.zeros(0)]).double()
    targets = torch.cat([*returns, torch.zeros(0)]).double()
    if not len(targets):
        return {}
    variance = targets.var(correction=0)
    unexplained = (targets - predicted).var(correction=0)
    return {
        "value_mean": predicted.mean().item(),
        "return_mean": targets.mean().item(),
        "explained_variance": (1 - unexplained / variance).item() if variance > 0 else 0.0,
    }
