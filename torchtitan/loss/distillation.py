"""Distillation: a student's divergence from a teacher, without storing the whole logits of either model.

z [V] are the student's logits of a token, u [V] the teacher's logits. With the temperature t,
p = softmax(z / t) and q = softmax(u / t):

    forward  KL(q || p) = sum_j q_j (log q_j - log p_j)    d/dz_j = (p_j - q_j) / t
    reverse  KL(p || q) = sum_j p_j (log p_j - log q_j)    d/dz_j = p_j (log p_j - log q_j - KL) / t

The loss multiplies the divergence by t^2, so its gradient is about as large for every t. Sources: forward and t^2,
Hinton et al. 2015, arXiv:1503.02531, section 2; reverse, Gu et al. 2024, arXiv:2306.08543, eq. 1.

If only the teacher's k most probable tokens are known, the divergence is over k + 1 outcomes: these k tokens,
and the rest of the vocabulary together, with probabilities p_r and q_r. It is at most the divergence over all
tokens, by the log sum inequality (Cover and Thomas 2006, theorem 2.7.1), and equal for k = V. For a token j of
the rest, d/dz_j is p_j / p_r times the formula above with p_r and q_r.

B rows, T tokens, M and M_t model dims of student and teacher, V vocabulary entries, v = V / tp entries on
this rank; n tokens in a chunk, N tokens in all chunks. A `Divergence` is a pair: KL [n], and a function that
returns t * d KL / d logits, [n, v].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.loss.chunked_logits import (
    Call,
    ChunkedHead,
    Operands,
    SummedLoss,
    hide_entries_,
    log_of_sum,
    of_all_ranks,
)
from torchtitan.loss.logprobs import TokenLogProbs
from torchtitan.numerics.linear import cap_logits, linear

Divergence = tuple[Tensor, Callable[[], Tensor]]


class Distilled(NamedTuple):
    """loss: the weighted sum over tokens, a scalar with a gradient. kl, label_loss: the divergence and the cross
    entropy, summed over tokens whose label is not ignored, without weights, t^2 and gradient. logprobs,
    entropy: see `TokenOutputs`."""

    loss: Tensor
    kl: Tensor
    label_loss: Tensor
    logprobs: Tensor | None = None
    entropy: Tensor | None = None


class TeacherStates(ChunkedHead[Tensor]):
    """A head for the teacher: returns its hidden states [B, T, M_t], and keeps its output weight.

    weight: rows of the teacher's output weight for this rank's v entries, [v, M_t]; set by the first call.
    n_student: V, the size of the student's vocabulary.
    """

    def __init__(self, n_student: int):
        self.n_student = n_student
        self.weight: Tensor | None = None
        self.cap: float | None = None

    def compute(self, operands: Operands, call: Call, labels: Tensor) -> Tensor:
        if self.weight is None:
            self.cap = call.cap
            # If teacher and student pad the vocabulary to different sizes, their shards differ. Keep the
            # entries that this rank holds in the student.
            of_ranks = of_all_ranks(operands.weight, call.group)
            n_own = self.n_student // len(of_ranks)
            first = call.first // len(operands.weight) * n_own
            own = of_ranks.flatten(0, 1)[first : first + n_own]
            # `pad` copies, because FSDP frees the teacher's weight.
            self.weight = F.pad(own, (0, 0, 0, n_own - len(own)))
        return operands.x.view(*labels.shape, -1)


@dataclass(frozen=True, eq=False)
class DistillationLoss(ChunkedHead[Distilled]):
    """A head: sums kl_weight * t^2 * KL + label_weight * cross entropy over tokens, to `Distilled`.

    The batch's "teacher" is the teacher's hidden states [B, T, M_t] if there are `states`, else the result
    [B, T, 2 k + 1] of `TopTokens(t, k=k, with_rest=True)`. The batch's "loss_weights" [B, T], if any,
    multiply each token's loss.

    temperature_of_kl: t; the cross entropy is at temperature 1.
    n_entries: number of vocabulary entries in the divergence, if the models pad the vocabulary to different
        sizes; later entries get probability 0. None: all entries.
    chunk_tokens: as in `TokenLogProbs`; a chunk stores about six tensors [n, v] in fp32.
    of_tokens: a second head, for the logprobs and entropy of `Distilled`; None leaves both out.
    """

    divergence: Literal["forward", "reverse"] = "forward"
    kl_weight: float = 1.0
    label_weight: float = 0.0
    temperature_of_kl: float = 1.0
    states: TeacherStates | None = None
    n_entries: int | None = None
    chunk_tokens: int | None = None
    of_tokens: TokenLogProbs | None = None
    teacher: Tensor | None = None  # this and `weights` are set by `with_batch`
    weights: Tensor | None = None

    def with_batch(self, batch: Mapping[str, Any]) -> Self:
        return replace(self, teacher=batch["teacher"], weights=batch.get("loss_weights"))

    def compute(self, operands: Operands, call: Call, labels: Tensor) -> Distilled:
        assert self.teacher is not None, "with_batch was not called"
        of_tokens, temperature = labels.flatten(), self.temperature_of_kl
        is_ignored, scores = of_tokens == IGNORE_INDEX, self.teacher.flatten(0, 1)
        weights = (~is_ignored).to(torch.promote_types(operands.x.dtype, torch.float32))
        weights = weights if self.weights is None else weights * self.weights.flatten()
        # The cross entropy is KL(q || p), where q is 1 for the label and 0 for the rest.
        certain = log_of_sum(weights.new_tensor([[1.0, 0.0]]))

        def loss_of(logits: Tensor, rows: slice) -> tuple[Tensor, Callable[[], Tensor]]:
            kl, gradient_of_kl = self._compare(logits, scores[rows], call)
            given = _log_probs(logits, call), of_tokens[rows, None], certain
            ce, gradient_of_ce = _divergence_of_top(*given, True, call)
            kl, ce = (x.masked_fill(is_ignored[rows], 0) for x in (kl, ce))
            of_kl, of_label = (
                factor * weights[rows]
                for factor in (self.kl_weight * temperature, self.label_weight)
            )
            loss = of_kl * temperature * kl + of_label * ce

            def gradient() -> Tensor:
                result = gradient_of_kl().mul_(of_kl[:, None])
                if self.label_weight:
                    result.add_(gradient_of_ce().mul_(of_label[:, None]))
                return result

            return torch.stack((loss, kl, ce)).sum(1), gradient

        sums = SummedLoss.apply(*operands, 3, loss_of, self, call)
        if self.of_tokens is None:
            return Distilled(*sums)
        return Distilled(*sums, *self.of_tokens.compute(operands, call, labels))

    def _compare(self, logits: Tensor, scores: Tensor, call: Call) -> Divergence:
        """Return a chunk's divergence. logits: the student's, [n, v]. scores: rows [n, ...] of "teacher"."""
        how = self.temperature_of_kl, self.n_entries
        log_p, is_forward = _log_probs(logits, call, *how), self.divergence == "forward"
        if self.states is not None:
            logits = cap_logits(linear(scores, self.states.weight), self.states.cap)
            log_q = _log_probs(logits, call, *how)
            return _divergence(log_p, log_q, is_forward, call.group)
        k = scores.shape[1] // 2
        return _divergence_of_top(log_p, scores[:, :k].long(), scores[:, k:], is_forward, call)


def _log_probs(
    logits: Tensor, call: Call, temperature: float = 1.0, n_entries: int | None = None
) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    hide_entries_(logits, n_entries, call)
    return logits - of_all_ranks(logits.logsumexp(1, keepdim=True), call.group).logsumexp(0)


def _divergence(
    log_p: Tensor, log_q: Tensor, is_forward: bool, group: dist.ProcessGroup | None
) -> Divergence:
    """Return the divergence [n], and a function for its gradient.

    log_p, log_q: log-probs [n, v] of this rank's vocabulary entries. Without a group: of all entries, or
        [n, k + 1], of the teacher's top k entries and of all other entries together.
    """
    a, b = (log_q, log_p) if is_forward else (log_p, log_q)
    kl = of_all_ranks((a.exp() * (a - b)).sum(1, keepdim=True), group).sum(0)
    if is_forward:
        return kl[:, 0], lambda: log_p.exp() - log_q.exp()
    return kl[:, 0], lambda: log_p.exp() * (log_p - log_q - kl)


def _divergence_of_top(
    log_p: Tensor, ids: Tensor, log_q: Tensor, is_forward: bool, call: Call
) -> Divergence:
    """Return the divergence. log_p: [n, v]. ids: [n, k] token ids. log_q: [n, k + 1], of ids and the rest."""
    k, ids = ids.shape[1], ids - call.first
    is_elsewhere = (ids < 0) | (ids >= log_p.shape[1])
    ids = ids.masked_fill(is_elsewhere, 0)
    others = log_p.exp()
    # Subtract instead of writing 0: ids on other ranks also point to column 0, and must not change it.
    others.scatter_add_(1, ids, -others.gather(1, ids).masked_fill(is_elsewhere, 0))
    chosen = log_p.gather(1, ids).masked_fill(is_elsewhere, 0)
    of_ranks = of_all_ranks(torch.cat((chosen, others.sum(1, keepdim=True)), dim=1), call.group)
    chosen, rest = of_ranks.sum(0).split((k, 1), dim=1)
    outcomes = torch.cat((chosen, log_of_sum(rest)), dim=1)
    kl, derivative = _divergence(outcomes, log_q, is_forward, None)

    def gradient() -> Tensor:
        of_chosen, of_rest = derivative().to(log_p.dtype).split((k, 1), dim=1)
        of_others = others * (of_rest / outcomes[:, k:].exp())
        return of_others.scatter_add_(1, ids, of_chosen.masked_fill(is_elsewhere, 0))

    return kl, gradient
