"""Log-probabilities and entropies of tokens, without logits of the whole batch.

What training and scoring want of logits [B, T, V] is one number per token, or two. The head below
computes them chunk by chunk of tokens, from hidden states and the output projection's weight, and
backward computes each chunk's logits anew: [chunk, V] is the largest block that exists.

Under tensor parallelism each rank computes with its vocabulary entries; per token, ranks exchange
a few numbers once.

B rows, T tokens, M model dim, V vocabulary entries, v = V / tp of them on this rank; n tokens of a
chunk, N of all chunks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # noqa: F401 (registers operators)
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.distributed.dtensor import is_dtensor
from torchtitan.tools.linear import linear

_OPS = torch.ops._c10d_functional


class TokenOutputs(NamedTuple):
    """What a head returns. A tuple, for hooks of FSDP and DDP look for tensors in tuples.

    logprobs: [B, T] fp32, of the label at each position; 0 where it is IGNORE_INDEX.
    entropy: [B, T] fp32, in nats, of the distribution at every position; None if not asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class TokenLogProbs:
    """A head: turns hidden states into `TokenOutputs` inside a decoder's output projection.

    temperature: logits are divided by it, for the entropy too.
    entropy: whether it is computed; about a tenth slower.
    chunk_tokens: tokens whose logits exist at a time; None is 1,024 on a CPU and 4,096 elsewhere.

    Raises ValueError for a temperature or a chunk that is not positive.
    """

    temperature: float = 1.0
    entropy: bool = False
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ValueError(
                f"TokenLogProbs.chunk_tokens must be at least 1, got {self.chunk_tokens}; 1024 "
                "tokens keep matrix products large"
            )

    def __call__(
        self,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        labels: Tensor,
        group: dist.ProcessGroup | None = None,
    ) -> TokenOutputs:
        """h: [B, T, M]; weight: [V, M]; bias: [V]; labels: [B, T]; all of them plain tensors.

        group: ranks that hold a part of the vocabulary each, in their order: weight is [v, M],
            the rest is alike on all of them. Collective; the gradient of h is one summand.
        """
        n_ranks = 1 if group is None else dist.get_world_size(group)
        _check_labels(labels, h.shape[:-1], n_ranks * weight.shape[0])
        device = h.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            h, weight = h.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        with torch.autocast(device, enabled=False):
            return TokenOutputs(
                *_ProjectedLogProbs.apply(h.flatten(0, -2), weight, bias, labels, self, group)
            )


def token_logprobs(
    logits: Tensor, labels: Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> TokenOutputs:
    """Return the same as a head for logits [B, T, V] that exist already.

    logits: plain, or a DTensor split along V, which stays split: only a few numbers per token are
        exchanged. labels: [B, T], plain. In fp32 whatever the logits' dtype, with no copy of all
        of them in it.
    Raises ValueError for a DTensor that is laid out otherwise.
    """
    _check_temperature(temperature)
    _check_labels(labels, logits.shape[:-1], logits.shape[-1])
    group, first = None, 0
    if is_dtensor(logits):
        group, first = _vocabulary_split(logits)
        logits = logits.to_local()
    return TokenOutputs(
        *_GivenLogProbs.apply(logits.flatten(0, -2), labels, temperature, entropy, first, group)
    )


def _vocabulary_split(logits: Any) -> tuple[dist.ProcessGroup | None, int]:
    """The ranks over which a DTensor's last dim is spread, and this rank's first entry."""
    mesh, placements = logits.device_mesh, logits.placements
    if mesh.ndim != 1 or not (
        placements[0].is_shard(logits.ndim - 1) or placements[0].is_shard(-1)
    ):
        raise ValueError(
            f"token_logprobs takes logits that are split along the vocabulary on a one-dimensional "
            f"mesh, got placements {placements} for shape {list(logits.shape)}; give "
            "logits.full_tensor()"
        )
    per_rank = -(-logits.shape[-1] // mesh.size())
    return mesh.get_group(), per_rank * mesh.get_local_rank()


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(
            f"the temperature of log-probabilities must be above 0, got {temperature}; greedy "
            "choices have no distribution, score them with temperature = 1"
        )


def _check_labels(labels: Tensor, shape: torch.Size, n_entries: int) -> None:
    """n_entries: of the vocabulary, on all ranks."""
    if labels.shape != shape:
        raise ValueError(
            f"labels must have one entry per token, {list(shape)}, got {list(labels.shape)}"
        )
    is_label = ((labels >= 0) & (labels < n_entries)) | (labels == IGNORE_INDEX)
    rule = f"labels must be in [0, {n_entries}) or {IGNORE_INDEX}, which counts nowhere"
    if labels.device.type != "cpu":
        torch._assert_async(is_label.all(), rule)  # without waiting for the device
    elif not is_label.all():
        raise ValueError(f"{rule}, got {labels[~is_label].unique().tolist()[:8]}")


# ---- forward and backward ----


class _ProjectedLogProbs(torch.autograd.Function):
    """(h [N, M], weight [v, M], bias [v], labels [B, T]) -> (logprobs, entropy or None) [B, T]"""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        head: TokenLogProbs,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor | None]:
        first = 0 if group is None else weight.shape[0] * dist.get_rank(group)
        logprobs, entropy, log_normalizer = _log_probabilities(
            lambda rows: _scaled_logits(h[rows], weight, bias, head.temperature),
            labels,
            first,
            head.entropy,
            head.chunk_tokens or _chunk_tokens(h),
            group,
        )
        ctx.save_for_backward(h, weight, bias, labels, log_normalizer, entropy)
        ctx.head, ctx.first = head, first
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple:
        h, weight, bias, *of_tokens = ctx.saved_tensors
        labels, log_normalizer, entropy, grad, grad_entropy = _flattened(
            *of_tokens, grad, grad_entropy
        )
        wants_h, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        head = ctx.head
        grad_h = torch.empty_like(h) if wants_h else None
        grad_weight = _Sum(weight) if wants_weight else None
        grad_bias = _Sum(bias) if wants_bias else None
        with torch.autocast(h.device.type, enabled=False):
            for rows in _chunks(len(labels), head.chunk_tokens or _chunk_tokens(h)):
                grad_logits = _gradient_of_logits(
                    _scaled_logits(h[rows], weight, bias, head.temperature),
                    labels[rows],
                    ctx.first,
                    log_normalizer[rows],
                    None if entropy is None else entropy[rows],
                    None if grad is None else grad[rows] / head.temperature,
                    None if grad_entropy is None else grad_entropy[rows] / head.temperature,
                ).to(h.dtype)
                if wants_h:
                    grad_h[rows] = linear(grad_logits, weight.t())
                if wants_weight:
                    grad_weight.add_product(grad_logits.t(), h[rows])
                if wants_bias:
                    grad_bias.add(grad_logits.sum(0))
                del grad_logits  # or two chunks' would exist
        return (
            grad_h,
            grad_weight.value() if wants_weight else None,
            grad_bias.value() if wants_bias else None,
            None,
            None,
            None,
        )


class _GivenLogProbs(torch.autograd.Function):
    """(logits [N, v], labels [B, T]) -> (logprobs, entropy or None) [B, T]"""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        temperature: float,
        wants_entropy: bool,
        first: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor | None]:
        logprobs, entropy, log_normalizer = _log_probabilities(
            lambda rows: _in_fp32(logits[rows], copy=True).div_(temperature),
            labels,
            first,
            wants_entropy,
            _chunk_tokens(logits),
            group,
        )
        ctx.save_for_backward(logits, labels, log_normalizer, entropy)
        ctx.temperature, ctx.first = temperature, first
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple:
        logits, *of_tokens = ctx.saved_tensors
        labels, log_normalizer, entropy, grad, grad_entropy = _flattened(
            *of_tokens, grad, grad_entropy
        )
        grad_logits = torch.empty_like(logits)
        for rows in _chunks(len(labels), _chunk_tokens(logits)):
            grad_logits[rows] = _gradient_of_logits(
                _in_fp32(logits[rows], copy=True).div_(ctx.temperature),
                labels[rows],
                ctx.first,
                log_normalizer[rows],
                None if entropy is None else entropy[rows],
                None if grad is None else grad[rows] / ctx.temperature,
                None if grad_entropy is None else grad_entropy[rows] / ctx.temperature,
            )
        return grad_logits, None, None, None, None, None


def _chunk_tokens(of_tokens: Tensor) -> int:
    # Each chunk adds a gradient of the whole weight to a sum in fp32: accelerators, which multiply
    # fast and have memory for [4096, V], would spend much of the time there with small chunks.
    return 1024 if of_tokens.device.type == "cpu" else 4096


def _chunks(n_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, n_tokens, chunk_tokens):
        yield slice(start, min(start + chunk_tokens, n_tokens))


def _flattened(*of_tokens: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.flatten() for x in of_tokens]


def _in_fp32(x: Tensor, copy: bool = False) -> Tensor:
    """fp32, or fp64 if it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=copy)


def _scaled_logits(h: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """[n, v] in fp32, a tensor of its own."""
    logits = _in_fp32(linear(h, weight, bias))
    return logits if temperature == 1 else logits.div_(temperature)


def _log_probabilities(
    logits_of: Callable[[slice], Tensor],
    labels: Tensor,
    first: int,
    wants_entropy: bool,
    chunk_tokens: int,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (logprobs, entropy or None, log of the normalizer), [B, T] each.

    logits_of: rows -> their logits [n, v], which are overwritten. first: the vocabulary entry
    that this rank's logits begin with.
    """
    own_labels = labels.flatten() - first
    statistics = torch.cat(
        [
            _statistics(logits_of(rows), own_labels[rows], wants_entropy)
            for rows in _chunks(len(own_labels), chunk_tokens)
        ]
        or [torch.zeros(0, 4, device=labels.device)]
    )
    n_ranks = 1
    if group is not None:
        n_ranks = dist.get_world_size(group)
        statistics = _OPS.wait_tensor(
            _OPS.all_gather_into_tensor(statistics, n_ranks, group.group_name)
        )
    # No views leave here: FSDP's hooks on outputs don't like them.
    highest, sums, label_logits, dots = statistics.view(n_ranks, *labels.shape, 4).unbind(-1)
    top = highest.amax(0)
    # From each rank's highest logit to the highest of all.
    shift = highest - top
    scale = shift.exp()
    total = (scale * sums).sum(0)
    # Differences to the highest logit, for sums of large numbers would lose digits.
    logprobs = (label_logits.sum(0) - top) - total.log()
    logprobs = logprobs.masked_fill(labels == IGNORE_INDEX, 0)
    entropy = None
    if wants_entropy:
        entropy = total.log() - (scale * (dots + sums * shift)).sum(0) / total
    return logprobs, entropy, top + total.log()


def _statistics(logits: Tensor, own_labels: Tensor, wants_entropy: bool) -> Tensor:
    """What ranks have to know of each other's logits z [n, v], which are overwritten: [n, 4].

    Their maximum; the sum of e = exp(z - maximum); the label's logit, 0 if it is elsewhere; the
    sum of e * (z - maximum), 0 if no entropy is wanted.
    """
    index, is_elsewhere = _own_index(own_labels, logits.shape[1])
    label_logits = logits.gather(1, index).squeeze(1).masked_fill_(is_elsewhere, 0)
    highest = logits.amax(1)
    centered = logits.sub_(highest[:, None])
    if wants_entropy:
        exps = centered.exp()
        sums = exps.sum(1)
        dots = exps.mul_(centered).sum(1)
    else:
        sums = centered.exp_().sum(1)
        dots = torch.zeros_like(sums)
    return torch.stack((highest, sums, label_logits, dots), dim=1)


def _gradient_of_logits(
    logits: Tensor,
    labels: Tensor,
    first: int,
    log_normalizer: Tensor,
    entropy: Tensor | None,
    grad: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return [n, v] in the memory of `logits`, from gradients [n] of log-probs and entropies.

    With p the probabilities, H the entropy: d logprob / dz_j = [j is the label] - p_j and
    dH / dz_j = -p_j (log p_j + H).
    """
    if grad is None:
        grad = torch.zeros_like(log_normalizer)
    grad = grad.masked_fill(labels == IGNORE_INDEX, 0)
    log_probs = logits.sub_(log_normalizer[:, None])
    if grad_entropy is None:
        result = log_probs.exp_().mul_(-grad[:, None])
    else:
        probs = log_probs.exp()
        result = log_probs.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        result = result.sub_(grad[:, None]).mul_(probs)
    index, is_elsewhere = _own_index(labels - first, logits.shape[1])
    return result.scatter_add_(1, index, grad.masked_fill(is_elsewhere, 0)[:, None])


def _own_index(own_labels: Tensor, n_entries: int) -> tuple[Tensor, Tensor]:
    """([n, 1] where a label's entry is, 0 if on no rank or another; [n] whether that is so)"""
    is_elsewhere = (own_labels < 0) | (own_labels >= n_entries)
    return own_labels.masked_fill(is_elsewhere, 0)[:, None], is_elsewhere


class _Sum:
    """Sums chunks' gradients of a parameter, in fp32: bf16 has too few digits to add up in."""

    def __init__(self, parameter: Tensor):
        self._parameter = parameter
        self._sum: Tensor | None = None

    def add(self, part: Tensor) -> None:
        self._sum = part if self._sum is None else _in_fp32(self._sum).add_(part)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        if self._sum is not None and a.dtype in (torch.float32, torch.float64):
            self._sum.addmm_(a, b)
        else:
            self.add(linear(a, b.t()))

    def value(self) -> Tensor:
        if self._sum is None:
            return torch.zeros_like(self._parameter)
        return self._sum.to(self._parameter.dtype)
