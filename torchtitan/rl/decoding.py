"""Continuing many prompts at once with a model on this process, or with a rank's part of one.

P prompts, N rows to be continued (one for each completion wanted), B of them still in the cache,
L new tokens at most, V vocabulary.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
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
) -> tuple[Tensor, list[int]]:
    """Return what was drawn, fp64 [N, L, N_FIELDS], and how many tokens of it each row has.

    Collective over the decoder's group; each rank gets the rows of all.

    prompt_of_row: for each of N rows, the index of the prompt that it continues.
    uniform: fp64 [N, L] from [0, 1), one number for each token that may be drawn.
    max_rows: how many rows a rank continues at once; 0 for all.
    """
    group, n_rows = decoder.group, len(prompt_of_row)
    rank, n_ranks = (0, 1) if group is None else (group.rank(), group.size())
    per_rank = -(-n_rows // n_ranks)
    # All ranks have to make the same number of forwards: one with fewer rows repeats the first.
    own = range(rank * per_rank, (rank + 1) * per_rank)
    rows, is_real = [row if row < n_rows else 0 for row in own], [row < n_rows for row in own]
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
                    uniform[chunk].to(decoder.runner.device),
                    is_real[first : first + size],
                    sampling,
                )
            )
        share = torch.cat(results)
        shares = [share]
        if group is not None:
            shares = [torch.empty_like(share) for _ in range(n_ranks)]
            dist.all_gather(shares, share, group=group)
        packed = torch.cat(shares).cpu()[:n_rows]
    drawn = packed[:, 1:].unflatten(1, (-1, N_FIELDS))
    return drawn, packed[:, 0].long().tolist()


def _continue_rows(
    decoder: LocalDecoder,
    prompts: Sequence[Sequence[int]],
    prompt_of_row: list[int],
    uniform: Tensor,
    is_open: list[bool],
    sampling: SamplingConfig,
) -> Tensor:
    """[N, 1 + L * N_FIELDS]: each row's number of new tokens, and what was drawn.

    is_open: rows that are wanted; the others are continued as long as any rank has one open.
    """
    device = uniform.device
    n_rows, n_new = uniform.shape
    schedule = decoder.runner.schedule
    drawn = torch.zeros(n_rows, n_new, N_FIELDS, dtype=torch.float64, device=device)
    n_drawn = [n_new] * n_rows
    so_far: list[list[int]] = [[] for _ in range(n_rows)]  # where completions may stop
    in_cache = list(range(n_rows))  # the row that each row of the cache belongs to

    # Each prompt is read once, however many rows continue it.
    read = sorted(set(prompt_of_row))
    lengths = [len(prompts[index]) for index in read]
    padded = [[*prompts[index], *[0] * (max(lengths) - len(prompts[index]))] for index in read]
    parts = decoder.runner.model_parts
    with kv_cache(parts, max(lengths) + n_new - 1, decoder.run) as forward:
        logits = forward(torch.tensor(padded, device=device), lengths, last_only=True)
        place = [read.index(index) for index in prompt_of_row]
        if place != list(range(len(read))):
            forward.keep_rows(place)
            logits = None if logits is None else logits[place]
        for step in range(n_new):
            latest = torch.empty(len(in_cache), N_FIELDS, dtype=torch.float64, device=device)
            if logits is not None:
                found = draw(
                    logits[:, -1],
                    uniform[in_cache, step],
                    temperature=sampling.temperature,
                    top_k=sampling.top_k,
                    top_p=sampling.top_p,
                )
                latest = torch.stack([values.double() for values in found], dim=-1)
            if schedule is not None:
                latest = schedule.broadcast_from_last_stage(latest)
            drawn[in_cache, step] = latest
            if step == n_new - 1:
                break
            tokens = latest[:, 0].long()
            if sampling.may_stop:
                for i, token in enumerate(tokens.tolist()):
                    so_far[in_cache[i]].append(token)
                    if is_open[i] and sampling.stops_at(so_far[in_cache[i]]):
                        is_open[i] = False
                        n_drawn[in_cache[i]] = step + 1
                # All ranks of the group go on while any has a row open.
                n_open = sum(is_open)
                if decoder.group is not None:
                    of_ranks = torch.tensor(n_open, device=device)
                    dist.all_reduce(of_ranks, group=decoder.group)
                    n_open = int(of_ranks)
                if n_open == 0:
                    break
                # Finished rows cost as much as others, but dropping them copies the cache: do it
                # when half are finished, and keep one, as other ranks may wait for this one.
                if sum(is_open) <= len(is_open) // 2 and len(is_open) > 1:
                    kept = [i for i, wanted in enumerate(is_open) if wanted] or [0]
                    forward.keep_rows(kept)
                    tokens = tokens[kept]
                    in_cache = [in_cache[i] for i in kept]
                    is_open = [is_open[i] for i in kept]
            logits = forward(tokens[:, None], last_only=True)
    counts = torch.tensor(n_drawn, dtype=drawn.dtype, device=device)
    return torch.cat((counts[:, None], drawn.flatten(1)), dim=1)
