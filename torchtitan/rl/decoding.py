"""Continuing many prompts at once with a model on this process, or with a rank's part of one.

P prompts, N rows to be continued (one for each completion wanted), B of them still in the cache,
L new tokens at most, V vocabulary.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchtitan.distributed.dtensor import whole_tensor
from torchtitan.generation.kv_cache import kv_cache
from torchtitan.generation.sampling import draw

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from torchtitan.engine import TrainingEngine
    from torchtitan.models.decoder import Decoder
    from torchtitan.rl.types import SamplingConfig

# What is known of a new token: its id, log-prob, and the mass that it was drawn from.
N_FIELDS = 3


class LocalDecoder:
    """A whole model on this process.

    group: the ranks that generate shares of one batch, this one among them; None for one rank
        alone.
    autocast: a context for the forward.
    """

    def __init__(
        self,
        model: "Decoder",
        group: "ProcessGroup | None" = None,
        autocast: AbstractContextManager | None = None,
    ):
        self.parts: list[Decoder] = [model]
        self.group = group
        self.autocast = nullcontext() if autocast is None else autocast

    @property
    def device(self) -> torch.device:
        return getattr(self.parts[0], self.parts[0].rope_buffer_name).device

    @property
    def max_length(self) -> int:
        """Tokens of a row, at most: the length of the RoPE table."""
        return getattr(self.parts[0], self.parts[0].rope_buffer_name).shape[0]

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Put the model into evaluation, without gradients; it leaves as it came."""
        was_training = [m for part in self.parts for m in part.modules() if m.training]
        for part in self.parts:
            part.eval()
        try:
            with torch.no_grad(), self.autocast:
                yield
        finally:
            for module in was_training:
                module.training = True

    def run(self, tokens: Tensor, **kwargs: Any) -> Tensor | None:
        """The model's forward; None on ranks that don't see logits."""
        return whole_tensor(self.parts[0](tokens, **kwargs))

    def agree(self, drawn: Tensor | None, n_rows: int) -> Tensor:
        """What was drawn, [n_rows, N_FIELDS] fp64, on all ranks of the model."""
        assert drawn is not None
        return drawn

    def is_any(self, here: bool) -> bool:
        """Whether it is so on any rank of the group. All of them have to ask."""
        if self.group is None:
            return here
        flag = torch.tensor(float(here), device=self.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self.group)
        return bool(flag)

    def share_of(self, n_rows: int) -> tuple[range, int]:
        """This rank's rows of all, and how many each rank has, with those it makes up."""
        if self.group is None:
            return range(n_rows), n_rows
        rank, size = self.group.rank(), self.group.size()
        per_rank = -(-n_rows // size)
        return range(min(rank * per_rank, n_rows), min((rank + 1) * per_rank, n_rows)), per_rank

    def gather(self, shares: Tensor) -> Tensor:
        """[rows per rank, ...] of each rank, one after another."""
        if self.group is None:
            return shares
        gathered = [torch.empty_like(shares) for _ in range(self.group.size())]
        torch.distributed.all_gather(gathered, shares.contiguous(), group=self.group)
        return torch.cat(gathered)


class EngineDecoder(LocalDecoder):
    """An engine's own modules, however they are spread over ranks; nothing is copied.

    Every rank of the engine has to make the same calls. Ranks that would train on different
    data generate different rows, those of one model (tensor, pipeline parallelism) the same.
    """

    def __init__(self, engine: "TrainingEngine"):
        self.engine = engine
        self.parts = engine.model_parts  # type: ignore[assignment]
        mesh = engine.parallel_dims.get_optional_mesh("loss")
        self.group = None if mesh is None else mesh.get_group()
        self.autocast = engine.maybe_enable_amp

    @contextmanager
    def ready(self) -> Iterator[None]:
        """See `LocalDecoder.ready`; FSDP's parameters are shards again afterwards."""
        with super().ready(), _uncompiled():
            try:
                yield
            finally:
                if "torch.distributed.fsdp" in sys.modules:
                    from torchtitan.distributed.fsdp import reshard_model

                    for part in self.parts:
                        reshard_model(part)

    def run(self, tokens: Tensor, **kwargs: Any) -> Tensor | None:
        schedule = self.engine.pp_schedule
        if schedule is None:
            return super().run(tokens, **kwargs)
        outputs = schedule.eval(
            arg_mbs=[(tokens,)], kwarg_mbs=[kwargs], input_shapes=[tuple(tokens.shape)]
        )
        return whole_tensor(outputs[0]) if self.engine.pp_has_last_stage else None

    def agree(self, drawn: Tensor | None, n_rows: int) -> Tensor:
        schedule = self.engine.pp_schedule
        if schedule is None:
            return super().agree(drawn, n_rows)
        if drawn is None:
            drawn = torch.empty(n_rows, N_FIELDS, dtype=torch.float64, device=self.device)
        return schedule.broadcast_from_last_stage(drawn)


def _uncompiled() -> AbstractContextManager:
    """Run compiled modules as they were written: the cache takes a new shape with each token.

    For all threads: a model of its own needs no such thing, and a trainer goes on compiled.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def continue_prompts(
    decoder: LocalDecoder,
    prompts: Sequence[Sequence[int]],
    prompt_of_row: Sequence[int],
    uniform: Tensor,
    sampling: "SamplingConfig",
    max_rows: int,
) -> tuple[Tensor, list[int]]:
    """Return what was drawn, fp64 [N, L, N_FIELDS], and how many tokens each row has of it.

    Collective over the decoder's group; each rank gets the rows of all.

    prompt_of_row: for each of N rows, the index of the prompt that it continues.
    uniform: fp64 [N, L] from [0, 1), one number for each token that may be drawn.
    max_rows: that many rows at once on a rank; 0 for all.
    """
    own, per_rank = decoder.share_of(len(prompt_of_row))
    # Ranks have to make equally many forwards: where one has fewer rows, it repeats one.
    rows = [*own, *[0] * (per_rank - len(own))]
    is_real = [True] * len(own) + [False] * (per_rank - len(own))
    results = []
    size = max_rows or per_rank
    with decoder.ready():
        for first in range(0, per_rank, size):
            chunk = rows[first : first + size]
            results.append(
                _continue_rows(
                    decoder,
                    prompts,
                    [prompt_of_row[row] for row in chunk],
                    uniform[chunk].to(decoder.device),
                    is_real[first : first + size],
                    sampling,
                )
            )
        packed = decoder.gather(torch.cat(results)).cpu()[: len(prompt_of_row)]
    drawn = packed[:, 1:].unflatten(1, (-1, N_FIELDS))
    return drawn, packed[:, 0].long().tolist()


def _continue_rows(
    decoder: LocalDecoder,
    prompts: Sequence[Sequence[int]],
    prompt_of_row: list[int],
    uniform: Tensor,
    is_open: list[bool],
    sampling: "SamplingConfig",
) -> Tensor:
    """[N, 1 + L * N_FIELDS]: each row's number of new tokens, and what was drawn.

    is_open: rows that are wanted; the others are continued as long as any rank has one open.
    """
    n_rows, n_new = uniform.shape
    drawn = torch.zeros(n_rows, n_new, N_FIELDS, dtype=torch.float64, device=decoder.device)
    n_drawn = [n_new] * n_rows
    in_cache = list(range(n_rows))  # the row that each row of the cache belongs to
    is_open = list(is_open)

    # Each prompt is read once, however many rows continue it.
    read = sorted(set(prompt_of_row))
    padded, lengths = _pad([prompts[index] for index in read], decoder.device)
    with kv_cache(decoder.parts, padded.shape[1] + n_new - 1, decoder.run) as forward:
        logits = forward(padded, lengths, last_only=True)
        place = [read.index(index) for index in prompt_of_row]
        if place != list(range(len(read))):
            forward.keep_rows(place)
            logits = None if logits is None else logits[place]
        for step in range(n_new):
            latest = decoder.agree(_draw(logits, uniform[in_cache, step], sampling), len(in_cache))
            drawn[in_cache, step] = latest
            if step == n_new - 1:
                break
            tokens = latest[:, 0].long()
            if sampling.stop_token_ids:
                for i, token in enumerate(tokens.tolist()):
                    if is_open[i] and token in sampling.stop_token_ids:
                        is_open[i] = False
                        n_drawn[in_cache[i]] = step + 1
                if not decoder.is_any(any(is_open)):
                    break
                # Rows that are done cost as much as others. Dropping them copies the cache: do it
                # when half are, and keep one, as other ranks may be waiting for this one.
                if sum(is_open) <= len(is_open) // 2 and len(is_open) > 1:
                    kept = [i for i, wanted in enumerate(is_open) if wanted] or [0]
                    forward.keep_rows(kept)
                    tokens = tokens[kept]
                    in_cache = [in_cache[i] for i in kept]
                    is_open = [is_open[i] for i in kept]
            logits = forward(tokens[:, None], last_only=True)
    counts = torch.tensor(n_drawn, dtype=drawn.dtype, device=drawn.device)
    return torch.cat((counts[:, None], drawn.flatten(1)), dim=1)


def _pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, list[int]]:
    """Prompts [P, T], zeros at their ends, and their lengths."""
    lengths = [len(prompt) for prompt in prompts]
    padded = [[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts]
    return torch.tensor(padded, device=device), lengths


def _draw(logits: Tensor | None, uniform: Tensor, sampling: "SamplingConfig") -> Tensor | None:
    """[B, 1, V] -> [B, N_FIELDS]."""
    if logits is None:
        return None
    tokens, logprobs, kept_mass = draw(
        logits[:, -1],
        uniform,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )
    if kept_mass is None:
        kept_mass = torch.ones_like(logprobs)
    return torch.stack([x.double() for x in (tokens, logprobs, kept_mass)], dim=-1)
