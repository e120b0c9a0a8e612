"""Heads that return log-probabilities, entropies and the most probable tokens, without storing all logits.

B rows, T tokens, M model dim, V vocabulary entries, v = V / tp entries on this rank; n tokens in a
chunk; m models, r rank of their adapters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.distributed.dtensor import is_dtensor
from torchtitan.loss.chunked_logits import (
    Call,
    ChunkedHead,
    LogProbs,
    Operands,
    check_labels,
    check_temperature,
    chunks_of,
    exponentials_,
    hide_entries_,
    log_of_sum,
    logits_of,
    logprobs_of_logits,
    of_all_ranks,
)
from torchtitan.numerics.batch_invariant import batch_invariant_linear
from torchtitan.numerics.linear import linear


class TokenOutputs(NamedTuple):
    """The result of `TokenLogProbs`; a tuple, because FSDP and DDP find its tensors in tuples.

    logprobs: [B, T] fp32, of the label at each position; 0 where the label is IGNORE_INDEX.
    entropy: [B, T] fp32, in nats, of the distribution at each position; None without `entropy`.
    """

    logprobs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class TokenLogProbs(ChunkedHead[TokenOutputs]):
    """A head: turns hidden states into `TokenOutputs` inside a decoder's output projection.

    temperature: divides the logits, also for the entropy. A number; a tensor with a number per row
        [B] or token [B, T]; or, in the engine's steps, the name of the batch entry with that tensor.
    chunk_tokens, compile_backend: see `ChunkedHead`.
    batch_invariant: a token's logits do not depend on other tokens, see `numerics.batch_invariant`.

    Raises ValueError for a temperature or a chunk that is not positive, and for a name that the
    batch does not have. Temperatures on an accelerator are not checked.
    """

    temperature: float | str | Tensor = 1.0
    entropy: bool = False  # also compute the entropy, which takes about a tenth longer
    chunk_tokens: int | None = None
    compile_backend: str | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.temperature, str | Tensor):
            check_temperature(self.temperature)

    def with_batch(self, batch: Mapping[str, Any]) -> Self:
        """Return the head for one batch: a temperature given by name is looked up in the batch."""
        if not isinstance(self.temperature, str):
            return self
        values = batch.get(self.temperature)
        if not isinstance(values, Tensor):
            raise ValueError(
                f"TokenLogProbs.temperature = {self.temperature!r} must name a tensor [B] or [B, T] of the "
                f"batch, which has {sorted(batch)}; add it"
            )
        return replace(self, temperature=values)

    def compute(self, operands: Operands, call: Call, labels: Tensor) -> TokenOutputs:
        return TokenOutputs(*LogProbs.apply(*operands, labels, self._of_tokens(labels), call))

    @property
    def product(self) -> Callable[..., Tensor]:
        return batch_invariant_linear if self.batch_invariant else linear

    def _of_tokens(self, labels: Tensor) -> Self:
        """Return this head, with a tensor temperature expanded to one entry per token, [B * T, 1] fp32."""
        temperature = self.temperature
        if isinstance(temperature, str):
            raise ValueError(
                f"TokenLogProbs.temperature = {temperature!r} names an entry of the batch, which only the "
                "engine's steps look up; give a tensor [B] or [B, T]"
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
        # Padding may have temperature 0, which would put nan into the gradient.
        is_padding = (labels == IGNORE_INDEX) & (temperature == 0)
        temperature = temperature.masked_fill(is_padding, 1).reshape(-1, 1)
        if temperature.device.type == "cpu" and temperature.numel():
            check_temperature(float(temperature.min()))
        return replace(self, temperature=temperature)


@dataclass(frozen=True)
class TopTokens(TokenLogProbs):
    """A head: finds the k most probable tokens at each position, without gradients.

    Returns [B, T, 2 k] fp32: k token ids (below 2^24), the most probable first, then their log-probs.
    with_rest: append the log of the total probability of all other tokens, [B, T, 2 k + 1].
    n_entries: number of vocabulary entries to consider; later entries get probability 0. None: all.
    """

    k: int = 1
    with_rest: bool = False
    n_entries: int | None = None

    def compute(  # type: ignore[override]
        self, operands: Operands, call: Call, labels: Tensor
    ) -> Tensor:
        # Not compiled, because this head is called rarely.
        head = replace(self._of_tokens(labels), compile_backend=None)
        best = [labels.new_zeros(0, 2 * self.k + self.with_rest, dtype=torch.float32)]
        with torch.no_grad():
            for chunk in chunks_of(operands.x, self, call):
                logits, _, _ = logits_of(operands, head, call, chunk)
                hide_entries_(logits, self.n_entries, call)
                chosen, ids = logits.topk(min(self.k, logits.shape[1]))
                sums = torch.stack(exponentials_(logits), dim=1)
                others = logits.scatter_(1, ids, 0).sum(1, keepdim=True)
                ids = (ids + call.first).to(chosen.dtype)
                own = torch.cat((sums, others, chosen, ids), dim=1)
                best.append(self._best_of_ranks(of_all_ranks(own, call.group)))
            return torch.cat(best).float().view(*labels.shape, -1)

    def _best_of_ranks(self, of_ranks: Tensor) -> Tensor:
        """Merge the k' best tokens of each rank's vocabulary into the result's rows.

        of_ranks: [ranks, n, 3 + 2 k']: the highest logit; the sum of exp(logit - highest); this sum without
            the k' best tokens; the logits of these tokens; their ids.
        """
        highest, sums, others = of_ranks[..., :3].unbind(-1)
        top = highest.amax(0)
        scale = (highest - top).exp()
        total = (scale * sums).sum(0)
        logits, ids = (part.transpose(0, 1).flatten(1) for part in of_ranks[..., 3:].chunk(2, -1))
        chosen, places = logits.topk(self.k)
        logprobs = logprobs_of_logits(chosen, top[:, None], total[:, None])
        # 1 - sum of the probabilities would lose its significant digits if the sum is close to 1.
        not_chosen = (logits - top[:, None]).exp().scatter(1, places, 0).sum(1)
        rest = log_of_sum((scale * others).sum(0) + not_chosen) - total.log()
        rests = (rest[:, None],) if self.with_rest else ()
        return torch.cat((ids.gather(1, places), logprobs, *rests), dim=1)


def token_logprobs(
    logits: Tensor, labels: Tensor, *, temperature: float | Tensor = 1.0, entropy: bool = False
) -> TokenOutputs:
    """Return the result of `TokenLogProbs` from existing logits [B, T, V].

    logits: plain, or a DTensor split along V, which stays split; any dtype. labels: [B, T], plain.
    Raises ValueError for a DTensor with another layout.
    """
    check_labels(labels, logits.shape[:-1], logits.shape[-1])
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
    head, operands = TokenLogProbs(temperature, entropy), Operands(logits.flatten(0, -2))
    return head.compute(operands, Call(first, group), labels)
