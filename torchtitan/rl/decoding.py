"""Completes many prompts at once, with a whole model or with this rank's part of a model.

P prompts, N rows to continue (one row per completion), B rows in the cache at a time, L new tokens
at most, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.distributed.dtensor import whole_tensor
from torchtitan.distributed.processes.ranks import all_ranks
from torchtitan.engine import TrainingEngine
from torchtitan.generation.kv_cache import CachedForward, kv_cache
from torchtitan.generation.sampling import Drawn, draw
from torchtitan.models.decoder import Decoder
from torchtitan.rl.types import Completion, SamplingConfig
from torchtitan.step.runner import Runner
from torchtitan.tools.compiler import uncompiled
from torchtitan.tools.logging import logger, warn_once
from torchtitan.tools.utils import free_memory

N_FIELDS = len(Drawn._fields)
# Waiting rows enter the cache when 1/8 of the cache's places are free.
PLACES_PER_ENTRY = 8


@dataclass(frozen=True)
class LocalDecoder:
    """A model, or this rank's parts of a model, for `continue_prompts`.

    runner: holds the model. group: the rows of a call are divided among the ranks of this group.
    runs_uncompiled: run compiled modules in eager mode.
    """

    runner: Runner
    group: dist.ProcessGroup | None = None
    runs_uncompiled: bool = False

    @classmethod
    def from_model(
        cls, model: Decoder, autocast: contextlib.AbstractContextManager | None = None
    ) -> "LocalDecoder":
        """Return the decoder of a whole model on this process. autocast: a context for the forward pass."""
        device, nothing = getattr(model, model.rope_buffer_name).device, contextlib.nullcontext
        # `nothing` stands for the train context, which decoding does not need.
        return cls(Runner([model], device, nothing, autocast or nothing()))

    @classmethod
    def from_engine(cls, engine: TrainingEngine) -> "LocalDecoder":
        """Return the decoder of an engine's own modules, in any layout; all ranks make the same calls.

        Ranks along the mesh axis "loss" generate different rows. Ranks that split one model generate the
        same rows.
        """
        mesh = engine.parallel_dims.get_optional_mesh("loss")
        return cls(engine.runner, None if mesh is None else mesh.get_group(), True)

    @property
    def max_length(self) -> int:
        """The length of the model's RoPE table, which limits the length of a row."""
        model: Any = self.runner.model_parts[0]
        return len(getattr(model, model.rope_buffer_name))

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Put the model into evaluation mode, without gradients; restore its state afterwards."""
        nothing = contextlib.nullcontext
        # Compiled modules would recompile for each new shape of the cache. `uncompiled` affects all
        # threads, so it is only used for an engine's modules.
        as_written = uncompiled() if self.runs_uncompiled else nothing()
        gathered = self.runner.keep_gathered() if self._may_keep_gathered() else nothing()
        evaluation = self.runner.mode(training=False)
        with evaluation, torch.no_grad(), self.runner.amp, as_written, gathered:
            try:
                yield
            finally:
                self.runner.reshard()

    def _may_keep_gathered(self) -> bool:
        """Return True if every rank has memory to keep all weights gathered for the whole generation."""
        needed, free = self.runner.bytes_to_keep_gathered(), free_memory(self.runner.device)
        # `needed` is 0 on all ranks or on none, so no rank waits in the all-reduce below.
        if not needed:
            return False
        # Leave half of the free memory for keys and values.
        fits = needed <= free / 2
        if self.group is not None:
            on_all = torch.tensor(int(fits), device=self.runner.device)
            dist.all_reduce(on_all, dist.ReduceOp.MIN, group=self.group)
            fits = bool(on_all)
        if not fits:
            warn_once(
                logger,
                f"generation gathers each layer's weights for each token, which is slow: all weights "
                f"take {needed / 2**30:.1f} GiB, more than half of a rank's free memory, here "
                f"{free / 2**30:.1f} GiB; use more ranks, or tensor parallelism",
            )
        return fits

    def run(self, tokens: Tensor, **kwargs: Any) -> Tensor | None:
        """Return the logits of one forward; None on ranks without the last stage.

        Used instead of `Runner.run`, which exits autocast and reshards FSDP's root unit after every forward,
        and so would cast the weights and gather the root unit again for every token.
        """
        schedule = self.runner.schedule
        if schedule is None:
            return whole_tensor(self.runner.model_parts[0](tokens, **kwargs))
        outputs = schedule.eval(
            arg_mbs=[(tokens,)], kwarg_mbs=[kwargs], input_shapes=[tuple(tokens.shape)]
        )
        return whole_tensor(outputs[0]) if outputs else None


def continue_prompts(
    decoder: LocalDecoder,
    prompts: Sequence[Sequence[int]],
    prompt_of_row: Sequence[int],
    uniform: Tensor,
    sampling: SamplingConfig,
    max_rows: int,
    next_version: Callable[[], int] = lambda: 0,
    records_experts: bool = False,
    on_rows: Callable[[list[int]], None] = lambda _: None,
) -> list[Completion]:
    """Return each row's completion. Collective over the decoder's group.

    prompt_of_row: the index of each row's prompt; rows of one prompt are consecutive.
    uniform: random numbers in [0, 1), fp64 [N, L], one for each token that may be drawn.
    max_rows: largest number of rows that a rank continues at once; further rows wait. 0 means no limit.
    next_version: called before each forward; returns the version of the forward's weights. It may
        update the weights, unless ranks generate together; the cache keeps entries from older weights, as in
        PipelineRL (Piché et al. 2025, arXiv:2509.19128).
    on_rows: called before each forward with the prompt index of each row in the forward.
    """
    group, n_rows = decoder.group, len(prompt_of_row)
    rank, n_ranks = (0, 1) if group is None else (group.rank(), group.size())
    per_rank = -(-n_rows // n_ranks)
    # All ranks have to make the same number of forwards, so a rank without rows continues row 0.
    own = [row if row < n_rows else 0 for row in range(rank * per_rank, (rank + 1) * per_rank)]
    own_prompts = [prompt_of_row[row] for row in own]
    max_length = max(len(prompts[i]) for i in own_prompts) + uniform.shape[1] - 1
    parts = decoder.runner.model_parts
    with decoder.ready(), kv_cache(parts, max_length, decoder.run, records_experts) as forward:
        rows = _Rows(decoder, forward, prompts, own_prompts, next_version, on_rows, sampling)
        n_wanted = max(0, min(per_rank, n_rows - rank * per_rank))
        rows.draw_all(uniform[own].to(decoder.runner.device), n_wanted, max_rows or per_rank)
        drawn, experts = rows.drawn.cpu(), rows.experts
        if records_experts:
            together = torch.cat(experts)
            if (schedule := decoder.runner.schedule) is not None:
                # Convert to int32, because no backend reduces int16.
                summed = together.int()
                # Each stage has recorded only its own layers.
                dist.all_reduce(summed, dist.ReduceOp.MAX, group=schedule.group)
                together = summed.to(together.dtype)
            lengths = [len(of_row) for of_row in experts]
            experts = [of_row.clone() for of_row in together.cpu().split(lengths)]
    found = []
    for values, versions, of_row in zip(drawn, rows.versions, experts, strict=True):
        tokens, logprobs = values[: len(versions)].T.tolist()
        token_ids = tuple(map(int, tokens))
        has_one_version = len(set(versions)) == 1
        found.append(
            Completion(
                token_ids=token_ids,
                token_logprobs=tuple(logprobs),
                finish_reason="stop" if sampling.stops_at(token_ids) else "length",
                policy_version=min(versions),
                token_versions=None if has_one_version else tuple(versions),
                routed_experts=of_row,
            )
        )
    if group is None:
        return found
    return list(chain.from_iterable(all_ranks(found, group)))[:n_rows]


@dataclass
class _Rows:
    """The rows that a rank continues, in order. A row waits, has a place in the cache, or has ended.

    For each place: `row_at` is the index of its row, `is_open` is True until the row ends, `tokens` is
    the row's latest token. For each row: `drawn` [N, L, N_FIELDS], `versions` (the weight version for each
    sampled token), and `experts` [tokens, layers, k] once the row has ended, if the cache records experts.
    """

    decoder: LocalDecoder
    forward: CachedForward
    prompts: Sequence[Sequence[int]]
    prompt_of_row: list[int]
    next_version: Callable[[], int]
    on_rows: Callable[[list[int]], None]
    sampling: SamplingConfig
    # Rows [0, n_begun) have or had a place in the cache. The prompts of rows [0, n_read) were prefilled,
    # so rows [n_begun, n_read) wait only for a place.
    n_begun: int = 0
    n_read: int = 0

    def __post_init__(self) -> None:
        self.versions: list[list[int]] = [[] for _ in self.prompt_of_row]
        self.experts: list[Any] = [None] * len(self.prompt_of_row)
        # The token ids that each row has drawn, to find stop tokens and stop strings.
        self._ids: list[list[int]] = [[] for _ in self.prompt_of_row]

    def draw_all(self, uniform: Tensor, n_wanted: int, n_places: int) -> None:
        """Draw until all rows have ended. n_wanted: number of real rows; all later rows are dummies.

        Each iteration makes one forward: over prompts, or over one token per row in the cache. So all ranks
        of a group make the same number of forwards, although they prefill prompts at different times.
        """
        n_rows, n_new = uniform.shape
        self.uniform, self.n_wanted = uniform, n_wanted
        self.drawn = uniform.new_zeros(n_rows, n_new, N_FIELDS)
        n_places = min(n_places, n_rows)
        self.row_at, self.is_open = list(range(n_places)), [False] * n_places
        self.tokens = torch.zeros(n_places, dtype=torch.int64, device=uniform.device)
        # Prefill several prompts together, because a forward per prompt would delay all other rows.
        places_per_entry = max(1, n_places // PLACES_PER_ENTRY)
        while self._n_left():
            n_waiting, n_free = n_rows - self.n_begun, self.is_open.count(False)
            may_enter = n_waiting > 0 and n_free >= min(n_waiting, places_per_entry)
            reads = may_enter and self.n_begun == self.n_read
            if reads:
                self._read_prompts(n_free)
            if may_enter:
                self._enter()
            elif not n_waiting:
                self._drop_ended()
            if not reads:
                self._continue()

    def _n_left(self) -> int:
        """Return the number of unfinished rows on all ranks of the group. Collective."""
        n_left = sum(self.is_open) + len(self.prompt_of_row) - self.n_begun
        if self.decoder.group is None:
            return n_left
        of_ranks = torch.tensor(n_left, device=self.tokens.device)
        dist.all_reduce(of_ranks, group=self.decoder.group)
        return int(of_ranks)

    def _read_prompts(self, n_free: int) -> None:
        """Prefill each prompt of the next rows once; keep cache and logits until these rows get a place."""
        of_row, first = self.prompt_of_row, self.n_read
        self._read = read = sorted(set(of_row[first : first + n_free]))
        while self.n_read < len(of_row) and of_row[self.n_read] in read:
            self.n_read += 1
        lengths = [len(self.prompts[i]) for i in read]
        padded = [[*self.prompts[i], *[0] * (max(lengths) - len(self.prompts[i]))] for i in read]
        # If each of the first prompts has only one row, prefill the main cache directly.
        is_direct = not self.forward.lengths and read == of_row[: self.n_read]
        self._cache_of_read = self.forward if is_direct else self.forward.aside(max(lengths))
        self._version_of_read = self.next_version()
        self.on_rows(read)
        tokens = torch.tensor(padded, device=self.tokens.device)
        self._logits_of_read = self._cache_of_read(tokens, lengths, last_only=True)

    def _enter(self) -> None:
        """Move rows with prefilled prompts to free places, and draw their first tokens."""
        places = self._places(is_open=False)[: self.n_read - self.n_begun]
        for place in places:
            self.row_at[place] = self.n_begun
            self.n_begun += 1
        sources = [self._read.index(self.prompt_of_row[self.row_at[place]]) for place in places]
        if self._cache_of_read is not self.forward:
            self.forward.put_rows(places, self._cache_of_read, sources)
        self._draw(places, self._logits_of_read, sources, self._version_of_read)
        if self.n_begun == self.n_read:
            del self._cache_of_read, self._logits_of_read

    def _continue(self) -> None:
        """Draw a token for each open row."""
        lengths = self.forward.lengths
        # Rows that fill the cache have ended; reset their lengths, so that the forward does not raise.
        lengths[:] = [0 if n == self.forward.max_length else n for n in lengths]
        version = self.next_version()
        self.on_rows([self.prompt_of_row[row] for row in self.row_at])
        logits = self.forward(self.tokens[:, None], last_only=True)
        if places := self._places(is_open=True):
            self._draw(places, logits, places, version)

    def _places(self, is_open: bool) -> list[int]:
        return [place for place, goes_on in enumerate(self.is_open) if goes_on is is_open]

    def _draw(
        self, places: list[int], logits: Tensor | None, sources: list[int], version: int
    ) -> None:
        """Draw a token for the row at each place. sources: for each place, the index of its logits."""
        rows = [self.row_at[place] for place in places]
        steps = [len(self.versions[row]) for row in rows]
        device, sampling, schedule = self.tokens.device, self.sampling, self.decoder.runner.schedule
        at_place, at_source, at_row, at_step = torch.tensor(
            [places, sources, rows, steps], device=device
        )
        latest = torch.empty(len(places), N_FIELDS, dtype=torch.float64, device=device)
        if logits is not None:
            options = {"temperature": sampling.temperature, "top_k": sampling.top_k}
            of_rows, numbers = logits[at_source, -1], self.uniform[at_row, at_step]
            drawn_now = draw(of_rows, numbers, top_p=sampling.top_p, **options)
            latest = torch.stack([values.double() for values in drawn_now], dim=-1)
        if schedule is not None:
            latest = schedule.broadcast_from_last_stage(latest)
        self.drawn[at_row, at_step] = latest
        self.tokens[at_place] = latest[:, 0].long()
        ids = latest[:, 0].long().tolist() if sampling.may_stop else [-1] * len(rows)
        for place, row, token in zip(places, rows, ids, strict=True):
            self.versions[row].append(version)
            self._ids[row].append(token)
            has_ended = len(self.versions[row]) == self.uniform.shape[1]
            has_ended |= sampling.may_stop and sampling.stops_at(self._ids[row])
            self.is_open[place] = row < self.n_wanted and not has_ended
            if self.forward.experts is not None and not self.is_open[place]:
                n_read = self.forward.lengths[place]
                self.experts[row] = self.forward.experts.of_row(place, n_read)

    def _drop_ended(self) -> None:
        """Drop ended rows once half of the rows have ended.

        Keep at least one row, because all ranks must make the same number of forwards.
        """
        if len(self.is_open) == 1 or sum(self.is_open) > len(self.is_open) // 2:
            return
        kept = self._places(is_open=True) or [0]
        self.forward.keep_rows(kept)
        self.tokens = self.tokens[kept]
        self.row_at = [self.row_at[place] for place in kept]
        self.is_open = [self.is_open[place] for place in kept]
