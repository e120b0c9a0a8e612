"""Streams a model's weights under Hugging Face names, one after another, to an inference server.

The receiver verifies the weights by a version and a digest.
"""

import copy
import functools
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.adapters.lora import merged
from torchtitan.distributed.dtensor import LocalShard, local_shard, whole_tensor
from torchtitan.distributed.processes.ranks import all_ranks
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.torch_parts import name_without_wrappers

# `fingerprint` reads bytes as 64-bit words and sums rows of this many words.
_WORDS_PER_ROW = 2**15
_ROWS_AT_ONCE = 2**9


class WeightStream:
    """Iterates over (HF name, tensor) of all weights, in the order of the model.

    Every rank gets all unsharded tensors, one tensor or one stack of experts at a time. Iterating is
    a collective, also over pipeline stages: every rank has to iterate to the end. A tied output
    weight is yielded as the embedding's tensor; adapters are merged into their weights. Tensors may
    share the live parameters' memory.

    sharded: yield `LocalShard`s, views of this rank's shards of its pipeline stage. Only LoRA's A
        and B need communication. Replicated weights are yielded by every rank that holds them.
    dtype: dtype to cast floating-point parameters to; buffers and routers keep theirs. None: no cast.
    stage_indices, pp_group: stage index of each model part, and the pipeline's process group.

    version: the number of optimizer steps that have changed the weights. digest: `digest_of` the
    yielded pairs, None until the end. The parallel layout does not change unsharded tensors' digest.

    Raises RuntimeError if an optimizer step changes the weights during the iteration.
    """

    version: int
    digest: str | None

    def __init__(
        self,
        model_parts: list[nn.Module],
        adapter: BaseStateDictAdapter,
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        sharded: bool = False,
        current_version: Callable[[], int] = lambda: 0,
        stage_indices: list[int] | None = None,
        pp_group: "dist.ProcessGroup | None" = None,
    ) -> None:
        self._parts = dict(zip(stage_indices or range(len(model_parts)), model_parts, strict=True))
        # A copy, because a state-dict adapter stores its last conversion.
        self._adapter = copy.copy(adapter)
        self._device, self._dtype, self._sharded = device, dtype, sharded
        self._current_version = current_version
        self._pp_group = pp_group
        self.version, self.digest = current_version(), None

    @classmethod
    def from_engine(cls, engine: Any, adapter: BaseStateDictAdapter, **options: Any) -> Self:
        """Return the stream of a `TrainingEngine`'s weights. options: dtype, sharded."""
        schedule = engine.pp_schedule
        return cls(
            engine.model_parts,
            adapter,
            engine.device,
            current_version=lambda: engine.weights_version,
            stage_indices=schedule and [stage.stage_index for stage in schedule.stages],
            pp_group=schedule and schedule.group,
            **options,
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor | LocalShard]]:
        self.version, self.digest = self._current_version(), None
        digest = WeightDigest()
        aliases = self._adapter.hf_aliases()
        for name, tensor in self._shards() if self._sharded else self._whole_tensors():
            for hf_name in filter(None, (name, aliases.get(name))):
                digest.add(hf_name, tensor)
                yield hf_name, tensor
                if self._current_version() != self.version:
                    raise RuntimeError(
                        f"The weights went from version {self.version} to {self._current_version()} while "
                        "they were streamed; finish the iteration before the optimizer's step"
                    )
        self.digest = digest.hexdigest()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's tensors, not gathered, under our names; DTensors if sharded.

        A tensor that needs no cast shares the live parameter's memory.
        """
        live = {}
        for part in self._parts.values():
            for name, (tensor, dtype) in self._state_of(part).items():
                live[name] = tensor if tensor.dtype == dtype else tensor.to(dtype)
        return live

    @torch.no_grad()
    def _shards(self) -> Iterator[tuple[str, LocalShard]]:
        for part in self._parts.values():
            state = self._state_of(part)
            for name in (name for names in self._adapter.groups_of(state) for name in names):
                tensor, dtype = state[name]
                if (shard := local_shard(tensor)) is not None:
                    shard = shard._replace(tensor=shard.tensor.to(dtype))
                    yield from self._adapter.shards_to_hf(name, shard)

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self._pp_group is None:
            for part in self._parts.values():
                for group in self._groups(part):
                    yield from group
            return
        stages = all_ranks(list(self._parts), self._pp_group)
        holder = {stage: rank for rank, held in enumerate(stages) for stage in held}
        for stage in sorted(holder):
            source = dist.get_global_rank(self._pp_group, holder[stage])
            groups = self._groups(self._parts[stage]) if stage in self._parts else None
            while True:
                group = next(groups, None) if groups else None
                header = [group and [(name, t.shape, t.dtype) for name, t in group]]
                dist.broadcast_object_list(header, src=source, group=self._pp_group)
                if header[0] is None:
                    break
                if groups is None:
                    group = [
                        (name, torch.empty(shape, dtype=dtype, device=self._device))
                        for name, shape, dtype in header[0]
                    ]
                for _, tensor in group:
                    dist.broadcast(tensor, src=source, group=self._pp_group)
                yield from group

    @torch.no_grad()
    def _groups(self, part: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield lists of (HF name, unsharded tensor); the tensors of a list are in memory together."""
        state = self._state_of(part)
        for names in self._adapter.groups_of(state):
            whole = {}
            for name in names:
                tensor, dtype = state[name]
                # Offloaded weights are in pinned memory, so the copy need not wait.
                tensor = tensor.to(self._device, non_blocking=True)
                whole[name] = whole_tensor(tensor.to(dtype))  # cast before the all-gather
            if group := [(hf, t.contiguous()) for hf, t in self._adapter.to_hf(whole).items()]:
                yield group

    def _state_of(self, part: nn.Module) -> dict[str, tuple[Tensor, torch.dtype]]:
        """Return name -> (live tensor, the dtype to send) of a model part."""
        # FSDP's state_dict returns shards, and reshards parameters that an evaluation left unsharded.
        live = {name_without_wrappers(name): tensor for name, tensor in part.state_dict().items()}
        live = merged(live, [part], self._dtype)
        if self._dtype is None:
            return {name: (tensor, tensor.dtype) for name, tensor in live.items()}
        kept = {name_without_wrappers(name) for name, _ in part.named_buffers()}
        kept |= {
            n for n, x in live.items() if not x.is_floating_point() or self._adapter.keeps_dtype(n)
        }
        return {n: (x, x.dtype if n in kept else self._dtype) for n, x in live.items()}


def digest_of(pairs: Iterable[tuple[str, Tensor | LocalShard]]) -> str:
    """Return a digest of names, dtypes, shapes and bits that ignores the order. Not safe against attacks."""
    digest = WeightDigest()
    for name, tensor in pairs:
        digest.add(name, tensor)
    return digest.hexdigest()


class WeightDigest:
    """`digest_of` for pairs that are added one by one. Only `hexdigest` waits for the device."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, Tensor]] = []

    def add(self, name: str, tensor: Tensor | LocalShard) -> None:
        where = ""
        if isinstance(tensor, LocalShard):
            where = f" at {tuple(tensor.offsets)} of {tuple(tensor.shape)}"
            tensor = tensor.tensor
        what = f"{name} {tensor.dtype} {tuple(tensor.shape)}{where}"
        self._lines.append((what, fingerprint(tensor)))

    def hexdigest(self) -> str:
        lines = []
        for device in {value.device for _, value in self._lines}:
            here = [(what, value) for what, value in self._lines if value.device == device]
            numbers = torch.stack([value for _, value in here]).tolist()  # waits for the device
            lines += [f"{what} {n}" for (what, _), n in zip(here, numbers, strict=True)]
        lines.sort()
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor's bytes, because gloo does not send every dtype."""
    return tensor.view(-1).view(torch.uint8)


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """Return one int64, on the tensor's device, that changes if any bit of the tensor changes.

    Each row of 64-bit words is summed with odd weights, modulo 2^64; the sums are summed in the same
    way until one is left. hashlib would be ten times as slow and would need the weights on the host.
    """
    flat = bytes_of(whole_tensor(tensor).detach().contiguous())
    n_whole = flat.numel() // 8 * 8
    aligned = flat[:n_whole].clone() if flat.storage_offset() % 8 else flat[:n_whole]
    words = aligned.view(torch.int64)
    if n_whole != flat.numel():
        last = flat.new_zeros(8)
        last[: flat.numel() - n_whole] = flat[n_whole:]
        words = torch.cat([words, last.view(torch.int64)])
    weights = _weights(str(flat.device))
    while words.numel() > 1:
        n_rows = words.numel() // _WORDS_PER_ROW
        rest = words[n_rows * _WORDS_PER_ROW :]
        sums = _sums_of(words[: n_rows * _WORDS_PER_ROW].view(n_rows, _WORDS_PER_ROW), weights)
        words = torch.cat([*sums, (rest * weights[: rest.numel()]).sum().view(1)])
    return words.sum()


def _sums_of(rows: Tensor, weights: Tensor) -> list[Tensor]:
    if rows.device.type == "cpu":
        return [torch.mv(rows, weights)]
    # Accelerators have no integer matrix-vector product. Split the rows to bound temporary memory.
    return [(piece * weights).sum(1) for piece in rows.split(_ROWS_AT_ONCE)]


@functools.lru_cache(maxsize=8)
def _weights(device: str) -> Tensor:
    """Return weights, equal in every process. They are odd, so changing one word changes the sum."""
    draw = random.Random(0)
    words = [draw.getrandbits(64) | 1 for _ in range(_WORDS_PER_ROW)]
    signed = [word - 2**64 if word >= 2**63 else word for word in words]
    return torch.tensor(signed, dtype=torch.int64, device=device)
