"""Continuing many prompts at once with a model on this process, or with a rank's part of a model.

P prompts, N rows to continue (one row per completion), B rows in the cache at a time, L new tokens
at most, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from torchtitan.distributed.dtensor import whole_tensor
from torchtitan.engine import TrainingEngine
from torchtitan.generation.kv_cache import CachedForward, kv_cache
from torchtitan.generation.sampling import Drawn, draw
from torchtitan.models.decoder import Decoder
from torchtitan.rl.types import SamplingConfig
from torchtitan.step.runner import Runner
from torchtitan.tools.compiler import uncompiled
from torchtitan.tools.logging import logger, warn_once
from torchtitan.tools.utils import free_memory

N_FIELDS = len(Drawn._fields)
# Waiting rows enter the cache once 1/8 of its places are free.
PLACES_PER_ENTRY = 8


@dataclass(frozen=True)
class LocalDecoder:
    """A model, or this rank's parts of a model, for `continue_prompts`.

    runner: holds the model. group: ranks that share out the rows of a call.
    runs_uncompiled: run compiled modules without their compiled code.
    """

    runner: Runner
    group: dist.ProcessGroup | None = None
    runs_uncompiled: bool = False

    @classmethod
    def of_model(
        cls, model: Decoder, autocast: contextlib.AbstractContextManager | None = None
    ) -> "LocalDecoder":
        """Return the decoder of a whole model on this process. autocast: a context for the forward."""
        device = getattr(model, model.rope_buffer_name).device
        nothing = contextlib.nullcontext
        # None: decoding runs no batches, so the runner needs nothing to process them.
        return cls(Runner([model], device, nothing, autocast or nothing()))

    @classmethod
    def of_engine(cls, engine: TrainingEngine) -> "LocalDecoder":
        """Return the decoder of an engine's own modules, in any layout; nothing is copied.

        Every rank of the engine has to make the same calls. Data-parallel ranks generate different
        rows; the ranks of one model (tensor, pipeline parallelism) generate the same rows.
        """
        mesh = engine.parallel_dims.get_optional_mesh("loss")
        return cls(engine.runner, None if mesh is None else mesh.get_group(), True)

    @property
    def rope_table(self) -> Tensor:
        """The model's RoPE table; its length is the length limit of a row."""
        model: Any = self.runner.model_parts[0]
        return getattr(model, model.rope_buffer_name)

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Put the model into evaluation mode, without gradients; restore its state afterwards."""
        # Otherwise modules are compiled again for each new shape of the cache. It applies to all threads,
        # so it is not used for a model that no trainer compiles.
        as_written = uncompiled() if self.runs_uncompiled else contextlib.nullcontext()
        gathered = contextlib.nullcontext
        if self._may_keep_gathered():
            gathered = self.runner.keep_gathered
        evaluation = self.runner.mode(training=False)
        with evaluation, torch.no_grad(), self.runner.amp, as_written, gathered():
            try:
                yield
            finally:
                self.runner.reshard()

    def _may_keep_gathered(self) -> bool:
        """Return True if every rank has memory for all weights at once. Collective over the group.

        Without it each forward, which is one token, gathers every layer.
        """
        needed, free = self.runner.bytes_to_keep_gathered(), free_memory(self.runner.device)
        if not needed:  # on all ranks alike
            return False
        # Keys and values need room, too.
        fits = needed <= free / 2
        if self.group is not None:
            on_all = torch.tensor(int(fits), device=self.runner.device)
            dist.all_reduce(on_all, dist.ReduceOp.MIN, group=self.group)
            fits = bool(on_all)
        if not fits:
            warn_once(
                logger,
                f"generation gathers the weights of each layer for each token: all layers together "
                f"take {needed / 2**30:.1f} GiB, which must be at most half of each rank's free "
                f"memory, here {free / 2**30:.1f} GiB; with more ranks, or tensor parallelism, "
                "generation is several times as fast",
            )
        return fits

    def run(self, tokens: Tensor, **kwargs: Any) -> Tensor | None:
        """Return the logits of one forward; None on ranks without the last stage.

        `Runner.run` is not used, because it leaves autocast and reshards FSDP's root unit after
        every forward. Here a forward is one token, and every token would cast the weights and gather
        the root unit again; `ready` does both once for all tokens.
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
) -> tuple[Tensor, list[list[int]], Tensor | None]:
    """Return the drawn tokens, fp64 [N, L, N_FIELDS], and for each row the versions that drew them.

    A row has as many tokens as versions; the rest of its L entries are not used. The third value is
    None, or with `records_experts` int16 [N, longest row - 1, layers, k]: see `Completion`.
    Collective over the decoder's group; each rank gets all rows.

    prompt_of_row: for each of N rows, the index of the prompt that it continues; rows of one prompt
        are consecutive.
    uniform: fp64 [N, L] from [0, 1), one number for each token that may be drawn.
    max_rows: number of rows that a rank continues at once; 0 for all. The other rows wait, and take
        the places of rows that have ended.
    next_version: called before each forward; returns the version of the forward's weights. It may
        update the weights, if no ranks generate together: keys and values in the cache stay, as in
        PipelineRL (Piché et al. 2025, arXiv:2509.19128).
    on_rows: called before each forward with the indices of the prompts that its rows continue.
    """
    group, n_rows = decoder.group, len(prompt_of_row)
    rank, n_ranks = (0, 1) if group is None else (group.rank(), group.size())
    per_rank = -(-n_rows // n_ranks)
    # All ranks have to make the same number of forwards: a rank without rows continues row 0.
    own = range(rank * per_rank, (rank + 1) * per_rank)
    rows, is_wanted = [row if row < n_rows else 0 for row in own], [row < n_rows for row in own]
    with decoder.ready():
        own_uniform = uniform[rows].to(decoder.runner.device)
        n_places = min(max_rows or per_rank, per_rank)
        own_rows = _Rows(decoder, own_uniform, is_wanted, sampling, n_places)
        if records_experts:
            own_rows.experts = [None] * len(rows)
        own_prompts = [prompt_of_row[row] for row in rows]
        _continue_rows(own_rows, prompts, own_prompts, next_version, on_rows)
        versions, drawn = own_rows.versions, own_rows.drawn
        counts = torch.tensor(
            [len(row) for row in versions], dtype=drawn.dtype, device=drawn.device
        )
        share = torch.cat((counts[:, None], drawn.flatten(1)), dim=1)
        shares = [share]
        if group is not None:
            shares = [torch.empty_like(share) for _ in range(n_ranks)]
            dist.all_gather(shares, share, group=group)
        packed = torch.cat(shares).cpu()[:n_rows]
        experts = None
        if records_experts:
            longest = max(map(len, prompts)) + uniform.shape[1] - 1
            experts = _experts_of_all(decoder, own_rows.experts, longest)[:n_rows]
    if group is not None:
        versions = [[next_version()] * n for n in packed[:, 0].long().tolist()]
    return packed[:, 1:].unflatten(1, (-1, N_FIELDS)), versions, experts


def _experts_of_all(decoder: LocalDecoder, of_rows: list[Tensor], longest: int) -> Tensor:
    """Return the experts of all ranks' rows [N, longest, layers, k] on the host. Collective.

    of_rows: this rank's rows [tokens, layers, k]; under a pipeline with the layers of this rank's
        stages only.
    """
    experts = torch.stack([F.pad(x, (0, 0, 0, 0, 0, longest - len(x)), value=-1) for x in of_rows])
    if decoder.runner.schedule is not None:
        of_stages = experts.int()  # no backend reduces int16
        dist.all_reduce(of_stages, dist.ReduceOp.MAX, group=decoder.runner.schedule.group)
        experts = of_stages.to(experts.dtype)
    if decoder.group is not None:
        own = experts.view(torch.uint8)
        shares = [torch.empty_like(own) for _ in range(decoder.group.size())]
        dist.all_gather(shares, own, group=decoder.group)
        experts = torch.cat(shares).view(experts.dtype)
    return experts.cpu()


class _Rows:
    """The rows that a rank continues, in order: some wait, some have a place in the cache.

    For each place: `row_at` is its row, `is_open` is True until the row ends, `tokens` is the row's
    latest token. For each row: `drawn` [N, L, N_FIELDS], `versions` of the weights that drew its
    tokens, and `experts` [tokens, layers, k] once it has ended, if they are recorded.
    is_wanted: False for rows that this rank continues only to take part in the forwards.
    """

    def __init__(
        self,
        decoder: LocalDecoder,
        uniform: Tensor,
        is_wanted: list[bool],
        sampling: SamplingConfig,
        n_places: int,
    ):
        self.decoder, self.uniform, self.is_wanted = decoder, uniform, is_wanted
        self.sampling, (n_rows, n_new), device = sampling, uniform.shape, uniform.device
        self.drawn = torch.zeros(n_rows, n_new, N_FIELDS, dtype=torch.float64, device=device)
        self.versions: list[list[int]] = [[] for _ in range(n_rows)]
        self.experts: list[Tensor | None] | None = None
        self._so_far: list[list[int]] = [[] for _ in range(n_rows)]  # token ids, to find stops
        self.row_at, self.is_open = list(range(n_places)), [False] * n_places
        self.tokens = torch.zeros(n_places, dtype=torch.int64, device=device)
        self.n_begun, self.n_waiting = 0, n_rows
        # A forward for the prompt of each single row would delay all other rows.
        self._places_per_entry = max(1, n_places // PLACES_PER_ENTRY)

    def places(self, is_open: bool) -> list[int]:
        return [place for place, goes_on in enumerate(self.is_open) if goes_on is is_open]

    def may_enter(self) -> bool:
        n_free = len(self.is_open) - sum(self.is_open)
        return self.n_waiting > 0 and n_free >= min(self.n_waiting, self._places_per_entry)

    def enter(self, end: int) -> list[int]:
        """Give free places to waiting rows, up to row `end`, and return these places."""
        places = self.places(is_open=False)[: end - self.n_begun]
        for place in places:
            self.row_at[place] = self.n_begun
            self.n_begun, self.n_waiting = self.n_begun + 1, self.n_waiting - 1
        return places

    def draw_at(
        self,
        places: list[int],
        logits: Tensor | None,
        sources: list[int],
        version: int,
        forward: CachedForward,
    ) -> None:
        """Draw a token for the rows at these places, from the rows `sources` of logits.

        forward: its cache has the rows at these places.
        """
        rows = [self.row_at[place] for place in places]
        steps = [len(self.versions[row]) for row in rows]
        device, sampling, schedule = self.tokens.device, self.sampling, self.decoder.runner.schedule
        indices = torch.tensor([places, sources, rows, steps], device=device)
        at_place, at_source, at_row, at_step = indices
        latest = torch.empty(len(places), N_FIELDS, dtype=torch.float64, device=device)
        if logits is not None:
            drawn_now = draw(
                logits[:, -1] if sources == list(range(len(logits))) else logits[at_source, -1],
                self.uniform[at_row, at_step],
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )
            latest = torch.stack([values.double() for values in drawn_now], dim=-1)
        if schedule is not None:
            latest = schedule.broadcast_from_last_stage(latest)
        self.drawn[at_row, at_step] = latest
        self.tokens[at_place] = latest[:, 0].long()
        ids = latest[:, 0].long().tolist() if sampling.may_stop else [-1] * len(rows)
        for place, row, token in zip(places, rows, ids, strict=True):
            self.versions[row].append(version)
            self._so_far[row].append(token)
            has_ended = len(self.versions[row]) == self.uniform.shape[1]
            has_ended |= sampling.may_stop and sampling.stops_at(self._so_far[row])
            self.is_open[place] = self.is_wanted[row] and not has_ended
            if self.experts is not None and not self.is_open[place]:
                stored = forward.experts.stored
                self.experts[row] = stored[place, : forward.lengths[place]].clone()

    def drop_ended(self, forward: CachedForward) -> None:
        """Drop ended rows from the cache once half of the rows have ended and none waits.

        Ended rows cost as much as open rows, but dropping them copies the cache. One row always
        stays, because other ranks may need this rank's forwards.
        """
        n_open = sum(self.is_open)
        if self.n_waiting or len(self.is_open) == 1 or n_open > len(self.is_open) // 2:
            return
        kept = self.places(is_open=True) or [0]
        forward.keep_rows(kept)
        self.tokens = self.tokens[kept]
        self.row_at = [self.row_at[place] for place in kept]
        self.is_open = [self.is_open[place] for place in kept]

    def n_left(self) -> int:
        """Return the number of waiting and open rows of all ranks of the group. Collective."""
        n_left, group = sum(self.is_open) + self.n_waiting, self.decoder.group
        if group is None:
            return n_left
        of_ranks = torch.tensor(n_left, device=self.tokens.device)
        dist.all_reduce(of_ranks, group=group)
        return int(of_ranks)


def _continue_rows(
    rows: _Rows,
    prompts: Sequence[Sequence[int]],
    prompt_of_row: list[int],
    next_version: Callable[[], int],
    on_rows: Callable[[list[int]], None],
) -> None:
    """Draw all rows to their ends.

    Each turn of the loop is one forward, either of prompts or of one token per row in the cache. So
    ranks of a group make the same number of forwards although they read prompts at different times.
    """
    decoder, device = rows.decoder, rows.tokens.device
    longest = max(len(prompts[index]) for index in prompt_of_row)
    max_length = longest + rows.uniform.shape[1] - 1
    n_read = 0  # rows whose prompt was read
    parts, records_experts = decoder.runner.model_parts, rows.experts is not None
    version_of_step = None
    with kv_cache(parts, max_length, decoder.run, records_experts) as forward:
        while rows.n_left():
            has_run = False
            if rows.may_enter():
                if rows.n_begun == n_read:
                    # Each prompt is read once, however many rows continue it. Its keys and values
                    # are kept until all its rows have a place.
                    n_free = len(rows.places(is_open=False))
                    read = sorted(set(prompt_of_row[n_read : n_read + n_free]))
                    while n_read < len(prompt_of_row) and prompt_of_row[n_read] in read:
                        n_read += 1
                    lengths = [len(prompts[index]) for index in read]
                    padded = [[*prompts[i], *[0] * (max(lengths) - len(prompts[i]))] for i in read]
                    # If each prompt has one row, it is read into its place, without a second cache.
                    is_direct = not forward.lengths and read == prompt_of_row[:n_read]
                    just_read = forward if is_direct else forward.aside(max(lengths))
                    version = next_version()
                    on_rows(read)
                    new_tokens = torch.tensor(padded, device=device)
                    at_prompts = just_read(new_tokens, lengths, last_only=True)
                    has_run = True
                first = rows.n_begun
                places = rows.enter(n_read)
                sources = [read.index(prompt_of_row[first + i]) for i in range(len(places))]
                if just_read is not forward:
                    forward.put_rows(places, just_read, sources)
                rows.draw_at(places, at_prompts, sources, version, forward)
                if rows.n_begun == n_read:
                    just_read = at_prompts = None  # frees their memory
            else:
                rows.drop_ended(forward)
            if not has_run:
                for place, length in enumerate(forward.lengths):
                    if length == forward.max_length:  # this row has ended
                        forward.lengths[place] = 0
                before, version_of_step = version_of_step, next_version()
                if version_of_step != before:
                    forward.weights_changed()
                on_rows([prompt_of_row[row] for row in rows.row_at])
                logits = forward(rows.tokens[:, None], last_only=True)
                if places := rows.places(is_open=True):
                    rows.draw_at(places, logits, places, version_of_step, forward)
