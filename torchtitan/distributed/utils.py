"""Contexts for forward and backward, reductions of one number over ranks, gradient clipping.

Other programs also import the names of `process_group` and `determinism` from here.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.determinism import set_determinism  # noqa: F401
from torchtitan.distributed.dtensor import is_dtensor, load_dtensor, local_tensor, whole_tensor
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.processes.process_group import (  # noqa: F401
    init_distributed,
    init_fake_mode,
    set_pg_timeouts,
)
from torchtitan.distributed.tied_copies import second_copies
from torchtitan.numerics.linear import cpu_multiplies_bf16
from torchtitan.tools import torch_parts
from torchtitan.tools.logging import logger, warn_once
from torchtitan.tools.utils import get_device_info

# ---- contexts a step runs in ----


TrainContext = Callable[[], contextlib.AbstractContextManager[None]]
"""A factory of context managers to run forward and backward in."""


def get_train_context(enable_loss_parallel: bool) -> TrainContext:
    """Return a context factory; with loss parallel, cross entropy takes vocabulary-sharded logits."""
    if not enable_loss_parallel:
        return contextlib.nullcontext
    return load_dtensor(".parallel").loss_parallel


def maybe_enable_amp(
    parallel_dims: ParallelDims, mixed_precision_param: str, device_type: str
) -> contextlib.AbstractContextManager[None]:
    """Return the context of every forward: autocast to `mixed_precision_param`, unless FSDP casts."""
    dtype = TORCH_DTYPE_MAP[mixed_precision_param]
    if dtype == torch.bfloat16 and device_type == "cpu" and not cpu_multiplies_bf16():
        warn_once(
            logger,
            "training.mixed_precision_param = 'bfloat16' on a CPU without bf16 matmul instructions "
            "is correct, but slower than float32, because products are computed in float32; set "
            'training.mixed_precision_param = "float32" for speed',
        )
    if parallel_dims.uses_fsdp or dtype == torch.float32:
        return contextlib.nullcontext()
    if parallel_dims.tp_enabled or parallel_dims.pp_enabled:
        logger.warning(
            "training.mixed_precision_param = %r has no effect under tensor or pipeline "
            "parallelism without FSDP: running in training.dtype; add "
            "parallelism.data_parallel_shard_degree > 1 to use it",
            mixed_precision_param,
        )
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=dtype)


def create_context_parallel_ctx(
    cp_mesh: DeviceMesh,
    cp_buffers: list[Tensor],
    cp_seq_dims: list[int],
    cp_no_restore_buffers: set[Tensor],
    cp_rotate_method: str,
) -> Generator[None, None, None]:
    """Return torch's own context-parallel context, which shards `cp_buffers` on `cp_seq_dims`."""
    torch_parts.set_rotate_method(cp_rotate_method)
    return load_dtensor(".experimental").context_parallel(
        cp_mesh,
        buffers=cp_buffers,
        buffer_seq_dims=cp_seq_dims,
        no_restore_buffers=cp_no_restore_buffers,
    )


# ---- reductions of one number ----


def _reduced(x: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, getattr(dist.ReduceOp, op.upper()), group)
    return x


def _dist_reduce(
    op: str, x: Tensor, mesh: DeviceMesh | None = None, extra_pg: dist.ProcessGroup | None = None
) -> float:
    """Reduce `x` (one element) over `extra_pg`, then over `mesh`; returns an int if `x` is integer."""
    x = whole_tensor(x)
    if extra_pg is not None:
        x = _reduced(x, op, extra_pg)
    if mesh is None:
        return x.item()
    assert x.numel() == 1, f"expected one element, got shape {tuple(x.shape)}"
    return _reduced(x, op, mesh.get_group()).item()


dist_max = functools.partial(_dist_reduce, "max")
dist_sum = functools.partial(_dist_reduce, "sum")
dist_mean = functools.partial(_dist_reduce, "avg")


# ---- gradient clipping ----


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    pp_mesh: DeviceMesh | None = None,
    ep_enabled: bool = False,
) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before clipping.

    The norm covers all shards and, with `pp_mesh`, all pipeline stages; a tied embedding counts once
    in it. Collective. Plain tensors are allowed unless `ep_enabled`.
    Raises RuntimeError if the norm is not finite and `error_if_nonfinite`.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    counted_elsewhere = set() if pp_mesh is None else second_copies()
    # Group gradients by the mesh axes that split them, so that each group needs one reduction.
    # DTensor's own norm would reduce every matrix separately.
    parts: dict[tuple[tuple[DeviceMesh, int], ...], list[Tensor]] = {}
    for parameter in with_grad:
        grad = _without_partial_sums(parameter.grad)
        # Experts are on a second mesh, so it is unknown which ranks hold copies of a plain tensor.
        assert not ep_enabled or (is_dtensor(grad) and is_dtensor(parameter)), (
            f"with expert parallelism every parameter is a DTensor, "
            f"got {type(parameter)} of shape {tuple(parameter.shape)}"
        )
        if id(parameter) not in counted_elsewhere:
            parts.setdefault(_axes_of_shards(grad), []).append(local_tensor(grad))

    norms = []
    for axes, grads in parts.items():
        # On the CPU, first compute the norm of each row: for 6 million elements the error is 5e-7. The
        # CPU kernel's error over all elements is 2e-4, and depends on the sharding.
        rows = [
            torch.linalg.vector_norm(grad, norm_type, dim=-1)
            if grad.device.type == "cpu" and grad.ndim > 1
            else grad
            for grad in grads
            if grad.numel()
        ]
        norm = nn.utils.get_total_norm(rows or [grads[0].new_zeros(())], norm_type, foreach=foreach)
        for mesh, axis in axes:
            norm = _norm_over(norm, norm_type, mesh.get_group(axis))
        norms.append(norm)
    if not norms:  # a rank without gradients still takes part in the reduction over stages
        norms = [torch.zeros((), device=get_device_info()[0])]
    total_norm = norms[0]
    if len(norms) > 1:
        total_norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if pp_mesh is not None:
        total_norm = _norm_over(total_norm, norm_type, pp_mesh.get_group())
    if error_if_nonfinite and not torch.isfinite(total_norm):
        raise RuntimeError(
            f"the norm of the gradients is {total_norm.item()}, so they can't be clipped"
        )
    # Foreach kernels need all tensors on one mesh.
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in with_grad:
        mesh = parameter.grad.device_mesh if is_dtensor(parameter.grad) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total_norm, foreach)
    return total_norm


_clip_grad_norm_with_ep = functools.partial(clip_grad_norm_, ep_enabled=True)


def _axes_of_shards(grad: Tensor) -> tuple[tuple[DeviceMesh, int], ...]:
    """Return the mesh axes along which ranks hold different parts of `grad`."""
    if not is_dtensor(grad):
        return ()
    mesh = grad.device_mesh
    return tuple(
        (mesh, axis)
        for axis, placement in enumerate(grad.placements)
        if mesh.size(axis) > 1 and not placement.is_replicate()
    )


def _without_partial_sums(grad: Tensor) -> Tensor:

    if not is_dtensor(grad) or not any(placement.is_partial() for placement in grad.placements):
        return grad
    whole = load_dtensor().Replicate()
    return grad.redistribute(placements=[whole if p.is_partial() else p for p in grad.placements])


def _norm_over(norm: Tensor, norm_type: float, group: dist.ProcessGroup) -> Tensor:
    """Combine the norms of the parts on these ranks into the norm of the whole."""
    if math.isinf(norm_type):
        return _reduced(norm, "max", group)
    return _reduced(norm**norm_type, "sum", group) ** (1.0 / norm_type)
