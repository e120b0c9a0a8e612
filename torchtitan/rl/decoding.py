"""Continuing many prompts at once with a model on this process, or with a rank's part of one.

P prompts, N rows to be continued (one for each completion wanted), B of them in the cache at a time,
L new tokens at most, V vocabulary.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.distributed.dtensor import whole_tensor
from torchtitan.engine import TrainingEngine
from torchtitan.generation.kv_cache import kv_cache
from torchtitan.generation.sampling import Drawn, draw
from torchtitan.models.decoder import Decoder
from torchtitan.rl.types import SamplingConfig
from torchtitan.step.runner import Runner
from torchtitan.tools.logging import logger, warn_once
from torchtitan.tools.utils import free_memory

N_FIELDS = len(Drawn._fields)
# Rows that wait enter the cache once one place in so many is free.
PLACES_PER_ENTRY = 8


@dataclass(frozen=True)
class LocalDecoder:
    """What continues prompts: a model, or this rank's parts of one.

    runner: holds the model. group: ranks that share out the rows of a call.
    runs_uncompiled: run compiled modules as they were written.
    """

    runner: Runner
    group: dist.ProcessGroup | None = None
    runs_uncompiled: bool = False

    @classmethod
    def of_model(
        cls, model: Decoder, autocast: contextlib.AbstractContextManager | None = None
    ) -> "LocalDecoder":
        """A whole model on this process. autocast: a context for the forward."""
        device = getattr(model, model.rope_buffer_name).device
        nothing = contextlib.nullcontext
        # There are no batches to process.
        return cls(Runner([model], device, None, nothing, autocast or nothing()))

    @classmethod
    def of_engine(cls, engine: TrainingEngine) -> "LocalDecoder":
        """An engine's own modules, in any layout; nothing is copied.

        Every rank of the engine has to make the same calls. Ranks that would train on different
        data generate different rows, those of one model (tensor, pipeline parallelism) the same.
        """
        mesh = engine.parallel_dims.get_optional_mesh("loss")
        return cls(engine.runner, None if mesh is None else mesh.get_group(), True)

    @property
    def rope_table(self) -> Tensor:
        """Its length is the longest row."""
        model: Any = self.runner.model_parts[0]
        return getattr(model, model.rope_buffer_name)

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Put the model into evaluation, without gradients; all of it is restored afterwards."""
        as_written: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self.runs_uncompiled and "torch._dynamo" in sys.modules:
            # Modules would be compiled again for each new shape of the cache. This holds for all
            # threads, so a model that no trainer compiles does without it.
            as_written = torch.compiler.set_stance("force_eager")
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
        """Whether every rank has room for all weights at once. Collective over the group.

        Otherwise each forward, which is one token, gathers every layer.
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
                f"generation gathers the weights of each layer for each token: all of them take "
                f"{needed / 2**30:.1f} GiB, which has to be at most half of what each rank has free, "
                f"and here {free / 2**30:.1f} GiB are; more ranks, or tensor parallelism, make "
                "generation several times as fast",
            )
        return fits

    def run(self, tokens: Tensor, **kwargs: Any) -> Tensor | None:
        """The model's forward; None on ranks that don't see logits.

        Not `Runner.run`: it leaves autocast and reshards FSDP's root unit after every forward. Here
        a forward is one token, and each would cast the weights and gather the root unit again;
        `ready` does both once for all tokens.
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
) -> tuple[Tensor, list[list[int]]]:
    """Return what was drawn, fp64 [N, L, N_FIELDS], and the version that drew each token of a row.

    A row has as many tokens as versions.

    Collective over the decoder's group; each rank gets the rows of all.

    prompt_of_row: for each of N rows, the index of the prompt that it continues; rows of one prompt
        stand together.
    uniform: fp64 [N, L] from [0, 1), one number for each token that may be drawn.
    max_rows: how many rows a rank continues at once; 0 for all. The others wait, and get the places
        of rows that have ended.
    next_version: called before each forward, returns the version of the weights that it is made
        with. It may change them, if no ranks generate together: keys and values that are there
        stay, as in PipelineRL (Piché et al. 2025, arXiv:2509.19128).
    """
    group, n_rows = decoder.group, len(prompt_of_row)
    rank, n_ranks = (0, 1) if group is None else (group.rank(), group.size())
    per_rank = -(-n_rows // n_ranks)
    # All ranks have to make the same number of forwards: one without rows continues the first.
    own = range(rank * per_rank, (rank + 1) * per_rank)
    rows, is_wanted = [row if row < n_rows else 0 for row in own], [row < n_rows for row in own]
    with decoder.ready():
        share, versions = _continue_rows(
            decoder,
            prompts,
            [prompt_of_row[row] for row in rows],
            uniform[rows].to(decoder.runner.device),
            is_wanted,
            sampling,
            min(max_rows or per_rank, per_rank),
            next_version,
        )
        shares = [share]
        if group is not None:
            shares = [torch.empty_like(share) for _ in range(n_ranks)]
            dist.all_gather(shares, share, group=group)
        packed = torch.cat(shares).cpu()[:n_rows]
    if group is not None:
        versions = [[next_version()] * n for n in packed[:, 0].long().tolist()]
    return packed[:, 1:].unflatten(1, (-1, N_FIELDS)), versions


def _continue_rows(
    decoder: LocalDecoder,
    prompts: Sequence[Sequence[int]],
    prompt_of_row: list[int],
    uniform: Tensor,
    is_wanted: list[bool],
    sampling: SamplingConfig,
    n_places: int,
    next_version: Callable[[], int],
) -> tuple[Tensor, list[list[int]]]:
    """([N, 1 + L * N_FIELDS]: each row's number of new tokens, and what was drawn; its versions).

    The cache has `n_places`, which rows get in their order. Each turn of the loop is one forward,
    of prompts or of a token of each row in the cache. So the ranks of the group, which make equally
    many, may be at different points.
    is_wanted: False for rows that only keep this rank company with the others of the group.
    """
    device = uniform.device
    n_rows, n_new = uniform.shape
    schedule, parts = decoder.runner.schedule, decoder.runner.model_parts
    drawn = torch.zeros(n_rows, n_new, N_FIELDS, dtype=torch.float64, device=device)
    versions: list[list[int]] = [[] for _ in range(n_rows)]  # of the tokens that were drawn
    so_far: list[list[int]] = [[] for _ in range(n_rows)]  # where completions may stop
    # By place: the row there, whether it goes on, and its latest token
    row_at, is_open = list(range(n_places)), [False] * n_places
    tokens = torch.zeros(n_places, dtype=torch.int64, device=device)

    def draw_at(places: list[int], logits: Tensor | None, sources: list[int], version: int) -> None:
        """Draw a token for the rows at these places, from the rows `sources` of logits."""
        rows = [row_at[place] for place in places]
        steps = [len(versions[row]) for row in rows]
        indices = torch.tensor([places, sources, rows, steps], device=device)
        at_place, at_source, at_row, at_step = indices
        latest = torch.empty(len(places), N_FIELDS, dtype=torch.float64, device=device)
        if logits is not None:
            found = draw(
                logits[:, -1] if sources == list(range(len(logits))) else logits[at_source, -1],
                uniform[at_row, at_step],
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )
            latest = torch.stack([values.double() for values in found], dim=-1)
        if schedule is not None:
            latest = schedule.broadcast_from_last_stage(latest)
        drawn[at_row, at_step] = latest
        tokens[at_place] = latest[:, 0].long()
        ids = latest[:, 0].long().tolist() if sampling.may_stop else [-1] * len(rows)
        for place, row, token in zip(places, rows, ids, strict=True):
            versions[row].append(version)
            so_far[row].append(token)
            has_ended = len(versions[row]) == n_new
            has_ended |= sampling.may_stop and sampling.stops_at(so_far[row])
            is_open[place] = is_wanted[row] and not has_ended

    longest = max(len(prompts[index]) for index in prompt_of_row)
    n_read = n_begun = 0  # rows whose prompts were read, and that got a place
    n_left = n_rows
    with kv_cache(parts, longest + n_new - 1, decoder.run) as forward:
        while n_left:
            free = [place for place, goes_on in enumerate(is_open) if not goes_on]
            n_waiting, has_run = n_rows - n_begun, False
            # A forward for the prompts of one row at a time would hold up all the others.
            if n_waiting and len(free) >= min(n_waiting, max(1, n_places // PLACES_PER_ENTRY)):
                if n_begun == n_read:
                    # Each prompt is read once, however many rows continue it, and kept until all
                    # of them have a place.
                    read = sorted(set(prompt_of_row[n_read : n_read + len(free)]))
                    while n_read < n_rows and prompt_of_row[n_read] in read:
                        n_read += 1
                    lengths = [len(prompts[index]) for index in read]
                    padded = [[*prompts[i], *[0] * (max(lengths) - len(prompts[i]))] for i in read]
                    version_of_prompts, just_read = next_version(), forward.aside(max(lengths))
                    new_tokens = torch.tensor(padded, device=device)
                    at_prompts = just_read(new_tokens, lengths, last_only=True)
                    has_run = True
                begun = range(n_begun, min(n_read, n_begun + len(free)))
                places = free[: len(begun)]
                sources = [read.index(prompt_of_row[row]) for row in begun]
                for place, row in zip(places, begun, strict=True):
                    row_at[place] = row
                forward.put_rows(places, just_read, sources)
                draw_at(places, at_prompts, sources, version_of_prompts)
                n_begun = begun.stop
                if n_begun == n_read:
                    just_read = at_prompts = None  # frees their memory
            elif not n_waiting and len(is_open) > 1 and sum(is_open) <= len(is_open) // 2:
                # Rows that have ended cost as much as others, but dropping them copies the cache:
                # do it when half have, and keep one, as other ranks may wait for this one.
                kept = [place for place, goes_on in enumerate(is_open) if goes_on] or [0]
                forward.keep_rows(kept)
                tokens = tokens[kept]
                row_at = [row_at[place] for place in kept]
                is_open = [is_open[place] for place in kept]
            if not has_run:
                for place, length in enumerate(forward.lengths):
                    if length == forward.max_length:  # of a row that has ended
                        forward.lengths[place] = 0
                version = next_version()
                logits = forward(tokens[:, None], last_only=True)
                places = [place for place, goes_on in enumerate(is_open) if goes_on]
                if places:
                    draw_at(places, logits, places, version)
            n_left = sum(is_open) + n_rows - n_begun
            if decoder.group is not None:
                of_ranks = torch.tensor(n_left, device=device)
                dist.all_reduce(of_ranks, group=decoder.group)
                n_left = int(of_ranks)
    counts = torch.tensor([len(row) for row in versions], dtype=drawn.dtype, device=device)
    return torch.cat((counts[:, None], drawn.flatten(1)), dim=1), versions
