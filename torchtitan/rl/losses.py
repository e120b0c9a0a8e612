"""Losses of the RL trainer: pure functions of per-token tensors, summed with the batch's weights.

r = exp(logprob - generator_logprob) is the ratio of the trained policy to the sampling policy, and A is
the advantage. The loss of a token is:

    grpo, ppo            -min(r A, clip(r, 1 - eps, 1 + eps) A), at most -c A if A < 0
    dapo                 the same with a lower and an upper eps
    gspo                 the same with r the geometric mean of the sequence's ratios
    cispo                -stop_gradient(clip(r, 1 - low, 1 + high)) A logprob
    importance_sampling  -r A
    dro                  -(logprob A - beta / 2 log(r)^2)
    cross_entropy        -logprob

With a `correction`, r is the ratio to the trainer's policy at the start of the step, and the loss is
multiplied by the ratio of that policy to the sampling policy: see `torchtitan.rl.correction`.

B rows, T slots per row; per-token tensors are shifted already, see `torchtitan.rl.types`.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchtitan.loss.aggregation import weighted_sum
from torchtitan.loss.distillation import Distilled
from torchtitan.rl.correction import ImportanceCorrection, sequence_sums
from torchtitan.rl.types import LossInputs

Measured = dict[str, Tensor]


class LossOutput(NamedTuple):
    """The loss of one microbatch, a scalar to call backward on, and metrics, scalars without gradient.

    Over microbatches and ranks, the engine takes the maximum of metrics whose names end in `_max`, and the
    sum of all other metrics; see `finalize_metrics`.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class PolicyLoss(ImportanceCorrection, ABC):
    """A policy loss: the sum over tokens of
    weight * (correction * policy loss + kl_coef * KL - entropy_coef * entropy).

    A token that the correction masks is left out of all terms, but denominators count it. A batch without
    `old_logprobs` uses the current log-probs instead, which are equal in the first update of a step.
    """

    has_generator: ClassVar[bool] = True  # the loss reads the generator's log-probs

    kl_coef: float = 0.0  # weight of the KL divergence from the batch's `ref_logprobs`
    kl_type: str = "k3"  # estimator of the KL divergence, see `kl_divergence`
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.corrects and not self.has_generator:
            raise ValueError(
                "rl.loss.correction, max_token_mismatch and max_sequence_mismatch need a loss that reads "
                f"the generator's log-probs, got {self}; leave these keys out"
            )

    @abstractmethod
    def per_token(self, logprobs: Tensor, batch: LossInputs) -> tuple[Tensor, Measured]:
        """Return the policy loss of each token, and metrics by name, all [B, T] and finite.

        logprobs: log-probs [B, T] of the labels under the trained policy, in nats.
        """

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef > 0

    @functools.cached_property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the loss's metrics, found by calling the loss with one token.

        Ranks without outputs never call the loss, but need these names.
        """
        token, index = torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int64)
        batch: Any = dict.fromkeys(LossInputs.__annotations__, token) | {"sequence_ids": index}
        return tuple(self(token, token, batch).metrics)

    def check(self, batch: LossInputs) -> None:
        """Raise ValueError if a microbatch lacks a tensor that the loss reads."""
        if self.kl_coef > 0 and batch.get("ref_logprobs") is None:
            raise ValueError(
                f"rl.loss.kl_coef = {self.kl_coef} needs ref_logprobs in the samples, got none; "
                "compute them with the reference policy, or set the key to 0"
            )

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: LossInputs) -> LossOutput:
        """Return the loss of one microbatch and its metrics.

        logprobs: as for `per_token`. entropy: [B, T], in nats; may be None unless `needs_entropy`.
        Raises ValueError if the batch lacks what the loss needs.
        """
        if self.needs_entropy and entropy is None:
            raise ValueError(
                f"rl.loss.entropy_coef = {self.entropy_coef} needs the entropy of every token, got "
                "none; compute it with TokenLogProbs(entropy=True)"
            )
        self.check(batch)
        weights, mask = batch["loss_weights"], batch["loss_mask"]
        losses, measured = self.per_token(logprobs, batch)
        metrics: dict[str, Tensor] = {}
        if self.corrects:
            old = _old_logprobs(logprobs, batch)
            factors, is_masked, mismatches = self.weights_and_mask(old, batch)
            losses = losses * factors
            weights = weights.masked_fill(is_masked, 0)
            metrics |= mismatches
        metrics["policy_loss"] = loss = weighted_sum(losses, weights)
        with torch.no_grad():
            metrics |= {name: weighted_sum(values, mask) for name, values in measured.items()}
            if self.has_generator:
                difference = (logprobs - batch["generator_logprobs"]).masked_fill(mask == 0, 0)
                log_ratio = difference.clamp(-self.max_log_ratio, self.max_log_ratio)
                metrics["logprob_diff_mean"] = difference.abs().sum()
                metrics["logprob_diff_max"] = difference.abs().max()
                metrics["kl_generator"] = (torch.expm1(log_ratio) - log_ratio).sum()
        if self.needs_entropy:
            metrics["entropy"] = weighted_sum(entropy, mask)
            loss = loss - self.entropy_coef * weighted_sum(entropy, weights)
        if self.kl_coef > 0:
            kl = kl_divergence(logprobs, batch["ref_logprobs"], self.kl_type, self.max_log_ratio)
            metrics["kl_ref"] = weighted_sum(kl, mask)
            metrics["kl_loss"] = self.kl_coef * weighted_sum(kl, weights)
            loss = loss + metrics["kl_loss"]
        return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})

    def log_ratio(self, logprobs: Tensor, batch: LossInputs) -> Tensor:
        """Return log(policy / old policy) of each token, clamped; 0 for tokens not in the loss.

        The old policy is the generator's or, with a correction, the trainer's at the start of the step.
        """
        uses_generator = self.correction == "none"
        old = batch["generator_logprobs"] if uses_generator else _old_logprobs(logprobs, batch)
        log_ratio = (logprobs - old).masked_fill(batch["loss_mask"] == 0, 0)
        return log_ratio.clamp(-self.max_log_ratio, self.max_log_ratio)


def _old_logprobs(logprobs: Tensor, batch: LossInputs) -> Tensor:
    old = batch.get("old_logprobs")
    return logprobs.detach() if old is None else old.to(logprobs.dtype)


def check_context_parallel(loss: Any, cp: int) -> None:
    """Raise ValueError if the loss needs whole sequences and context parallelism (`cp`) splits them."""
    if cp > 1 and loss.needs_whole_sequences:
        raise ValueError(
            f"{loss} takes ratios over whole sequences, which context parallelism splits, got "
            f"parallelism.context_parallel_degree = {cp}; set it to 1, or take 'grpo' with "
            "rl.loss.correction = 'token' and without max_sequence_mismatch"
        )


def finalize_metrics(metrics: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """Return means over the tokens in the loss, from metrics reduced over microbatches and ranks.

    Metrics whose names end in `_max` (maxima), `_count` (counts) or `_loss` (weighted loss terms) are not
    divided. num_tokens: number of tokens over the same microbatches and ranks; 0 gives zeros.
    """
    return {
        name: value if name.endswith(("_max", "_count", "_loss")) else value / max(num_tokens, 1)
        for name, value in metrics.items()
    }


def metrics_of_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the metrics of several updates: maxima (`_max`), sums of counts (`_count`), else means."""
    merged = {}
    for name in updates[0]:
        values = [metrics[name] for metrics in updates]
        merged[name] = max(values) if name.endswith("_max") else sum(values)
        if not name.endswith(("_max", "_count")):
            merged[name] /= len(values)
    return merged


def kl_divergence(
    logprobs: Tensor, ref_logprobs: Tensor, kl_type: str, max_log_ratio: float
) -> Tensor:
    """Return a per-token estimate of KL(policy || reference), in the shape of `logprobs`.

    d = logprobs - ref_logprobs, clamped to plus and minus max_log_ratio, for tokens that the policy itself
    sampled (Schulman 2020, "Approximating KL divergence"):

        k1  d               unbiased; only a metric, because its gradient is 0 on average
        k2  d^2 / 2         biased; as a loss its gradient is that of KL(policy || reference)
        k3  exp(-d) - 1 + d unbiased, never negative; used by GRPO

    Raises ValueError for any other kl_type.
    """
    d = (logprobs - ref_logprobs).clamp(-max_log_ratio, max_log_ratio)
    match kl_type:
        case "k1":
            return d
        case "k2":
            return d**2 / 2
        case "k3":
            return torch.expm1(-d) + d
    raise ValueError(f"rl.loss.kl_type must be one of 'k1', 'k2', 'k3', got {kl_type!r}")


# ---- the losses ----


@dataclass(frozen=True)
class _ClippedRatioLoss(PolicyLoss):
    """PPO's clipped ratio (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    dual_clip: c, above 1; 0 turns it off. With a negative advantage A, the clipped loss has no upper
        bound; c limits it to -c A, where it has no gradient (Ye et al. 2020, arXiv:1912.09729, eq. 5).
    """

    dual_clip: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_clip and not 1 < self.dual_clip < math.inf:
            raise ValueError(
                f"rl.loss.dual_clip must be above 1, or 0 to turn it off, got {self.dual_clip}; 3 is usual"
            )

    @property
    @abstractmethod
    def clip_range(self) -> tuple[float, float]:
        """The clip distances below and above 1."""

    def ratio(self, logprobs: Tensor, batch: LossInputs) -> Tensor:
        return self.log_ratio(logprobs, batch).exp()

    def per_token(self, logprobs: Tensor, batch: LossInputs) -> tuple[Tensor, Measured]:
        ratio, advantages = self.ratio(logprobs, batch), batch["advantages"]
        low, high = self.clip_range
        gain, clipped_gain = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
        # At a clip bound both gains are equal. Use `gain`, because since torch 2.14 `clamp` has no gradient
        # there.
        clipped = torch.where(gain <= clipped_gain, gain, clipped_gain)
        lowest = torch.full_like(gain, -torch.inf)
        if self.dual_clip:
            lowest = torch.where(advantages < 0, self.dual_clip * advantages, lowest)
        measured = {
            "ratio_mean": ratio,
            "ratio_clipped_frac": clipped_gain < gain,
            "ratio_dual_clipped_frac": clipped < lowest,
        }
        return -torch.maximum(clipped, lowest), measured


@dataclass(frozen=True)
class GRPOLoss(_ClippedRatioLoss):
    """The clipped ratio with the same clip distance below and above 1.

    Shao et al. 2024 (arXiv:2402.03300), eq. 3, whose aggregation is "seq-mean-token-mean".
    """

    clip_eps: float = 0.2

    @property
    def clip_range(self) -> tuple[float, float]:
        return self.clip_eps, self.clip_eps


@dataclass(frozen=True)
class DAPOLoss(_ClippedRatioLoss):
    """The clipped ratio with separate clip distances (Yu et al. 2025, arXiv:2503.14476, eq. 8)."""

    ratio_clip_low: float = 0.2
    ratio_clip_high: float = 0.28

    @property
    def clip_range(self) -> tuple[float, float]:
        return self.ratio_clip_low, self.ratio_clip_high


@dataclass(frozen=True)
class GSPOLoss(DAPOLoss):
    """One clipped ratio for each sequence: the geometric mean of its tokens' ratios.

    Zheng et al. 2025 (arXiv:2507.18071), in the token-level form: a token's ratio has the value of the
    sequence's ratio, and its gradient comes from the token's log-prob. The loss equals the
    sequence-level form if all tokens of a sequence have the same advantage and weight. The paper's
    objective has the aggregation "seq-mean-token-mean".
    """

    ratio_clip_low: float = 3e-4
    ratio_clip_high: float = 4e-4

    @property
    def needs_whole_sequences(self) -> bool:
        return True

    def ratio(self, logprobs: Tensor, batch: LossInputs) -> Tensor:
        log_ratio = self.log_ratio(logprobs.detach(), batch)
        # The mean over the tokens of a sequence that are in the loss; 0 if there are none.
        in_loss = batch["loss_mask"] != 0
        sums, counts, index = sequence_sums(log_ratio, in_loss, batch["sequence_ids"])
        mean = (sums / counts.clamp(min=1)).gather(1, index)
        return (mean + (logprobs - logprobs.detach())).exp()


@dataclass(frozen=True)
class CISPOLoss(PolicyLoss):
    """The log-prob times the clipped ratio, which has no gradient; every token keeps the log-prob's gradient.

    MiniMax 2025 (arXiv:2506.13585), eq. 4 and 5; the paper does not clip from below.
    """

    ratio_clip_low: float = 1.0
    ratio_clip_high: float = 0.28

    def per_token(self, logprobs: Tensor, batch: LossInputs) -> tuple[Tensor, Measured]:
        ratio = self.log_ratio(logprobs.detach(), batch).exp()
        clipped = ratio.clamp(1 - self.ratio_clip_low, 1 + self.ratio_clip_high)
        measured = {"ratio_mean": ratio, "ratio_clipped_frac": clipped != ratio}
        return -clipped * batch["advantages"] * logprobs, measured


@dataclass(frozen=True)
class ImportanceSamplingLoss(PolicyLoss):
    """The policy gradient times the ratio to the sampling policy, without clipping."""

    def per_token(self, logprobs: Tensor, batch: LossInputs) -> tuple[Tensor, Measured]:
        ratio = self.log_ratio(logprobs, batch).exp()
        return -ratio * batch["advantages"], {"ratio_mean": ratio}


@dataclass(frozen=True)
class DROLoss(PolicyLoss):
    """The policy gradient without a ratio, and a quadratic penalty on the distance from the sampling policy.

    Richemond et al. 2024 (arXiv:2405.19107), in the per-token form and with the beta of
    tinker-docs.thinkingmachines.ai/tinker/losses/dro. d loss / d logprob is -(A - beta log(r)).
    """

    beta: float = 0.05

    def per_token(self, logprobs: Tensor, batch: LossInputs) -> tuple[Tensor, Measured]:
        squared = self.log_ratio(logprobs, batch) ** 2
        losses = 0.5 * self.beta * squared - logprobs * batch["advantages"]
        return losses, {"log_ratio_squared_mean": squared}


@dataclass(frozen=True)
class CrossEntropyLoss(PolicyLoss):
    """Minus the log-prob of the label: supervised learning, without advantages or a generator."""

    has_generator: ClassVar[bool] = False

    def per_token(self, logprobs: Tensor, batch: LossInputs) -> tuple[Tensor, Measured]:
        return -logprobs, {}


@dataclass(frozen=True, eq=False)
class LossWithTeacher:
    """policy_weight * a policy loss, plus kl_weight * T^2 * KL between policy and teacher at each token.

    T is `rl.sampling.temperature`, for both models. The policy sampled the tokens, but no gradient goes
    through the sampling (Agarwal et al. 2024, arXiv:2306.13649, section 3.1). Used in place of a
    `PolicyLoss`.
    """

    policy: PolicyLoss
    policy_weight: float
    teacher: Any  # the class is `objective.distillation.Distillation`

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` read attributes before `policy` is set.
        if name == "policy":
            raise AttributeError(name)
        # Take other attributes, such as `needs_entropy` and `check`, from the policy loss.
        return getattr(self.policy, name)

    @property
    def metric_names(self) -> tuple[str, ...]:
        return (*self.policy.metric_names, "kl_teacher", "teacher_loss")

    def __call__(
        self, logprobs: Tensor, entropy: Tensor | None, distilled: Distilled, batch: LossInputs
    ) -> LossOutput:
        loss, metrics = self.policy(logprobs, entropy, batch)
        found = {"kl_teacher": distilled.kl, "teacher_loss": distilled.loss.detach()}
        total = distilled.loss
        if self.policy_weight:
            total = total + self.policy_weight * loss
        return LossOutput(total, metrics | found)


# ---- the registry of losses by `rl.loss.name` ----

_LOSSES: dict[str, type[PolicyLoss]] = {
    "grpo": GRPOLoss,
    "ppo": GRPOLoss,
    "dapo": DAPOLoss,
    "gspo": GSPOLoss,
    "cispo": CISPOLoss,
    "importance_sampling": ImportanceSamplingLoss,
    "dro": DROLoss,
    "cross_entropy": CrossEntropyLoss,
}


def register_loss(name: str) -> Callable[[type[PolicyLoss]], type[PolicyLoss]]:
    """Return a decorator that registers a `PolicyLoss` dataclass under a value of `rl.loss.name`.

    Raises ValueError if the name is taken.
    """

    def register(loss_cls: type[PolicyLoss]) -> type[PolicyLoss]:
        if _LOSSES.setdefault(name, loss_cls) is not loss_cls:
            raise ValueError(f"the loss {name!r} is registered already; choose another name")
        return loss_cls

    return register


def loss_class(name: str) -> type[PolicyLoss]:
    """Return the loss class of a name; raises ValueError for an unknown name."""
    if name not in _LOSSES:
        raise ValueError(f"rl.loss.name must be one of {', '.join(_LOSSES)}, got {name!r}")
    return _LOSSES[name]


def build_loss(name: str, **settings: Any) -> PolicyLoss:
    """Return the loss of that name; a setting that is None keeps its default.

    Raises ValueError for settings that the loss does not have.
    """
    known = {field.name for field in fields(loss_class(name))}
    given = {key: value for key, value in settings.items() if value is not None}
    for unknown in sorted(set(given) - known):
        raise ValueError(
            f"rl.loss.{unknown} = {given[unknown]} is not read by rl.loss.name = {name!r}, which reads "
            f"{', '.join(sorted(known))}; remove the setting"
        )
    return loss_class(name)(**given)


def loss_from_config(config: Any) -> PolicyLoss:
    """Return the loss that the section `[rl.loss]` describes."""
    not_settings = ("name", "args", "agg_mode", "norm", "count_empty")
    settings = {k: v for k, v in vars(config).items() if k not in not_settings}
    for key in set(settings) & set(config.args):
        raise ValueError(
            f"rl.loss.args is for settings that have no key of their own, got {key!r}; set rl.loss.{key}"
        )
    return build_loss(config.name, **settings, **config.args)
