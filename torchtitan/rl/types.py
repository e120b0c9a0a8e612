"""The dataclasses that the modules of the RL trainer exchange.

In order, from a generator to gradients: `Completion`, `Episode`, `TrainingSample`, `TrainingMicrobatch`
(in a `TrainingBatch`, with its `LossInputs`, which the loss reads), then the engine's `TokenBatch` and
`Microbatch`.

Per-token tensors for training are shifted already: index t of labels, masks, log-probs, advantages
and weights belongs to the prediction made at input token t. A sequence of n tokens fills n - 1 slots.

B rows, T slots per row, n slots of one sequence.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple, Required, TypedDict

import torch
from torch import Tensor

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.config.fields import Range

FinishReason = Literal["stop", "length"]

# ---- generation ----


@dataclass(frozen=True)
class SamplingConfig:
    """Settings for drawing tokens.

    temperature: divides the logits; 0 takes the most probable token.
    top_p: draw from the fewest top tokens with this total probability; 1 keeps all tokens.
    top_k: draw from this many of the most probable tokens; 0 keeps all tokens.
    max_tokens: length limit of a completion.
    stop_token_ids: tokens that end a completion; the stop token is part of the completion.
    stop_strings: strings that end a completion; the token that completes the string is included.
    decode: converts token ids to text, to find stop strings.
    seed: None continues the generator's own random stream.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    decode: Callable[[list[int]], str] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.stop_strings and (self.decode is None or "" in self.stop_strings):
            raise ValueError(
                f"stop_strings must not be empty strings, and need decode, got {self.stop_strings} and decode "
                f"= {self.decode}; correct the strings, and pass the tokenizer's decode"
            )
        # Temperatures below 1e-20 would overflow fp32 logits.
        ranges = {
            "temperature": Range(1e-20, math.inf, excluded=math.inf, special=0),
            "top_p": Range(0, 1, excluded=0),
            "top_k": Range(0, math.inf),
            "max_tokens": Range(1, math.inf),
        }
        for name, allowed in ranges.items():
            if rule := allowed.problem(getattr(self, name)):
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)}")

    @property
    def may_stop(self) -> bool:
        """True if a completion can end before max_tokens."""
        return bool(self.stop_token_ids or self.stop_strings)

    def stops_at(self, token_ids: Sequence[int]) -> bool:
        """Return True if the last of these tokens ends the completion."""
        if token_ids[-1] in self.stop_token_ids:
            return True
        if not self.stop_strings:
            return False
        assert self.decode is not None
        # A token has at least one byte. Decode four more tokens than the longest stop string has bytes,
        # because the first decoded token may begin inside a character.
        longest = max(len(string.encode()) for string in self.stop_strings)
        text = self.decode(list(token_ids[-(longest + 4) :]))
        return any(string in text for string in self.stop_strings)


@dataclass(frozen=True)
class Completion:
    """The tokens that a generator drew after one prompt.

    token_ids: the n drawn tokens, including the stop token.
    token_logprobs: log-probs under the distribution that each token was drawn from, after the temperature
        and renormalised over the tokens that top_p and top_k kept.
    policy_version: version of the oldest weights that drew a token.
    token_versions: version of the weights that drew each token; None if all are `policy_version`.
    routed_experts: int16 [P + n - 1, L, k], the k experts in each of L MoE layers, for the P prompt tokens
        and all new tokens but the last; see `Decoder.check_routed_experts`. None if not recorded.
    """

    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int
    token_versions: tuple[int, ...] | None = None
    routed_experts: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Episode:
    """One graded completion of a task's prompt, or a dialogue with the task's environment.

    group_id: equal for all completions of a prompt.
    text: the graded text: the completion, or the last turn of a dialogue.
    token_ids: all tokens after the prompt. token_log_probs: 0 for tokens that were not sampled.
    policy_version: version of the oldest weights that drew a token.
    reward, advantage, ref_logprobs (of the new tokens under a reference model): None until known.
    scores: the task's scores, such as {"exact": 1.0}.
    loss_mask: 0 for tokens of the environment's replies; None if all tokens were sampled.
    turns: texts of policy and environment, which alternate; the policy has the first and the last turn.
    token_versions: as in `Completion`, with -1 for tokens of replies.
    routed_experts: as in `Completion`, for all tokens but the last; -1 lets the router choose.
    """

    group_id: int
    prompt: str
    prompt_token_ids: tuple[int, ...]
    expected_answer: str
    text: str
    token_ids: tuple[int, ...]
    token_log_probs: tuple[float, ...]
    policy_version: int
    finish_reason: FinishReason = "stop"
    reward: float | None = None
    advantage: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    ref_logprobs: tuple[float, ...] | None = None
    loss_mask: tuple[int, ...] | None = None
    turns: tuple[str, ...] = ()
    token_versions: tuple[int, ...] | None = None
    routed_experts: Tensor | None = field(default=None, compare=False)

    @property
    def num_versions(self) -> int:
        """The number of weight versions that drew the tokens."""
        return len(set(self.token_versions or (self.policy_version,)) - {-1})

    @property
    def turn_lengths(self) -> list[int]:
        """The number of tokens sampled in each turn."""
        mask = self.loss_mask or (1,) * len(self.token_ids)
        return [sum(run) for is_sampled, run in groupby(mask) if is_sampled]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, for `from_dict`."""
        experts = self.routed_experts
        return asdict(self) | {"routed_experts": None if experts is None else experts.tolist()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Episode":
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        if values.get("routed_experts") is not None:
            values["routed_experts"] = torch.tensor(values["routed_experts"], dtype=torch.int16)
        return cls(**values)


# ---- training ----


@dataclass(frozen=True, eq=False)
class TrainingSample:
    """One sequence to learn from. Tensors are 1-D with n slots, see `LossInputs` and the module's docstring.

    logprobs: log-probs under the generator's policy; ignored where loss_mask is 0.
    old_logprobs: None takes the log-probs of the current forward pass.
    old_values, returns: only with a critic.
    weights: weight of each token's loss; None lets the batcher compute weights from `agg_mode`.
    routed_experts: [n, L, k], k experts in each of L MoE layers; None lets the routers choose.
    """

    token_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    logprobs: Tensor
    advantages: Tensor
    ref_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    weights: Tensor | None = None
    routed_experts: Tensor | None = None
    group_id: int = 0

    def __post_init__(self) -> None:
        tokens, experts = self.token_ids, self.routed_experts
        if tokens.dim() != 1 or not len(tokens):
            raise ValueError(
                f"token_ids of a sample must be 1-D and not empty, got shape {list(tokens.shape)}; "
                "pass all tokens of a sequence but the last, at least one"
            )
        if experts is not None and (experts.dim() != 3 or len(experts) != len(tokens)):
            raise ValueError(
                f"routed_experts of a sample must have the shape [{len(tokens)} input tokens, MoE layers, "
                f"experts per token], got {list(experts.shape)}; leave out the experts of the last label"
            )
        for name, value in vars(self).items():
            is_per_token = isinstance(value, Tensor) and name != "routed_experts"
            if is_per_token and value.shape != tokens.shape:
                raise ValueError(
                    f"{name} of a sample must have one entry per input token, {list(tokens.shape)}, got "
                    f"{list(value.shape)}; leave out the last input token and the first label"
                )
        in_loss = self.loss_mask == 1
        if not (in_loss | (self.loss_mask == 0)).all():
            raise ValueError(
                f"loss_mask of a sample must be 0 or 1, got {self.loss_mask.unique().tolist()[:8]}; "
                "put factors of the tokens' losses into weights"
            )
        if (in_loss & (self.labels == IGNORE_INDEX)).any():
            raise ValueError(
                f"labels of a sample must be token ids where loss_mask is 1, got {IGNORE_INDEX} there; "
                "set loss_mask to 0 for tokens that are not in the loss"
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def from_sequence(
        cls,
        prompt_token_ids: Sequence[int],
        token_ids: Sequence[int],
        token_logprobs: Sequence[float],
        advantage: float,
        *,
        loss_mask: Sequence[float] | None = None,
        ref_logprobs: Sequence[float] | None = None,
        routed_experts: Tensor | None = None,
        group_id: int = 0,
    ) -> "TrainingSample":
        """Return the sample of a prompt and the tokens after it; prompt tokens are not in the loss.

        loss_mask: one per token of `token_ids`; 0 if not sampled, such as an environment's reply.
        Raises ValueError for an empty prompt or completion, and for missing log-probs.
        """
        n_prompt, n_new = len(prompt_token_ids), len(token_ids)
        if not n_prompt or not n_new or len(token_logprobs) != n_new:
            raise ValueError(
                "a sample needs prompt tokens, and sampled tokens with one log-prob each, got "
                f"{n_prompt} and {n_new} tokens, {len(token_logprobs)} log-probs; leave out empty completions"
            )

        def after_prompt(values: Sequence[float]) -> Tensor:
            return torch.tensor([0.0] * (n_prompt - 1) + list(values))

        tokens = torch.tensor([*prompt_token_ids, *token_ids])
        return cls(
            token_ids=tokens[:-1],
            labels=tokens[1:],
            loss_mask=after_prompt([1.0] * n_new if loss_mask is None else loss_mask),
            logprobs=after_prompt(token_logprobs),
            advantages=after_prompt([advantage] * n_new),
            ref_logprobs=None if ref_logprobs is None else after_prompt(ref_logprobs),
            routed_experts=routed_experts,
            group_id=group_id,
        )

    @classmethod
    def from_episode(cls, episode: Episode) -> "TrainingSample":
        """Return the sample of an episode; raises ValueError if its advantage is not known."""
        if episode.advantage is None:
            raise ValueError(
                f"an episode of group {episode.group_id} has no advantage yet; estimate it first"
            )
        return cls.from_sequence(
            episode.prompt_token_ids,
            episode.token_ids,
            episode.token_log_probs,
            episode.advantage,
            loss_mask=episode.loss_mask,
            ref_logprobs=episode.ref_logprobs,
            routed_experts=episode.routed_experts,
            group_id=episode.group_id,
        )


class Slot(NamedTuple):
    """The slots of a sample in a microbatch.

    sample: index of the sample in the batch. row, columns [n]: indices of the sample's n slots.
    number: index of the sample among the samples in its row.
    """

    sample: int
    row: int
    columns: Tensor
    number: int


class LossInputs(TypedDict, total=False):
    """The tensors of one microbatch, for the engine and for losses: B rows of T (with cp: T/cp) slots.

    An optional tensor is missing if no sample has it. A loss reads entries by name: `batch["advantages"]`.

    input: int64 token ids [B, T]; 0 in padding.
    labels: int64 token ids [B, T]; IGNORE_INDEX in padding, and where a sample's loss_mask is 0 (unless
        the batcher has `scores_masked`).
    positions: int64 [B, T], counted from 0 in each sequence; -1 in padding.
    sequence_ids: int64 [B, T], the sample's index in its row; -1 in padding. If samples share a slot, the
        index of the sample that scores the slot.
    loss_mask: fp32 [B, T], 1 for tokens in the loss, else 0.

    The tensors from loss_weights to returns are fp32 [B, T], and 0 for tokens that are not in the loss.
    Log-probs are in nats; advantages, old_values and returns are in units of the reward.

    loss_weights: the batch's loss is the sum of weight * loss over tokens.
    generator_logprobs: log-probs under the policy that sampled the tokens.
    ref_logprobs: log-probs under the reference policy.
    old_logprobs, old_values: the trainer's log-probs and the critic's values when the step began.
    returns: the critic's targets.
    routed_experts: int16 [B, T, L, k], k experts in each of L MoE layers; -1 in padding, and where the
        routers choose.
    document_ids, parent_ids: int64 [B, T], only if samples share slots; see `batch.trees`.
    models: the model index of each row, ascending; padding rows have the last model's index. Missing if
        there is only one model.
    """

    input: Required[Tensor]
    labels: Required[Tensor]
    positions: Required[Tensor]
    sequence_ids: Required[Tensor]
    loss_mask: Required[Tensor]
    loss_weights: Required[Tensor]
    generator_logprobs: Required[Tensor]
    advantages: Required[Tensor]
    ref_logprobs: Tensor
    old_logprobs: Tensor
    old_values: Tensor
    returns: Tensor
    routed_experts: Tensor
    document_ids: Tensor
    parent_ids: Tensor
    models: list[int]


@dataclass(frozen=True, eq=False)
class TrainingMicrobatch:
    """The rows of one rank in one forward pass. slots: one per sample; empty if all rows are padding."""

    inputs: LossInputs
    slots: tuple[Slot, ...] = ()

    def per_sample(self, values: Tensor, *, only_own: bool = False) -> dict[int, Tensor]:
        """Split values [B, T, ...] by sample; return a dict from sample index to values [n, ...].

        only_own: if samples share a slot, only the sample that scores the slot gets its value; the
            other samples get 0.
        """
        found = {s.sample: values[s.row, s.columns] for s in self.slots}
        if only_own and "parent_ids" in self.inputs:
            ids = self.inputs["sequence_ids"]
            for s in self.slots:
                found[s.sample][ids[s.row, s.columns] != s.number] = 0
        return found


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """The microbatches of all ranks, made from the samples of one `Batcher.batch` call.

    microbatches: indexed by microbatch, then by data-parallel rank.
    num_global_valid_tokens: number of tokens in the loss.
    num_measured_tokens: number of tokens in the loss without skipped samples; metrics are means over them.
    num_samples: number of samples in the call.
    denominator: this batch's part of the step's loss denominator, see `aggregation_weights`; None if
        `loss_weights` are divided already.
    oversize: indices of the samples that did not fit a row.
    num_skipped: number of samples left out because their advantage is 0; denominators count them.
    scores_masked: as in `Batcher`.
    """

    microbatches: tuple[tuple[TrainingMicrobatch, ...], ...]
    num_global_valid_tokens: int
    num_measured_tokens: int
    num_samples: int
    denominator: float | None = None
    oversize: tuple[int, ...] = ()
    num_skipped: int = 0
    scores_masked: bool = False

    @property
    def of_all_ranks(self) -> list[TrainingMicrobatch]:
        return [cell for of_ranks in self.microbatches for cell in of_ranks]

    @property
    def slots_per_token(self) -> float:
        """The ratio of slots (padding included) to the samples' tokens; 1 without padding and sharing."""
        n_tokens = sum(len(slot.columns) for cell in self.of_all_ranks for slot in cell.slots)
        return sum(cell.inputs["labels"].numel() for cell in self.of_all_ranks) / max(n_tokens, 1)

    def sample_advantages(self) -> list[float]:
        """Return the mean advantage of each sample, 0 for skipped samples. The order is unspecified."""
        means = [0.0] * self.num_skipped
        for cell in self.of_all_ranks:
            masks = cell.per_sample(cell.inputs["loss_mask"], only_own=True)
            for sample, advantages in cell.per_sample(cell.inputs["advantages"]).items():
                in_loss = advantages[masks[sample] != 0]
                if len(in_loss):
                    means.append(in_loss.mean().item())
        return means

    def of_rank(self, dp_rank: int) -> list[TrainingMicrobatch]:
        """Return the microbatches of one data-parallel rank, in order."""
        return [of_ranks[dp_rank] for of_ranks in self.microbatches]


@dataclass(frozen=True)
class OptimParams:
    """Optimizer settings for one step; None takes the config's value.

    Raises ValueError for numbers that are out of range.
    """

    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    max_norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {value}; correct it")
        betas = (0.9, 0.95) if self.betas is None else self.betas
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"betas must be two numbers of at least 0 and below 1, got {betas}; (0.9, 0.95) is usual"
            )
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"max_norm must be above 0, got {self.max_norm}; inf clips nothing")


@dataclass(frozen=True, eq=False)
class ForwardBackwardOutput:
    """Results of a forward-backward pass, over all ranks.

    loss: the weighted sum over all samples.
    logprobs: log-probs of the labels, one 1-D tensor per sample, in the order of the samples; None for a
        sample that fits no row. The list is None unless the call set `return_logprobs`.
    """

    loss: float
    metrics: dict[str, float]
    logprobs: list[Tensor | None] | None = None


@dataclass(frozen=True)
class OptimStepOutput:
    """The result of an optimizer step.

    policy_version: version of the weights after the step. grad_norm: norm before clipping.
    skipped: True if the gradient norm was not finite; then the weights are unchanged.
    metrics: "loss", and the metrics of the loss, over the whole step.
    """

    policy_version: int
    grad_norm: float
    lr: float
    skipped: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
