"""Distillation: a student's divergence from a teacher, without whole logits of either.

z [V] are a token's logits by the student, u by the teacher; T is the temperature, p = softmax(z / T),
q = softmax(u / T):

    forward  KL(q || p) = sum_j q_j (log q_j - log p_j)    d/dz_j = (p_j - q_j) / T
    reverse  KL(p || q) = sum_j p_j (log p_j - log q_j)    d/dz_j = p_j (log p_j - log q_j - KL) / T

In the loss the divergence is multiplied by T^2, so that its gradient is about as large for every T. Forward,
and T^2: Hinton et al. 2015, arXiv:1503.02531, section 2.1. Reverse: Gu et al. 2024, arXiv:2306.08543, eq. 1.

From the teacher's k most probable tokens, the divergence is that of k + 1 outcomes: these tokens, and any
other token, with probabilities p_r and q_r. It is at most the divergence over all tokens, by the log sum
inequality (Cover and Thomas 2006, theorem 2.7.1), and equal for k = V. d/dz_j is p_j / p_r times the formula
for p_r and q_r if j is another token.

B rows, T tokens, M and M_t model dims of student and teacher, V vocabulary entries, v = V / tp entries on
this rank; n tokens in a chunk, N tokens in all chunks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.loss.chunked_logits import (
    Gradients,
    Operands,
    check_chunk,
    chunks_of,
    gradient_of_loss,
    hide_entries_,
    in_fp32,
    log_of_sum,
    logits_of,
    maybe_compiled,
    of_all_ranks,
    operands_of,
    over_ranks,
    statistics_of_logits,
)
from torchtitan.numerics.linear import linear
from torchtitan.numerics.low_rank import LowRank


class Distilled(NamedTuple):
    """Scalars, at least fp32. loss: the weighted sum over tokens, with a gradient. kl, label_loss: sums over
    labels of the divergence and of the cross entropy, without weights, T^2 and gradient."""

    loss: Tensor
    kl: Tensor
    label_loss: Tensor


class TeacherStates:
    """A head for the teacher: returns hidden states [B, T, M_t], and keeps its constant output weight.

    weight: this rank's rows of the student's vocabulary, [v, M_t], from the first call on.
    n_student: the student's vocabulary entries V.
    """

    def __init__(self, n_student: int):
        self.n_student = n_student
        self.weight: Tensor | None = None

    def __call__(
        self,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        labels: Tensor,
        group: dist.ProcessGroup | None = None,
        low_rank: LowRank | None = None,
    ) -> Tensor:
        assert bias is None and low_rank is None, (
            "no family has a bias here, and a teacher no adapter"
        )
        operands, _ = operands_of(h, weight, bias, labels, group, low_rank)
        if self.weight is None:
            # Copied, because FSDP frees a gathered weight. The ranks' rows are others than the student's
            # if the vocabularies are padded differently.
            rank = 0 if group is None else dist.get_rank(group)
            n_own = self.n_student // (1 if group is None else dist.get_world_size(group))
            rows = of_all_ranks(operands.weight, group).flatten(0, 1)[rank * n_own :][:n_own]
            self.weight = rows.new_zeros(n_own, rows.shape[1])
            self.weight[: len(rows)] = rows
        return operands.x.view_as(h)


@dataclass(frozen=True, eq=False)
class DistillationLoss:
    """A head: sums kl_weight * T^2 * KL + label_weight * cross entropy over the labels, to `Distilled`.

    temperature_of_kl: T; the cross entropy is at temperature 1.
    teacher: the batch's entry, or its name: hidden states [B, T, M_t] of `teacher_states`, or without it
        [B, T, 2 k + 1] of `TopTokens(T, k=k, with_rest=True)`.
    n_entries: the first entries of the vocabulary, which alone have a probability in the divergence: for
        models that pad one vocabulary to different sizes. None: all entries.
    weights: the batch's entry [B, T], or its name, that multiplies a token's loss; None: 1.
    chunk_tokens, compile_backend: as in `TokenLogProbs`. A chunk stores about five tensors [n, v] in fp32.
    Raises ValueError for settings out of range, and for an entry that the batch lacks.
    """

    temperature: ClassVar[float] = 1.0
    product = staticmethod(linear)

    divergence: Literal["forward", "reverse"] = "forward"
    kl_weight: float = 1.0
    label_weight: float = 0.0
    temperature_of_kl: float = 1.0
    teacher: str | Tensor = "teacher"
    teacher_states: TeacherStates | None = None
    n_entries: int | None = None
    weights: str | Tensor | None = None
    chunk_tokens: int | None = None
    compile_backend: str | None = None

    def __post_init__(self) -> None:
        check_chunk("DistillationLoss", self.chunk_tokens)
        if self.divergence not in ("forward", "reverse"):
            raise ValueError(f"divergence must be 'forward' or 'reverse', got {self.divergence!r}")
        weights, temperature = (self.kl_weight, self.label_weight), self.temperature_of_kl
        if min(weights) < 0 or not sum(weights) > 0 or not temperature > 0:
            raise ValueError(
                "distillation needs kl_weight and label_weight of at least 0, one of them above 0, and a "
                f"temperature above 0, got {weights[0]}, {weights[1]} and {temperature}"
            )

    def with_batch(self, batch: Mapping[str, Any]) -> Self:
        """Return the head for one batch: entries that are given by name are looked up in the batch."""
        given = {"teacher": self.teacher, "weights": self.weights}
        names = {key: name for key, name in given.items() if isinstance(name, str)}
        if missing := [name for name in names.values() if name not in batch]:
            raise ValueError(
                f"distillation needs {' and '.join(missing)} in the batch, got {sorted(batch)}; score the "
                "batch with the teacher before the student's step"
            )
        return replace(self, **{key: batch[name] for key, name in names.items()})

    def __call__(
        self,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        labels: Tensor,
        group: dist.ProcessGroup | None = None,
        low_rank: LowRank | None = None,
    ) -> Distilled:
        """The arguments are those of `TokenLogProbs`. Collective if there is a group."""
        operands, call = operands_of(h, weight, bias, labels, group, low_rank)
        assert isinstance(self.teacher, Tensor), "with_batch was not called"
        weights = (labels != IGNORE_INDEX).to(torch.promote_types(h.dtype, torch.float32))
        if isinstance(self.weights, Tensor):
            weights = weights * self.weights
        own = labels.flatten(), self.teacher.flatten(0, 1), weights.flatten()
        with torch.autocast(h.device.type, enabled=False):
            return Distilled(*_SummedDistillation.apply(*operands, *own, self, call))


class _SummedDistillation(torch.autograd.Function):
    """(operands, labels [N], teacher [N, ...], weights [N]) -> the scalars of `Distilled`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, labels, teacher, weights, head, call = args
        operands = Operands(*tensors)
        gradients = Gradients(operands, ctx.needs_input_grad[: len(operands)], call.scale)
        statistics_of = maybe_compiled(statistics_of_logits, head.compile_backend)
        gradient_of = maybe_compiled(gradient_of_loss, head.compile_backend)
        sums = [torch.zeros(3, device=labels.device)]
        for chunk in chunks_of(operands.x, head, call):
            of_chunk, of_teacher = labels[chunk.rows], teacher[chunk.rows]
            own_labels, is_ignored = of_chunk - call.first, of_chunk == IGNORE_INDEX
            logits, _, low_rank = logits_of(operands, head, call, chunk)
            compare = _compare_top if head.teacher_states is None else _compare_all
            kl, gradient_of_kl = compare(logits, of_teacher, head, call)
            # Not compiled, `statistics_of_logits` overwrites its logits by the exponentials.
            exps = logits if head.compile_backend else logits.clone()
            statistics = statistics_of(exps, 1.0, own_labels, False)
            top, total, logprobs, _ = over_ranks(statistics, of_chunk, call.group)
            kl = kl.masked_fill(is_ignored, 0)
            of_kl = head.kl_weight * head.temperature_of_kl * weights[chunk.rows]
            of_label = head.label_weight * weights[chunk.rows]
            loss = (of_kl * head.temperature_of_kl * kl).sum() - (of_label * logprobs).sum()
            sums.append(torch.stack((loss, kl.sum(), -logprobs.sum())))
            if any(gradients.wanted):
                grad_logits = gradient_of_kl().mul_(of_kl[:, None])
                if head.label_weight:
                    scale = ((statistics[:, 0] - top).exp() / total).masked_fill(is_ignored, 0)
                    of_labels = gradient_of(exps, statistics[:, 0], scale, own_labels, is_ignored)
                    grad_logits = grad_logits.add_(of_labels * of_label[:, None])
                    del of_labels
                gradients.add(chunk, grad_logits, low_rank)
                del grad_logits
            del logits, exps, gradient_of_kl  # before the next chunk's exist
        ctx.save_for_backward(*gradients.sums())
        loss, kl, label_loss = (x.clone() for x in torch.stack(sums).sum(0))
        ctx.mark_non_differentiable(kl, label_loss)
        return loss, kl, label_loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple:
        scaled = [None if t is None else t * grad for t in ctx.saved_tensors]
        return *scaled, None, None, None, None, None


# ---- divergences: (KL [n], a function that returns T d KL / d logits, [n, v]) ----


def _compare_all(student: Tensor, states: Tensor, head: DistillationLoss, call: Any) -> tuple:
    """Compare over all tokens. student: logits [n, v]; states: [n, M_t]. Collective if there is a group."""
    logits = student, linear(states, head.teacher_states.weight)
    how = head.temperature_of_kl, _own_entries(head, call, student), head.divergence == "forward"
    numbers = maybe_compiled(_numbers_of_all, head.compile_backend)(*logits, *how)
    high_a, sum_a, high_b, sum_b, dots = of_all_ranks(numbers, call.group).unbind(-1)
    top_a, top_b = high_a.amax(0), high_b.amax(0)
    shift_a, shift_b = high_a - top_a, high_b - top_b
    total_a, total_b = ((s.exp() * x).sum(0) for s, x in ((shift_a, sum_a), (shift_b, sum_b)))
    mean = (shift_a.exp() * (dots + sum_a * (shift_a - shift_b))).sum(0) / total_a
    kl = mean - total_a.log() + total_b.log()
    found = kl, top_a + total_a.log(), top_b + total_b.log()
    gradient = maybe_compiled(_gradient_of_all, head.compile_backend)
    return kl, lambda: gradient(*logits, *how, *found)


def _numbers_of_all(
    student: Tensor, teacher: Tensor, temperature: float, n_own: int, is_forward: bool
) -> Tensor:
    """Return the numbers [n, 5] of KL(a || b) that ranks exchange about logits a and b.

    The highest a; the sum of e = exp(a - highest a); the same two of b; the sum of
    e * ((a - highest a) - (b - highest b)).
    """
    a, b = _a_and_b(student, teacher, temperature, n_own, is_forward)
    high_a, high_b = a.amax(1), b.amax(1)
    a, b = a - high_a[:, None], b - high_b[:, None]
    exps = a.exp()
    return torch.stack(
        (high_a, exps.sum(1), high_b, b.exp().sum(1), (exps * (a - b)).sum(1)), dim=1
    )


def _gradient_of_all(
    student: Tensor,
    teacher: Tensor,
    temperature: float,
    n_own: int,
    is_forward: bool,
    kl: Tensor,
    normalizer_a: Tensor,
    normalizer_b: Tensor,
) -> Tensor:
    a, b = _a_and_b(student, teacher, temperature, n_own, is_forward)
    a, b = a - normalizer_a[:, None], b - normalizer_b[:, None]
    return b.exp() - a.exp() if is_forward else a.exp() * (a - b - kl[:, None])


def _a_and_b(
    student: Tensor, teacher: Tensor, temperature: float, n_own: int, is_forward: bool
) -> tuple[Tensor, Tensor]:
    a, b = (_divided(x, temperature, n_own) for x in (student, teacher))
    return (b, a) if is_forward else (a, b)


def _compare_top(student: Tensor, top: Tensor, head: DistillationLoss, call: Any) -> tuple:
    """Compare over the tokens of `top`, [n, 2 k + 1], and any other token. Collective if there is a group."""
    k = top.shape[1] // 2
    ids = top[:, :k].long() - call.first
    of_teacher = top[:, k:]  # log-probabilities [n, k + 1]
    how = head.temperature_of_kl, _own_entries(head, call, student)
    numbers = maybe_compiled(_numbers_of_top, head.compile_backend)(student, ids, *how)
    highest, others, chosen = of_all_ranks(numbers, call.group).split((1, 1, k), dim=-1)
    highest_of_all, chosen = highest.amax(0), chosen.sum(0)
    others = ((highest - highest_of_all).exp() * others).sum(0)
    outcomes = torch.cat((chosen - highest_of_all, log_of_sum(others)), dim=1)
    normalizer = outcomes.logsumexp(1, keepdim=True)
    of_student = outcomes - normalizer
    a, b = of_student, of_teacher
    if head.divergence == "forward":
        a, b = b, a
    kl = (a.exp() * (a - b)).sum(1)
    if head.divergence == "forward":
        of_outcomes = b.exp() - a.exp()
    else:
        of_outcomes = a.exp() * (a - b - kl[:, None])
    of_others = of_outcomes[:, k:] / of_student[:, k:].exp()
    found = normalizer + highest_of_all, of_others, of_outcomes[:, :k]
    gradient = maybe_compiled(_gradient_of_top, head.compile_backend)
    return kl, lambda: gradient(student, ids, *how, *found)


def _numbers_of_top(student: Tensor, ids: Tensor, temperature: float, n_own: int) -> Tensor:
    """Return the numbers [n, 2 + k] that ranks exchange about logits z [n, v].

    The highest; the sum of exp(z - highest) of tokens that are not in ids; the logits of ids, 0 if
    another rank has them.
    """
    z = _divided(student, temperature, n_own)
    highest = z.amax(1, keepdim=True)
    others, index, is_elsewhere = _without((z - highest).exp(), ids)
    chosen = z.gather(1, index).masked_fill(is_elsewhere, 0)
    return torch.cat((highest, others.sum(1, keepdim=True), chosen), dim=1)


def _gradient_of_top(
    student: Tensor,
    ids: Tensor,
    temperature: float,
    n_own: int,
    normalizer: Tensor,
    of_others: Tensor,
    of_ids: Tensor,
) -> Tensor:
    z = _divided(student, temperature, n_own)
    gradient, index, is_elsewhere = _without((z - normalizer).exp() * of_others, ids)
    return gradient.scatter_add_(1, index, of_ids.to(z.dtype).masked_fill(is_elsewhere, 0))


def _without(exps: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exps [n, v] with 0 in the columns `ids` of this rank; the columns, and which ids others have."""
    is_elsewhere = (ids < 0) | (ids >= exps.shape[1])
    index = ids.masked_fill(is_elsewhere, 0)
    # Not `scatter`: the column 0, which stands for other ranks' ids, may be one of the ids.
    own = exps.gather(1, index).masked_fill(is_elsewhere, 0)
    return exps.scatter_add_(1, index, -own), index, is_elsewhere


def _divided(logits: Tensor, temperature: float, n_own: int) -> Tensor:
    return hide_entries_(in_fp32(logits, temperature, copy=True), n_own)


def _own_entries(head: DistillationLoss, call: Any, logits: Tensor) -> int:
    """Return how many of this rank's entries are among the head's `n_entries`."""
    return logits.shape[1] if head.n_entries is None else max(0, head.n_entries - call.first)
