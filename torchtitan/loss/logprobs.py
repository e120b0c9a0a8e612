"""Log-probabilities, entropies and cross entropy of tokens, without logits of the whole batch.

Training and scoring reduce the logits [B, T, V] to one or two numbers per token. The heads below
compute these numbers in chunks of tokens from hidden states and the output projection's weight, so
that the largest tensor is [chunk, V]. `TokenLogProbs` computes each chunk's logits again in backward.
`SummedCrossEntropy` returns a scalar, whose gradient is known in forward up to a factor, so it
computes the gradient from the same logits in forward.

Under tensor parallelism each rank computes its vocabulary entries, and ranks exchange a few numbers
per token once.

B rows, T tokens, M model dim, V vocabulary entries, v = V / tp entries on this rank; n tokens in a
chunk, N tokens in all chunks.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # noqa: F401 (registers operators)
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.distributed.dtensor import is_dtensor
from torchtitan.numerics.exact import exact_linear
from torchtitan.numerics.linear import linear

_OPS = torch.ops._c10d_functional


class TokenOutputs(NamedTuple):
    """The result of `TokenLogProbs`; a tuple, because FSDP and DDP find its tensors in tuples.

    logprobs: [B, T] fp32, of the label at each position; 0 where it is IGNORE_INDEX.
    entropy: [B, T] fp32, in nats, of the distribution at each position; None without `entropy`.
    """

    logprobs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class TokenLogProbs:
    """A head: turns hidden states into `TokenOutputs` inside a decoder's output projection.

    temperature: divides the logits, also for the entropy. A number; a tensor with a number per row
        [B] or token [B, T]; or, in the engine's steps, the name of the batch entry with that tensor.
    entropy: also compute the entropy, which takes about a tenth longer.
    chunk_tokens: tokens whose logits exist at a time; None: 1,024 on a CPU, elsewhere 4,096,
        or 8,192 if compiled.
    compile_backend: compile all but the matrix products with this backend of torch.compile. Then
        logits are read twice and written once; otherwise each step passes over them in fp32.
    exact: compute logits by `numerics.exact`, so that they do not depend on the other tokens.

    Raises ValueError for a temperature or a chunk that is not positive, and for a name that the
    batch does not have. Temperatures on an accelerator are not checked, because reading them waits
    for the device.
    """

    temperature: float | str | Tensor = 1.0
    entropy: bool = False
    chunk_tokens: int | None = None
    compile_backend: str | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, str | Tensor):
            _check_temperature(self.temperature)
        _check_chunk("TokenLogProbs", self.chunk_tokens)

    def with_batch(self, batch: Mapping[str, Any]) -> Self:
        """Return the head for one batch: a temperature given by name is looked up in the batch."""
        if not isinstance(self.temperature, str):
            return self
        values = batch.get(self.temperature)
        if not isinstance(values, Tensor):
            raise ValueError(
                f"TokenLogProbs.temperature = {self.temperature!r} must name an entry of the batch, "
                f"which has {sorted(batch)}; add a tensor [B] or [B, T] with that name"
            )
        return replace(self, temperature=values)

    def __call__(
        self,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        labels: Tensor,
        group: dist.ProcessGroup | None = None,
    ) -> TokenOutputs:
        """h: [B, T, M]; weight: [V, M]; bias: [V]; labels: [B, T]; all plain tensors.

        group: ranks that each hold a part of the vocabulary, in rank order. Then weight is [v, M],
            h and labels are the same on all of them, the call is collective, and the gradient of h
            is this rank's summand.
        """
        x, weight, bias, first = _operands(h, weight, bias, labels, group)
        with torch.autocast(h.device.type, enabled=False):
            return TokenOutputs(
                *_LogProbs.apply(x, weight, bias, labels, self._of_tokens(labels), first, group)
            )

    @property
    def product(self) -> Callable[..., Tensor]:
        return exact_linear if self.exact else linear

    def _of_tokens(self, labels: Tensor) -> Self:
        """Return the head with a tensor of temperatures expanded to tokens, [B * T, 1] fp32."""
        temperature = self.temperature
        if isinstance(temperature, str):
            raise ValueError(
                f"TokenLogProbs.temperature = {temperature!r} names an entry of the batch, which "
                "only the engine's steps look up; give a tensor [B] or [B, T]"
            )
        if not isinstance(temperature, Tensor):
            return self
        if temperature.shape not in (labels.shape, labels.shape[:1]):
            raise ValueError(
                f"TokenLogProbs.temperature must have one entry per row [{labels.shape[0]}] or "
                f"token {list(labels.shape)}, got {list(temperature.shape)}"
            )
        if temperature.dim() == 1:
            temperature = temperature[:, None].expand(labels.shape)
        temperature = temperature.to(labels.device, torch.float32)
        # Padding may have temperature 0, and dividing by it would put nan into the gradient.
        is_padding = (labels == IGNORE_INDEX) & (temperature == 0)
        temperature = temperature.masked_fill(is_padding, 1).reshape(-1, 1)
        if temperature.device.type == "cpu" and temperature.numel():
            _check_temperature(float(temperature.min()))
        return replace(self, temperature=temperature)


@dataclass(frozen=True)
class SummedCrossEntropy:
    """A head: sums the cross entropy of all labels but IGNORE_INDEX, to an fp32 scalar.

    chunk_tokens, compile_backend: as in `TokenLogProbs`. Raises ValueError if chunk_tokens is not
    positive.
    """

    temperature = 1.0
    product = staticmethod(linear)
    chunk_tokens: int | None = None
    compile_backend: str | None = None

    def __post_init__(self) -> None:
        _check_chunk("SummedCrossEntropy", self.chunk_tokens)

    def __call__(
        self,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        labels: Tensor,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """The arguments are those of `TokenLogProbs`. Collective if there is a group."""
        x, weight, bias, first = _operands(h, weight, bias, labels, group)
        with torch.autocast(h.device.type, enabled=False):
            return _SummedLoss.apply(x, weight, bias, labels.flatten(), self, first, group)


@dataclass(frozen=True)
class TopTokens(TokenLogProbs):
    """A head: finds the k most probable tokens at each position, without gradients.

    Returns [B, T, 2 k] fp32: k token ids, the most probable token's first, then their log-probs.
    fp32 holds ids below 2^24 exactly. The vocabulary must have k entries.
    """

    k: int = 1

    def __call__(  # type: ignore[override]
        self,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        labels: Tensor,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """The arguments are those of `TokenLogProbs`; of labels only the shape is read."""
        x, weight, bias, first = _operands(h, weight, bias, labels, group)
        head = replace(self._of_tokens(labels), compile_backend=None)  # it is seldom asked for
        best = [labels.new_zeros(0, 2 * self.k, dtype=torch.float32)]
        with torch.no_grad(), torch.autocast(h.device.type, enabled=False):
            for rows in _chunks(x, self):
                logits, _ = _logits(x, weight, bias, head, rows)
                chosen, ids = logits.topk(min(self.k, logits.shape[1]))
                sums = torch.stack(exponentials_(logits), dim=1)
                own = torch.cat((sums, chosen, (ids + first).to(chosen.dtype)), dim=1)
                best.append(self._best_of_ranks(_of_ranks(own, group)))
            return torch.cat(best).float().view(*labels.shape, 2 * self.k)

    def _best_of_ranks(self, of_ranks: Tensor) -> Tensor:
        """of_ranks: [ranks, n, highest logit + sum + k' logits + k' ids] -> [n, 2 k]."""
        highest, sums = of_ranks[..., 0], of_ranks[..., 1]
        top = highest.amax(0)
        total = ((highest - top).exp() * sums).sum(0)
        logits, ids = (part.transpose(0, 1).flatten(1) for part in of_ranks[..., 2:].chunk(2, -1))
        chosen, places = logits.topk(self.k)
        logprobs = logprobs_of_logits(chosen, top[:, None], total[:, None])
        return torch.cat((ids.gather(1, places), logprobs), dim=1)


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
) -> TokenOutputs:
    """Return the result of `TokenLogProbs` from existing logits [B, T, V].

    logits: plain, or a DTensor split along V, which stays split: ranks exchange only a few numbers
        per token. labels: [B, T], plain. Computed in fp32 for any dtype of the logits, without
        copying all of them.
    Raises ValueError for a DTensor with another layout.
    """
    head = TokenLogProbs(temperature, entropy)
    _check_labels(labels, logits.shape[:-1], logits.shape[-1])
    group, first = None, 0
    if is_dtensor(logits):
        mesh, placements = logits.device_mesh, logits.placements
        dims = (logits.ndim - 1, -1)
        if mesh.ndim != 1 or not any(placements[0].is_shard(dim) for dim in dims):
            raise ValueError(
                f"token_logprobs takes logits that are split along the vocabulary on a one-"
                f"dimensional mesh, got placements {placements} for shape {list(logits.shape)}; "
                "give logits.full_tensor()"
            )
        group = mesh.get_group()
        first = -(-logits.shape[-1] // mesh.size()) * mesh.get_local_rank()
        logits = logits.to_local()
    return TokenOutputs(
        *_LogProbs.apply(
            logits.flatten(0, -2), None, None, labels, head._of_tokens(labels), first, group
        )
    )


def _operands(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[Any, ...]:
    """Check the labels. Return h as [N, M], weight [v, M] and bias [v], in autocast's dtype if it
    is on, and the vocabulary entry that this rank's weight begins with."""
    rank, n_ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    _check_labels(labels, h.shape[:-1], n_ranks * weight.shape[0])
    operands = [h.flatten(0, -2), weight, bias]
    if torch.is_autocast_enabled(h.device.type):
        dtype = torch.get_autocast_dtype(h.device.type)
        operands = [None if t is None else t.to(dtype) for t in operands]
    return *operands, rank * weight.shape[0]


def _check_chunk(head: str, chunk_tokens: int | None) -> None:
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(
            f"{head}.chunk_tokens must be at least 1, got {chunk_tokens}; 1024 tokens keep matrix "
            "products large"
        )


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(
            f"the temperature of log-probabilities must be above 0, got {temperature}; "
            "greedy choices have no distribution, so score them with temperature = 1"
        )


def _check_labels(labels: Tensor, shape: torch.Size, n_entries: int) -> None:
    """shape: the expected shape; n_entries: the vocabulary entries of all ranks."""
    if labels.shape != shape:
        raise ValueError(
            f"labels must have one entry per token, {list(shape)}, got {list(labels.shape)}"
        )
    is_label = ((labels >= 0) & (labels < n_entries)) | (labels == IGNORE_INDEX)
    rule = f"labels must be in [0, {n_entries}) or {IGNORE_INDEX}, which is left out"
    if labels.device.type != "cpu":
        torch._assert_async(is_label.all(), rule)  # does not wait for the device
    elif not is_label.all():
        raise ValueError(f"{rule}, got {labels[~is_label].unique().tolist()[:8]}")


class _LogProbs(torch.autograd.Function):
    """(x [N, M], weight [v, M], bias [v], labels [B, T]) -> (logprobs, entropy or None) [B, T]

    x: the logits [N, v] if weight is None. first: the vocabulary entry that this rank's logits
    begin with.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        labels: Tensor,
        head: TokenLogProbs,
        first: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor | None]:
        own_labels = labels.flatten() - first
        of_chunks = []
        statistics_of = _maybe_compiled(_statistics, head.compile_backend)
        for rows in _chunks(x, head):
            logits, temperature = _logits(x, weight, bias, head, rows)
            of_chunks.append(statistics_of(logits, temperature, own_labels[rows], head.entropy))
            del logits  # before the next chunk's exist
        statistics = torch.cat(of_chunks or [torch.zeros(0, 4, device=labels.device)])
        # Don't return views, which FSDP's hooks on outputs don't support.
        top, total, logprobs, entropy = _over_ranks(statistics, labels, group)
        entropy = entropy if head.entropy else None
        ctx.save_for_backward(x, weight, bias, labels, top + total.log(), entropy)
        ctx.head, ctx.first = head, first
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        x, weight, bias, *of_tokens = ctx.saved_tensors
        of_tokens = [None if t is None else t.flatten() for t in (*of_tokens, *grads)]
        gradients = _Gradients(x, weight, bias, ctx.needs_input_grad[:3])
        gradient_of = _maybe_compiled(_gradient_of_logits, ctx.head.compile_backend)
        with torch.autocast(x.device.type, enabled=False):
            for rows in _chunks(x, ctx.head):
                labels, log_normalizer, entropy, grad, grad_entropy = (
                    None if t is None else t[rows] for t in of_tokens
                )
                logits, temperature = _logits(x, weight, bias, ctx.head, rows)
                divisor = temperature[:, 0] if isinstance(temperature, Tensor) else temperature
                grad_logits = gradient_of(
                    logits,
                    temperature,
                    labels,
                    ctx.first,
                    log_normalizer,
                    entropy,
                    None if grad is None else grad / divisor,
                    None if grad_entropy is None else grad_entropy / divisor,
                )
                del logits
                gradients.add(rows, grad_logits)
                del grad_logits  # before the next chunk's exist
        return *gradients.sums(), None, None, None, None


class _SummedLoss(torch.autograd.Function):
    """(x [N, M], weight [v, M], bias [v], labels [N]) -> the summed cross entropy, a scalar.

    first: as in `_LogProbs`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        head: SummedCrossEntropy,
        first: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        gradients = _Gradients(x, weight, bias, ctx.needs_input_grad[:3])
        losses = []
        statistics_of = _maybe_compiled(_statistics, head.compile_backend)
        gradient_of = _maybe_compiled(_gradient_of_loss, head.compile_backend)
        for rows in _chunks(x, head):
            own_labels, is_ignored = labels[rows] - first, labels[rows] == IGNORE_INDEX
            logits, temperature = _logits(x, weight, bias, head, rows)
            statistics = statistics_of(logits, temperature, own_labels, False)
            highest = statistics[:, 0]
            top, total, logprobs, _ = _over_ranks(statistics, labels[rows], group)
            losses.append(-logprobs.sum())
            if any(gradients.wanted):
                scale = ((highest - top).exp() / total).masked_fill(is_ignored, 0)
                grad_logits = gradient_of(logits, highest, scale, own_labels, is_ignored)
                gradients.add(rows, grad_logits)
                del grad_logits
            del logits  # before the next chunk's exist
        # Saved tensors, unlike attributes of ctx, are freed after this node's backward.
        ctx.save_for_backward(*gradients.sums())
        return torch.stack(losses).sum() if losses else x.new_zeros((), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        scaled = [None if t is None else t * grad for t in ctx.saved_tensors]
        return *scaled, None, None, None, None


class _Gradients:
    """Sums the gradients of x, weight and bias, if wanted, over chunks of the logits' gradient."""

    def __init__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, wanted: tuple[bool, ...]
    ):
        self.operands, self.wanted = (x, weight, bias), wanted
        self.of_x = torch.empty_like(x) if wanted[0] else None
        self.of_weight: Tensor | None = None
        self.of_bias: Tensor | None = None

    def add(self, rows: slice, grad_logits: Tensor) -> None:
        """rows: the tokens of a chunk; grad_logits: their [n, v], of any dtype."""
        x, weight, _ = self.operands
        wants_x, wants_weight, wants_bias = self.wanted
        grad_logits = grad_logits.to(x.dtype)
        if wants_x:
            self.of_x[rows] = grad_logits if weight is None else linear(grad_logits, weight.t())
        if wants_weight:
            if self.of_weight is not None and x.dtype in (torch.float32, torch.float64):
                self.of_weight.addmm_(grad_logits.t(), x[rows])
            else:
                part = linear(grad_logits.t(), x[rows].t())
                self.of_weight = _sum_in_fp32(self.of_weight, part)
        if wants_bias:
            self.of_bias = _sum_in_fp32(self.of_bias, grad_logits.sum(0))

    def sums(self) -> list[Tensor | None]:
        """Return the gradients of x, weight and bias, in their dtypes; None if not wanted."""
        sums = [self.of_x, self.of_weight, self.of_bias]
        for i, operand in enumerate(self.operands):
            if self.wanted[i]:  # the sum is None if there were no tokens
                sums[i] = (
                    torch.zeros_like(operand) if sums[i] is None else sums[i].to(operand.dtype)
                )
        return sums


def _chunks(x: Tensor, head: TokenLogProbs | SummedCrossEntropy) -> list[slice]:
    # Each chunk adds a gradient of the whole weight to a sum in fp32. Accelerators, which have memory
    # for [4096, V] in fp32, would spend much of their time on these sums if chunks were small. Compiled
    # code stores logits in 16 bits only.
    default = 4096 if head.compile_backend is None else 8192
    size = head.chunk_tokens or (1024 if x.device.type == "cpu" else default)
    return [slice(start, start + size) for start in range(0, len(x), size)]


def _logits(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    head: TokenLogProbs | SummedCrossEntropy,
    rows: slice,
) -> tuple[Tensor, float | Tensor]:
    """Return the logits [n, v] of a chunk, and its temperature.

    As the functions below take them: to be compiled, in any dtype, because compiled code stores nothing
    but its result; else divided by the temperature, in fp32 (fp64 if x is) and memory of their own.
    """
    temperature = head.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature[rows]
    logits = x[rows] if weight is None else head.product(x[rows], weight, bias)
    if head.compile_backend is None:
        logits = _in_fp32(logits, temperature, copy=weight is None)
    return logits, temperature


def _in_fp32(logits: Tensor, temperature: float | Tensor, copy: bool) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=copy)
    is_one = not isinstance(temperature, Tensor) and temperature == 1
    return logits if is_one else logits.div_(temperature)


@functools.cache
def _maybe_compiled(function: Callable[..., Tensor], backend: str | None) -> Callable[..., Tensor]:
    return function if backend is None else torch.compile(function, backend=backend, fullgraph=True)


def _statistics(
    logits: Tensor, temperature: float | Tensor, own_labels: Tensor, wants_entropy: bool
) -> Tensor:
    """Return the numbers [n, 4] that ranks exchange about logits z [n, v].

    The maximum; the sum of e = exp(z - maximum); the label's logit, 0 if another rank has it; the
    sum of e * (z - maximum), 0 without wants_entropy. If not compiled, it overwrites the logits:
    without wants_entropy they become e.
    """
    if torch.compiler.is_compiling():
        logits = _in_fp32(logits, temperature, copy=True)
    index, is_elsewhere = _own_index(own_labels, logits.shape[1])
    label_logits = logits.gather(1, index).squeeze(1).masked_fill_(is_elsewhere, 0)
    if wants_entropy:
        exps = logits.clone()
        highest, sums = exponentials_(exps)
        dots = exps.mul_(logits.sub_(highest[:, None])).sum(1)
    else:
        highest, sums = exponentials_(logits)
        dots = torch.zeros_like(sums)
    return torch.stack((highest, sums, label_logits, dots), dim=1)


def exponentials_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Overwrite logits z [n, v] with e = exp(z - highest); return highest and the sum of e, both [n]."""
    highest = logits.amax(1)
    return highest, logits.sub_(highest[:, None]).exp_().sum(1)


def logprobs_of_logits(chosen: Tensor, highest: Tensor, sums: Tensor) -> Tensor:
    """Return log-probs of tokens with the logits `chosen`; the others are those of `exponentials_`.

    The trainer and the generator both call it, because another formula rounds differently.
    """
    # Subtract the highest logit first, because sums of large numbers would lose digits.
    return (chosen - highest) - sums.log()


def _of_ranks(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the numbers [n, c] of all ranks, [ranks, n, c]."""
    if group is None:
        return numbers[None]
    n_ranks = dist.get_world_size(group)
    gathered = _OPS.all_gather_into_tensor(numbers, n_ranks, group.group_name)
    return _OPS.wait_tensor(gathered).view(n_ranks, *numbers.shape)


def _over_ranks(
    statistics: Tensor, labels: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Combine `_statistics` [n, 4] of all ranks. Returns, in the shape of the n labels,

    the highest logit z; the sum of exp(z - highest); the label's log-probability, 0 where it is
    IGNORE_INDEX; the entropy, undefined if the statistics have none.
    """
    of_ranks = _of_ranks(statistics, group)
    highest, sums, label_logits, dots = of_ranks.view(len(of_ranks), *labels.shape, 4).unbind(-1)
    top = highest.amax(0)
    shift = highest - top  # from each rank's highest logit to the highest of all
    scale = shift.exp()
    total = (scale * sums).sum(0)
    logprobs = logprobs_of_logits(label_logits.sum(0), top, total)
    entropy = total.log() - (scale * (dots + sums * shift)).sum(0) / total
    return top, total, logprobs.masked_fill(labels == IGNORE_INDEX, 0), entropy


def _gradient_of_logits(
    logits: Tensor,
    temperature: float | Tensor,
    labels: Tensor,
    first: int,
    log_normalizer: Tensor,
    entropy: Tensor | None,
    grad: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return [n, v] in the dtype of `logits`, from gradients [n] of logprobs and entropies.

    If not compiled, it overwrites the logits. With p the probabilities, H the entropy: d logprob / dz_j = [j is the label] - p_j and
    dH / dz_j = -p_j (log p_j + H).
    """
    dtype = logits.dtype
    if torch.compiler.is_compiling():
        logits = _in_fp32(logits, temperature, copy=True)
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
    return _add_at_labels(result, labels - first, grad).to(dtype)


def _gradient_of_loss(
    logits: Tensor, highest: Tensor, scale: Tensor, own_labels: Tensor, is_ignored: Tensor
) -> Tensor:
    """Return p_j - [j is the label], [n, v] in the dtype of `logits`, with p_j = scale * e_j.

    logits: if not compiled, e = exp(z - highest), which is overwritten.
    scale: [n], 0 for labels that are ignored.
    """
    exps = logits
    if torch.compiler.is_compiling():
        exps = _in_fp32(logits, 1.0, copy=True).sub_(highest[:, None]).exp_()
    minus_one = -(~is_ignored).to(exps.dtype)
    return _add_at_labels(exps.mul_(scale[:, None]), own_labels, minus_one).to(logits.dtype)


def _add_at_labels(result: Tensor, own_labels: Tensor, values: Tensor) -> Tensor:
    """Add values [n] to result [n, v] in the columns of the labels, in place."""
    index, is_elsewhere = _own_index(own_labels, result.shape[1])
    values = values.masked_fill(is_elsewhere, 0)[:, None]
    if torch.compiler.is_compiling():  # a scatter is a kernel of its own, after all of result
        columns = torch.arange(result.shape[1], device=result.device)
        return result + torch.where(columns == index, values, 0)
    return result.scatter_add_(1, index, values)


def _own_index(own_labels: Tensor, n_entries: int) -> tuple[Tensor, Tensor]:
    """Return (the labels' columns [n, 1], 0 for labels not on this rank; [n] True for those)."""
    is_elsewhere = (own_labels < 0) | (own_labels >= n_entries)
    return own_labels.masked_fill(is_elsewhere, 0)[:, None], is_elsewhere


def _sum_in_fp32(total: Tensor | None, part: Tensor) -> Tensor:
    """Add a chunk's gradient, in fp32 because bf16 has too few digits."""
    if total is None:
        return part
    return total.to(torch.promote_types(total.dtype, torch.float32)).add_(part)
