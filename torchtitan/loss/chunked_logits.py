"""Log-probabilities and losses from logits [B, T, V] that are never stored as a whole.

Logits are computed in chunks of tokens from hidden states and the output projection's weight, so the
largest tensor is [chunk, V]. `LogProbs` computes each chunk's logits again in backward. `SummedLoss`
computes its gradient in forward; backward only multiplies this gradient by the incoming one.

Under tensor parallelism each rank computes the logits of its vocabulary entries, and ranks all-gather four
numbers per token once. A chunk may have tokens of several models, each with its own adapters; a model's
tokens are cut into chunks as if the batch had no other model.

B rows, T tokens, M model dim, V vocabulary entries, v = V / tp entries on this rank; n
tokens in a chunk, N tokens in all chunks; m models, r rank of the models' adapters.
"""

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.distributed.collectives import OPS
from torchtitan.numerics.linear import linear
from torchtitan.numerics.low_rank import LowRank, add_products, gradients_of_products
from torchtitan.tools.torch_parts import assert_on_device


class Operands(NamedTuple):
    """Tensors of a head's call. x: [N, M], or the logits [N, v] if weight is None. weight: [v, M]. bias: [v].
    adapted_x, a, b: the fields x, a and b of a `LowRank`, [N, M], [m, r, M] and [m, v, r].
    """

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    adapted_x: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None


class Call(NamedTuple):
    """The settings of a head's call. first: index of this rank's first vocabulary entry. cap: c, for logits
    c * tanh(logits / c). sizes, scale: the fields of the `LowRank`."""

    first: int
    group: dist.ProcessGroup | None
    cap: float | None = None
    sizes: list[int] | None = None
    scale: float = 1.0


class Slopes(NamedTuple):
    """What a chunk's backward needs. low_rank: from `add_products`. of_cap: d capped logits / d logits, [n, v]."""

    low_rank: list[Tensor]
    of_cap: Tensor | None


class Chunk(NamedTuple):
    """Tokens whose logits are stored together. begin: index of the first token. sizes: [m], tokens per model."""

    begin: int
    sizes: list[int]

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.begin + sum(self.sizes))


Outputs = TypeVar("Outputs", covariant=True)


class ChunkedHead(Generic[Outputs]):
    """A head that computes logits in chunks; a decoder's output projection calls it.

    temperature: a number, or [N, 1], that divides the logits. chunk_tokens: tokens in a chunk; None: 1,024 on a
    CPU, elsewhere 4,096, or 8,192 if compiled. compile_backend: torch.compile's backend for everything except
    matrix products; None: not compiled.
    """

    temperature: Any = 1.0
    chunk_tokens: int | None = None
    compile_backend: str | None = None

    def __post_init__(self) -> None:
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ValueError(
                f"{type(self).__name__}.chunk_tokens must be at least 1, got {self.chunk_tokens}; 1024 tokens "
                "keep matrix products large"
            )

    @property
    def product(self) -> Callable[..., Tensor]:
        """The matmul function (x, weight, bias) -> logits."""
        return linear

    def __call__(
        self,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        labels: Tensor,
        group: dist.ProcessGroup | None = None,
        low_rank: LowRank | None = None,
        cap: float | None = None,
    ) -> Outputs:
        """Return the outputs for h [B, T, M], weight [V, M], bias [V] and labels [B, T], all plain tensors.

        group: ranks that each hold [v, M] of the weight, in rank order, and the same h and labels. The call
            is collective; the gradient of h is only this rank's partial sum.
        low_rank: the adapters whose product is added to the logits, with rows sorted by model, b [m, v, r].
        cap: c, for logits c * tanh(logits / c).
        """
        first, n_ranks = 0, 1
        if group is not None:
            first, n_ranks = dist.get_rank(group) * len(weight), dist.get_world_size(group)
        check_labels(labels, h.shape[:-1], n_ranks * len(weight))
        tensors = [h.flatten(0, -2), weight, bias]
        if torch.is_autocast_enabled(h.device.type):
            dtype = torch.get_autocast_dtype(h.device.type)
            tensors = [None if t is None else t.to(dtype) for t in tensors]
        operands, call = Operands(*tensors), Call(first, group, cap)
        if low_rank is not None:
            assert low_rank.order is None, (
                "the rows of a batch that a head reads are sorted by model"
            )
            x, a, b, sizes, scale, *_ = low_rank
            operands = operands._replace(adapted_x=x.flatten(0, -2), a=a, b=b)
            call = call._replace(sizes=sizes, scale=scale)
        with torch.autocast(h.device.type, enabled=False):
            return self.compute(operands, call, labels)

    def compute(self, operands: Operands, call: Call, labels: Tensor) -> Outputs:
        """Return the head's outputs. labels: [B, T], already checked. Autocast is off."""
        raise NotImplementedError


def check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(
            f"the temperature of log-probabilities must be above 0, got {temperature}; "
            "greedy choices have no distribution, so score them with temperature = 1"
        )


def check_labels(labels: Tensor, shape: torch.Size, n_entries: int) -> None:
    """Raise ValueError for labels of another shape, or outside [0, n_entries) and not IGNORE_INDEX.

    On an accelerator, values are checked by a device assertion.
    """
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


class LogProbs(torch.autograd.Function):
    """(operands, labels [B, T]) -> (logprobs, entropy or None) [B, T]"""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None]:
        *tensors, labels, head, call = args
        operands = Operands(*tensors)
        own_labels = labels.flatten() - call.first
        of_chunks = []
        statistics_of = _maybe_compiled(_statistics, head.compile_backend)
        for chunk in chunks_of(operands.x, head, call):
            logits, temperature, _ = logits_of(operands, head, call, chunk)
            chunk_labels = own_labels[chunk.rows]
            of_chunks.append(statistics_of(logits, temperature, chunk_labels, head.entropy))
            del logits  # free the logits before the next chunk's are allocated
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
        n, head, call = len(Operands._fields), ctx.head, ctx.call
        operands = Operands(*ctx.saved_tensors[:n])
        of_tokens = (*ctx.saved_tensors[n:], *grads)
        of_tokens = [None if t is None else t.flatten() for t in of_tokens]
        gradients = Gradients(operands, ctx.needs_input_grad[:n], call.scale)
        gradient_of = _maybe_compiled(_gradient_of_logits, head.compile_backend)
        with torch.autocast(operands.x.device.type, enabled=False):
            for chunk in chunks_of(operands.x, head, call):
                labels, log_normalizer, entropy, grad, grad_entropy = (
                    None if t is None else t[chunk.rows] for t in of_tokens
                )
                logits, temperature, slopes = logits_of(operands, head, call, chunk)
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
                gradients.add(chunk, grad_logits, slopes)
                del grad_logits  # free its memory for the next chunk
        return *gradients.sums(), None, None, None


ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Callable[[], Tensor]]]
"""(logits [n, v], rows of a chunk) -> (sums [c] over the chunk's tokens, the first is the loss; a function that
returns the loss's gradient [n, v]). A `ChunkLoss` may overwrite the logits."""


class SummedLoss(torch.autograd.Function):
    """(operands, number c of sums, `ChunkLoss`) -> c scalars, of which the first has a gradient."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *tensors, n_sums, loss_of, head, call = args
        operands = Operands(*tensors)
        gradients = Gradients(operands, ctx.needs_input_grad[: len(operands)], call.scale)
        sums = [torch.zeros(n_sums, device=operands.x.device)]
        for chunk in chunks_of(operands.x, head, call):
            logits, _, slopes = logits_of(operands, head, call, chunk)
            of_chunk, gradient = loss_of(logits, chunk.rows)
            sums.append(of_chunk)
            if any(gradients.wanted):
                gradients.add(chunk, gradient(), slopes)
            del logits, gradient  # free their memory for the next chunk
        # Saved tensors, unlike attributes of ctx, are freed after this node's backward.
        ctx.save_for_backward(*gradients.sums())
        loss, *others = (x.clone() for x in torch.stack(sums).sum(0))
        ctx.mark_non_differentiable(*others)
        return loss, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple:
        scaled = [None if t is None else t * grad for t in ctx.saved_tensors]
        return *scaled, None, None, None, None


def cross_entropy_of(labels: Tensor, head: ChunkedHead[Any], call: Call) -> ChunkLoss:
    """Return the `ChunkLoss` that sums the cross entropy over `labels` [N] except IGNORE_INDEX."""
    statistics_of = _maybe_compiled(_statistics, head.compile_backend)
    gradient_of = _maybe_compiled(_gradient_of_loss, head.compile_backend)

    def loss_of(logits: Tensor, rows: slice) -> tuple[Tensor, Callable[[], Tensor]]:
        own_labels, is_ignored = labels[rows] - call.first, labels[rows] == IGNORE_INDEX
        statistics = statistics_of(logits, head.temperature, own_labels, False)
        highest = statistics[:, 0]
        top, total, logprobs, _ = _over_ranks(statistics, labels[rows], call.group)

        def gradient() -> Tensor:
            scale = ((highest - top).exp() / total).masked_fill(is_ignored, 0)
            return gradient_of(logits, highest, scale, own_labels, is_ignored)

        return -logprobs.sum()[None], gradient

    return loss_of


class Gradients:
    """Sums the wanted gradients of operands over chunks. scale: the factor on the adapters' product."""

    def __init__(self, operands: Operands, wanted: tuple[bool, ...], scale: float):
        self.operands, self.wanted, self.scale = operands, wanted, scale
        self.parts: dict[str, Tensor | None] = dict.fromkeys(Operands._fields)
        if wanted[0]:
            self.parts["x"] = torch.empty_like(operands.x)
        if any(wanted[3:]):
            self.parts["adapted_x"] = torch.empty_like(operands.adapted_x)

    def add(self, chunk: Chunk, grad_logits: Tensor, slopes: Slopes) -> None:
        """Add a chunk's gradients. grad_logits: [n, v], of any dtype."""
        rows, (low_rank, of_cap) = chunk.rows, slopes
        x, weight, _, adapted_x, a, b = self.operands
        wants_x, wants_weight, wants_bias, *wants_adapters = self.wanted
        grad_logits = (grad_logits if of_cap is None else grad_logits * of_cap).to(x.dtype)
        if wants_x:
            self.parts["x"][rows] = (
                grad_logits if weight is None else linear(grad_logits, weight.t())
            )
        if wants_weight:
            of_weight = self.parts["weight"]
            if of_weight is not None and x.dtype in (torch.float32, torch.float64):
                of_weight.addmm_(grad_logits.t(), x[rows])
            else:
                self._add("weight", linear(grad_logits.t(), x[rows].t()))
        if wants_bias:
            self._add("bias", grad_logits.sum(0))
        if any(wants_adapters):
            own = adapted_x[rows], a, b, low_rank, chunk.sizes, self.scale
            of_x, of_a, of_b = gradients_of_products(grad_logits, *own)
            self.parts["adapted_x"][rows] = of_x
            self._add("a", of_a)
            self._add("b", of_b)

    def _add(self, name: str, part: Tensor) -> None:
        """Add a chunk's gradient, in fp32 because bf16 has too few digits."""
        total = self.parts[name]
        if total is not None:
            total = total.to(torch.promote_types(total.dtype, torch.float32)).add_(part)
        self.parts[name] = part if total is None else total

    def sums(self) -> list[Tensor | None]:
        """Return the gradients of the operands, in their dtypes; None if not wanted."""
        sums = []
        for part, operand, wanted in zip(
            self.parts.values(), self.operands, self.wanted, strict=True
        ):
            if wanted and part is None:  # the batch had no tokens
                part = torch.zeros_like(operand)
            sums.append(part.to(operand.dtype) if wanted else part)
        return sums


def chunks_of(x: Tensor, head: ChunkedHead[Any], call: Call) -> list[Chunk]:
    # Each chunk adds a gradient of the whole weight to an fp32 sum. With small chunks, accelerators would
    # spend much time on these additions. Compiled code stores logits in 16 bits, so its chunks may be larger.
    default = 4096 if head.compile_backend is None else 8192
    size = head.chunk_tokens or (1024 if x.device.type == "cpu" else default)
    sizes, begin = call.sizes or [len(x)], 0
    chunks: list[Chunk] = []
    for model, n_tokens in enumerate(sizes):
        for start in range(0, n_tokens, size):
            n = min(size, n_tokens - start)
            if not chunks or sum(chunks[-1].sizes) + n > size:
                chunks.append(Chunk(begin, [0] * len(sizes)))
            chunks[-1].sizes[model] = n
            begin += n
    return chunks


def logits_of(
    operands: Operands, head: ChunkedHead[Any], call: Call, chunk: Chunk
) -> tuple[Tensor, float | Tensor, Slopes]:
    """Return the logits [n, v] of a chunk, its temperature, and what its backward needs.

    With a compile_backend, logits have any dtype and are not divided by the temperature yet. Without a
    compile_backend, logits are divided, in fp32 (fp64 if x is fp64), and share no memory with the operands.
    """
    x, weight, bias, adapted_x, a, b = operands
    rows, temperature, low_rank, of_cap = chunk.rows, head.temperature, [], None
    if isinstance(temperature, Tensor):
        temperature = temperature[rows]
    logits = x[rows] if weight is None else head.product(x[rows], weight, bias)
    if adapted_x is not None:
        adapters = adapted_x[rows], a, b, chunk.sizes, call.scale, head.product
        logits, low_rank = add_products(logits, *adapters, in_place=True)
    if call.cap is not None:
        shares = logits.to(torch.promote_types(logits.dtype, torch.float32)).div(call.cap).tanh_()
        of_cap, logits = 1 - shares.square(), shares.mul_(call.cap)
    if head.compile_backend is None:
        logits = _in_fp32(logits, temperature, copy=weight is None)
    return logits, temperature, Slopes(low_rank, of_cap)


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
    """Return four numbers per token, [n, 4], that ranks gather instead of their logits z [n, v].

    The maximum; the sum of e = exp(z - maximum); the label's logit, 0 if another rank has it; the
    sum of e * (z - maximum), 0 without wants_entropy. If not compiled, the logits are overwritten.
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


def hide_entries_(logits: Tensor, n_entries: int | None, call: Call) -> Tensor:
    """Give vocabulary entries >= n_entries the probability 0: set their logits to -1e30.

    logits: [n, v]. n_entries: None changes nothing.
    """
    if n_entries is not None:
        logits[
            :, max(0, n_entries - call.first) :
        ] = -1e30  # with -inf, a rank whose entries are all hidden would compute nan
    return logits


def log_of_sum(exps: Tensor) -> Tensor:
    """Return log(exps), but finite where exps is 0, so that a probability 0 times the result is 0."""
    return exps.clamp(min=torch.finfo(exps.dtype).tiny).log()


def logprobs_of_logits(chosen: Tensor, highest: Tensor, sums: Tensor) -> Tensor:
    """Return log-probabilities of tokens. chosen: their logits. highest, sums: from `exponentials_`.

    Trainer and generator both call this function, because another formula would round differently.
    """
    return (chosen - highest) - sums.log()


def of_all_ranks(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather numbers [n, c] from all ranks; return [ranks, n, c]."""
    if group is None:
        return numbers[None]
    n_ranks = dist.get_world_size(group)
    gathered = OPS.all_gather_into_tensor(numbers, n_ranks, group.group_name)
    return OPS.wait_tensor(gathered).view(n_ranks, *numbers.shape)


def _over_ranks(
    statistics: Tensor, labels: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Combine `_statistics` [n, 4] of all ranks; return four tensors in the shape of the n labels.

    They are the highest logit z; the sum of exp(z - highest); the label's log-probability, 0 for labels
    IGNORE_INDEX; the entropy, undefined if `_statistics` was called without wants_entropy.
    """
    of_ranks = of_all_ranks(statistics, group)
    highest, sums, label_logits, dots = of_ranks.view(len(of_ranks), *labels.shape, 4).unbind(-1)
    top = highest.amax(0)
    shift = highest - top  # rescales each rank's sums to the highest logit of all ranks
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
    """Return the gradient of the logits z, [n, v] in the dtype of `logits`.

    grad, grad_entropy: [n], of logprobs and entropies. If not compiled, the logits are overwritten.
    With p the probabilities, H the entropy:
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
    if torch.compiler.is_compiling():  # a scatter would be a separate kernel after `result`
        columns = torch.arange(result.shape[1], device=result.device)
        return result + torch.where(columns == index, values, 0)
    return result.scatter_add_(1, index, values)


def _own_index(own_labels: Tensor, n_entries: int) -> tuple[Tensor, Tensor]:
    """Return the labels' columns [n, 1] on this rank, and bool [n], True where another rank has the label.

    Labels of other ranks get column 0.
    """
    is_elsewhere = (own_labels < 0) | (own_labels >= n_entries)
    return own_labels.masked_fill(is_elsewhere, 0)[:, None], is_elsewhere
