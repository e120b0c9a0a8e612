"""Counts what one rank computes, moves through its memory and sends."""

import copy
import dataclasses
import math
from collections import Counter, defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from torchtitan.estimate.memory_tracker import OperatorMode
from torchtitan.numerics.delta_rule import multiplications_per_token
from torchtitan.numerics.nf4 import num_numbers

# Part of an operator's name -> the kind of collective. recv is left out, because it sends nothing.
_KINDS = {
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
}
_MOVES_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"} | {
    "_unsafe_view",
    "_reshape_alias",
    "resize_",
    "set_",
    "wait_tensor",
}
# Operators that read only as many bytes as they write.
_LOOKUPS = {"embedding", "index_select", "index", "gather"}
_OVERWRITE_THE_FIRST = {"copy_", "fill_", "zero_", "zeros_like", "ones_like", "full_like"}


@dataclasses.dataclass
class Traffic:
    """Traffic of one kind of collective on one mesh axis, in bytes except for `calls`.

    sent: what this rank sends, by the ring algorithm.
    network: this GPU's share of the bytes that leave its node. A ring has one link out of a node, so
        the node's ranks share the bytes that one rank sends.
    """

    calls: float = 0.0
    sent: float = 0.0
    network: float = 0.0


@dataclasses.dataclass
class StepCounts:
    """Counts of one rank. traffic: by (mesh axis, kind of collective). flops: by "matrix products" or
    "attention". moved: bytes that all other operators read and write, without fusion.
    """

    traffic: dict[tuple[str, str], Traffic] = dataclasses.field(
        default_factory=lambda: defaultdict(Traffic)
    )
    flops: Counter[str] = dataclasses.field(default_factory=Counter)
    moved: float = 0.0


def combined(a: Any, b: Any, times_a: float, times_b: float) -> Any:
    """Return times_a * a + times_b * b, of numbers or of all numbers in dicts and dataclasses."""
    if isinstance(a, dict):
        result = copy.copy(a)  # a copied defaultdict keeps its default for missing keys
        for key in {*a, *b}:
            result[key] = combined(a[key], b[key], times_a, times_b)
        return result
    if dataclasses.is_dataclass(a):
        pairs = ((getattr(x, field.name) for x in (a, b)) for field in dataclasses.fields(a))
        return type(a)(*(combined(*pair, times_a, times_b) for pair in pairs))  # type: ignore[operator]
    total = times_a * a + times_b * b
    return round(total) if isinstance(a, int) else total


class StepCounter(OperatorMode):
    """While active, adds up in `counts` what this rank's operators send, compute and move.

    axis_of_group: (namespace of the operator, name of its process group) -> name of the mesh axis.
    """

    def __init__(self, axis_of_group: dict[tuple[str, str], str], gpus_per_node: int) -> None:
        super().__init__()
        self.axis_of_group = axis_of_group
        self.gpus_per_node = gpus_per_node
        self.counts = StepCounts()

    def take(self) -> StepCounts:
        """Return the counts since the last call, and reset them."""
        counts, self.counts = self.counts, StepCounts()
        return counts

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        namespace = getattr(func, "namespace", "")
        if namespace == "torchtitan" and "reduce_scatter" in func.name():
            namespace = "_c10d_functional"  # our reduce-scatter for CPUs is an all-to-all
        if namespace in ("c10d", "_c10d_functional"):
            self._count_collective(namespace, func, args, result)
        else:
            self._count_computation(func, args, kwargs, result)

    def _count_collective(self, namespace: str, func: Any, args: Any, result: Any) -> None:
        name = func.name().partition("::")[2]
        kind = next((kind for part, kind in _KINDS.items() if part in name), None)
        if func.namespace == "torchtitan":
            kind = "all-to-all"
        group = next((g for g in map(_as_group, args) if g is not None), None)
        if kind is None or group is None:
            return
        payload = max(
            sum(t.nbytes for t in tree_iter(x) if isinstance(t, Tensor)) for x in (*args, result)
        )
        ranks = dist.get_process_group_ranks(group)
        n = len(ranks)
        node = dist.get_rank() // self.gpus_per_node
        in_node = sum(rank // self.gpus_per_node == node for rank in ranks)
        sent = payload * (n - 1) / n
        network = sent / in_node if in_node < n else 0.0
        if kind == "all-reduce":
            sent, network = 2 * sent, 2 * network
        elif kind == "all-to-all":
            network = payload * (n - in_node) / n
        elif kind == "broadcast":
            sent, network = payload, payload / in_node if in_node < n else 0.0
        elif kind == "send":
            sent = payload
            network = payload if ranks[args[2]] // self.gpus_per_node != node else 0.0
        axis = self.axis_of_group.get((namespace, group.group_name), f"{n} ranks")
        traffic, new = self.counts.traffic, Traffic(1, sent, network)
        traffic[axis, kind] = combined(traffic[axis, kind], new, 1, 1)

    def _count_computation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = getattr(func, "_overloadpacket", func)
        name = packet.__name__
        if name == "_grouped_mm":
            # [M, K] x [E, K, N] multiplies each row by the matrix of one expert; the gradient is
            # [K, M] x [M, N] with one product per expert. Both sum over the last dim of args[0].
            flops = 2 * args[0].shape[-1] * result.shape[-2] * result.shape[-1]
            self.counts.flops["matrix products"] += flops
        elif name.startswith("document_attention"):  # our CPU kernel, which skips masked keys
            is_backward = name.endswith("backward")
            q, cu_seq_q, cu_seq_k = (args[i] for i in ((2, 7, 8) if is_backward else (0, 3, 4)))
            queries, keys = cu_seq_q.diff().long(), cu_seq_k.diff().long()
            window = args[-1] or int(keys.max())
            pairs = int((_seen(keys, window) - _seen(keys - queries, window)).sum())
            products = 5 if is_backward else 2  # backward computes the scores again
            self.counts.flops["attention"] += products * 2 * pairs * q[0].numel()
        elif name.startswith("gated_delta_rule"):
            is_backward = name.endswith("backward")  # backward computes the forward again
            _, k, v = args[2:5] if is_backward else args[:3]
            each = multiplications_per_token(k.shape[-1], v.shape[-1])
            products = 3 if is_backward else 1
            self.counts.flops["attention"] += products * 2 * v[..., 0].numel() * each
        elif name == "linear_with_low_rank":
            (n, n_inputs), n_outputs, rank = args[0].shape, args[1].shape[1], args[3].shape[-2]
            flops = 2 * n * (n_inputs * n_outputs + rank * (n_inputs + n_outputs))
            self.counts.flops["matrix products"] += flops
        elif name == "nf4_mm":  # the operator dequantizes a weight, then multiplies
            n_numbers = num_numbers(args[1])
            n_experts = 1 if args[2] is None else len(args[1])
            rows = result.shape[:-1].numel()
            self.counts.flops["matrix products"] += 2 * rows * n_numbers // n_experts
            self.counts.moved += args[1].nbytes + n_numbers * result.itemsize
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            if "attention" in name or "attn" in name:
                # torch's formulas count the full matrix of scores; causal kernels compute half of it.
                self.counts.flops["attention"] += flops // 2
            else:
                self.counts.flops["matrix products"] += flops
        elif func.namespace == "aten" and not func.is_view and name not in _MOVES_NOTHING:
            read, written = _moved(func, args, kwargs, result)
            self.counts.moved += (written if name in _LOOKUPS else read) + written


def _as_group(value: Any) -> ProcessGroup | None:
    if isinstance(value, str):
        try:
            return _resolve_process_group(value)
        except (RuntimeError, ValueError, KeyError):  # `value` is another string, such as "sum"
            return None
    if isinstance(value, torch.ScriptObject):
        try:
            return ProcessGroup.unbox(value)
        except (RuntimeError, TypeError):  # `value` is another object, such as a ReduceOp
            return None
    return None


def _seen(n: Tensor, window: int) -> Tensor:
    """Return the total number of keys that the first `n` tokens of each document see."""
    near = n.clamp(max=window)
    return near * (near + 1) // 2 + (n - near) * window


def _moved(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, int]:
    """Return (bytes that an operator reads, bytes that it writes)."""
    read = written = 0
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        size = sum(map(_bytes_of, tree_iter(value)))
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += size
        is_overwritten = i == 0 and func._overloadpacket.__name__ in _OVERWRITE_THE_FIRST
        if not (is_overwritten or argument.is_out):
            read += size
    if all(returned.alias_info is None for returned in func._schema.returns):
        written += sum(map(_bytes_of, tree_iter(result)))
    return read, written


def _bytes_of(value: Any) -> int:
    """Return the bytes of a tensor in memory, where an expanded dimension counts once; 0 for other values."""
    if not isinstance(value, Tensor):
        return 0
    dims = zip(value.shape, value.stride(), strict=True)
    return value.itemsize * math.prod(size for size, stride in dims if stride)
