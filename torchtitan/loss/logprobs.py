"""Log-probabilities, entropies and cross entropy of tokens, without logits of the whole batch.

Training and scoring reduce the logits [B, T, V] to one or two numbers per token. The heads below
compute these numbers in chunks of tokens from hidden states and the output projection's weight, so
that the largest tensor is [chunk, V]. `TokenLogProbs` computes each chunk's logits again in backward.
`SummedCrossEntropy` returns a scalar, whose gradient is known in forward up to a factor, so it
computes the gradient from the same logits in forward.

Under tensor parallelism each rank computes its vocabulary entries, and ranks exchange a few numbers
per token once.

An adapter's low-rank product is added to each chunk's logits. A chunk may have tokens of several
models, each with adapters of its own; a model's tokens are cut into chunks as if it was alone.

B rows, T tokens, M model dim, V vocabulary entries, v = V / tp entries on this rank; n tokens in a
chunk, N tokens in all chunks; m models, r rank of their adapters.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.distributed.collectives import OPS
from torchtitan.distributed.dtensor import is_dtensor
from torchtitan.numerics.exact import exact_linear
from torchtitan.numerics.linear import linear
from torchtitan.numerics.low_rank import LowRank, add_products, gradients_of_products
from torchtitan.tools.torch_parts import assert_on_device


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
        low_rank: LowRank | None = None,
    ) -> TokenOutputs:
        """h: [B, T, M]; weight: [V, M]; bias: [V]; labels: [B, T]; all plain tensors.

        group: ranks that each hold a part of the vocabulary, in rank order. Then weight is [v, M],
            h and labels are the same on all of them, the call is collective, and the gradient of h
            is this rank's summand.
        low_rank: is added to the logits; its rows are sorted by model, and its b is [m, v, r].
        """
        operands, call = _operands(h, weight, bias, labels, group, low_rank)
        with torch.autocast(h.device.type, enabled=False):
            return TokenOutputs(*_LogProbs.apply(*operands, labels, self._of_tokens(labels), call))

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
        low_rank: LowRank | None = None,
    ) -> Tensor:
        """The arguments are those of `TokenLogProbs`. Collective if there is a group."""
        operands, call = _operands(h, weight, bias, labels, group, low_rank)
        with torch.autocast(h.device.type, enabled=False):
            return _SummedLoss.apply(*operands, labels.flatten(), self, call)


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
        low_rank: LowRank | None = None,
    ) -> Tensor:
        """The arguments are those of `TokenLogProbs`; of labels only the shape is read."""
        operands, call = _operands(h, weight, bias, labels, group, low_rank)
        head = replace(self._of_tokens(labels), compile_backend=None)  # it is seldom asked for
        best = [labels.new_zeros(0, 2 * self.k, dtype=torch.float32)]
        with torch.no_grad(), torch.autocast(h.device.type, enabled=False):
            for chunk in _chunks(operands.x, self, call):
                logits, _, _ = _logits(operands, head, call, chunk)
                chosen, ids = logits.topk(min(self.k, logits.shape[1]))
                sums = torch.stack(exponentials_(logits), dim=1)
                own = torch.cat((sums, chosen, (ids + call.first).to(chosen.dtype)), dim=1)
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
    operands = _Operands(logits.flatten(0, -2))
    of_tokens = head._of_tokens(labels)
    return TokenOutputs(*_LogProbs.apply(*operands, labels, of_tokens, _Call(first, group)))


class _Operands(NamedTuple):
    """The tensors that logits are computed from. x: [N, M], or the logits [N, v] without a weight.

    weight: [v, M]. bias: [v]. adapted_x, a, b: of a `LowRank`, [N, M], [m, r, M] and [m, v, r].
    """

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    adapted_x: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None


class _Call(NamedTuple):
    """One call of a head. first: the vocabulary entry that this rank's logits begin with.

    sizes, scale: of the `LowRank`.
    """

    first: int
    group: dist.ProcessGroup | None
    sizes: list[int] | None = None
    scale: float = 1.0


class _Chunk(NamedTuple):
    """Tokens whose logits exist at a time. begin: of the first token. sizes: tokens of each model, [m]."""

    begin: int
    sizes: list[int]

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.begin + sum(self.sizes))


def _operands(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    group: dist.ProcessGroup | None,
    low_rank: LowRank | None,
) -> tuple[_Operands, _Call]:
    """Check the labels. Return the operands, h, weight and bias in autocast's dtype if it is on."""
    rank, n_ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    _check_labels(labels, h.shape[:-1], n_ranks * weight.shape[0])
    operands = [h.flatten(0, -2), weight, bias]
    if torch.is_autocast_enabled(h.device.type):
        dtype = torch.get_autocast_dtype(h.device.type)
        operands = [None if t is None else t.to(dtype) for t in operands]
    first = rank * weight.shape[0]
    if low_rank is None:
        return _Operands(*operands), _Call(first, group)
    assert low_rank.order is None, "the rows of a batch that a head reads are sorted by model"
    x, a, b, sizes, scale, *_ = low_rank
    return _Operands(*operands, x.flatten(0, -2), a, b), _Call(first, group, sizes, scale)


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
        assert_on_device(is_label.all(), rule)  # does not wait for the device
    elif not is_label.all():
        raise ValueError(f"{rule}, got {labels[~is_label].unique().tolist()[:8]}")


class _LogProbs(torch.autograd.Function):
    """(operands, labels [B, T]) -> (logprobs, entropy or None) [B, T]"""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None]:
        *tensors, labels, head, call = args
        operands = _Operands(*tensors)
        own_labels = labels.flatten() - call.first
        of_chunks = []
        statistics_of = _maybe_compiled(_statistics, head.compile_backend)
        for chunk in _chunks(operands.x, head, call):
            logits, temperature, _ = _logits(operands, head, call, chunk)
            chunk_labels = own_labels[chunk.rows]
            of_chunks.append(statistics_of(logits, temperature, chunk_labels, head.entropy))
            del logits  # before the next chunk's exist
        statistics = torch.cat(of_chunks or [torch.zeros(0, 4, device=labels.device)])
        # Don't return views, which FSDP's hooks on outputs don't support.
        top, total, logprobs, entropy = _over_ranks(statistics, labels, call.group)
        entropy = entropy if head.entropy else None
        ctx.save_for_backward(*operands, labels, top + total.log(), entropy)
        ctx.head, ctx.call = head, call
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        n, head, call = len(_Operands._fields), ctx.head, ctx.call
        operands = _Operands(*ctx.saved_tensors[:n])
        of_tokens = (*ctx.saved_tensors[n:], *grads)
        of_tokens = [None if t is None else t.flatten() for t in of_tokens]
        gradients = _Gradients(operands, ctx.needs_input_grad[:n], call.scale)
        gradient_of = _maybe_compiled(_gradient_of_logits, head.compile_backend)
        with torch.autocast(operands.x.device.type, enabled=False):
            for chunk in _chunks(operands.x, head, call):
                labels, log_normalizer, entropy, grad, grad_entropy = (
                    None if t is None else t[chunk.rows] for t in of_tokens
                )
                logits, temperature, low_rank = _logits(operands, head, call, chunk)
                divisor = temperature[:, 0] if isinstance(temperature, Tensor) else temperature
                grad_logits = gradient_of(
                    logits,
                    temperature,
                    labels,
                    call.first,
                    log_normalizer,
                    entropy,
                    None if grad is None else grad / divisor,
                    None if grad_entropy is None else grad_entropy / divisor,
                )
                del logits
                gradients.add(chunk, grad_logits, low_rank)
                del grad_logits  # before the next chunk's exist
        return *gradients.sums(), None, None, None


class _SummedLoss(torch.autograd.Function):
    """(operands, labels [N]) -> the summed cross entropy, a scalar."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, labels, head, call = args
        operands = _Operands(*tensors)
        gradients = _Gradients(operands, ctx.needs_input_grad[: len(operands)], call.scale)
        losses = []
        statistics_of = _maybe_compiled(_statistics, head.compile_backend)
        gradient_of = _maybe_compiled(_gradient_of_loss, head.compile_backend)
        for chunk in _chunks(operands.x, head, call):
            of_chunk = labels[chunk.rows]
            own_labels, is_ignored = of_chunk - call.first, of_chunk == IGNORE_INDEX
            logits, temperature, low_rank = _logits(operands, head, call, chunk)
            statistics = statistics_of(logits, temperature, own_labels, False)
            highest = statistics[:, 0]
            top, total, logprobs, _ = _over_ranks(statistics, of_chunk, call.group)
            losses.append(-logprobs.sum())
            if any(gradients.wanted):
                scale = ((highest - top).exp() / total).masked_fill(is_ignored, 0)
                grad_logits = gradient_of(logits, highest, scale, own_labels, is_ignored)
                gradients.add(chunk, grad_logits, low_rank)
                del grad_logits
            del logits  # before the next chunk's exist
        # Saved tensors, unlike attributes of ctx, are freed after this node's backward.
        ctx.save_for_backward(*gradients.sums())
        if not losses:
            return operands.x.new_zeros((), dtype=torch.float32)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        scaled = [None if t is None else t * grad for t in ctx.saved_tensors]
        return *scaled, None, None, None


class _Gradients:
    """Sums the gradients of the operands, if wanted, over chunks of the logits' gradient.

    scale: of the adapters' product.
    """

    def __init__(self, operands: _Operands, wanted: tuple[bool, ...], scale: float):
        self.operands, self.wanted, self.scale = operands, wanted, scale
        self.of_x = torch.empty_like(operands.x) if wanted[0] else None
        self.of_weight: Tensor | None = None
        self.of_bias: Tensor | None = None
        self.of_adapted_x = torch.empty_like(operands.adapted_x) if any(wanted[3:]) else None
        self.of_a: Tensor | None = None
        self.of_b: Tensor | None = None

    def add(self, chunk: _Chunk, grad_logits: Tensor, low_rank: list[Tensor]) -> None:
        """grad_logits: [n, v] of a chunk's tokens, of any dtype; low_rank: from `add_products`."""
        rows = chunk.rows
        x, weight, _, adapted_x, a, b = self.operands
        wants_x, wants_weight, wants_bias, *wants_adapters = self.wanted
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
        if any(wants_adapters):
            own = adapted_x[rows], a, b, low_rank, chunk.sizes, self.scale
            self.of_adapted_x[rows], grad_a, grad_b = gradients_of_products(grad_logits, *own)
            self.of_a = _sum_in_fp32(self.of_a, grad_a)
            self.of_b = _sum_in_fp32(self.of_b, grad_b)

    def sums(self) -> list[Tensor | None]:
        """Return the gradients of the operands, in their dtypes; None if not wanted."""
        sums = [self.of_x, self.of_weight, self.of_bias, self.of_adapted_x, self.of_a, self.of_b]
        for i, operand in enumerate(self.operands):
            if self.wanted[i]:  # the sum is None if there were no tokens
                sums[i] = (
                    torch.zeros_like(operand) if sums[i] is None else sums[i].to(operand.dtype)
                )
        return sums


def _chunks(x: Tensor, head: TokenLogProbs | SummedCrossEntropy, call: _Call) -> list[_Chunk]:
    # Each chunk adds a gradient of the whole weight to a sum in fp32. Accelerators, which have memory
    # for [4096, V] in fp32, would spend much of their time on these sums if chunks were small. Compiled
    # code stores logits in 16 bits only.
    default = 4096 if head.compile_backend is None else 8192
    size = head.chunk_tokens or (1024 if x.device.type == "cpu" else default)
    sizes, begin = call.sizes or [len(x)], 0
    chunks: list[_Chunk] = []
    for model, n_tokens in enumerate(sizes):
        # Parts begin at a model's first token, so that sums over its tokens have the same bits as if
        # the model was alone.
        for start in range(0, n_tokens, size):
            n = min(size, n_tokens - start)
            if not chunks or sum(chunks[-1].sizes) + n > size:
                chunks.append(_Chunk(begin, [0] * len(sizes)))
            chunks[-1].sizes[model] = n
            begin += n
    return chunks


def _logits(
    operands: _Operands, head: TokenLogProbs | SummedCrossEntropy, call: _Call, chunk: _Chunk
) -> tuple[Tensor, float | Tensor, list[Tensor]]:
    """Return the logits [n, v] of a chunk, its temperature, and what backward of adapters needs.

    As the functions below take them: to be compiled, in any dtype, because compiled code stores nothing
    but its result; else divided by the temperature, in fp32 (fp64 if x is) and memory of their own.
    """
    x, weight, bias, adapted_x, a, b = operands
    rows, temperature, low_rank = chunk.rows, head.temperature, []
    if isinstance(temperature, Tensor):
        temperature = temperature[rows]
    logits = x[rows] if weight is None else head.product(x[rows], weight, bias)
    if adapted_x is not None:
        adapters = adapted_x[rows], a, b, chunk.sizes, call.scale, head.product
        logits, low_rank = add_products(logits, *adapters, in_place=True)
    if head.compile_backend is None:
        logits = _in_fp32(logits, temperature, copy=weight is None)
    return logits, temperature, low_rank


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
    gathered = OPS.all_gather_into_tensor(numbers, n_ranks, group.group_name)
    return OPS.wait_tensor(gathered).view(n_ranks, *numbers.shape)


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

    If not compiled, it overwrites the logits. With p the probabilities, H the entropy:
    d logprob / dz_j = [j is the label] - p_j and dH / dz_j = -p_j (log p_j + H).
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
