"""Our collectives on the CPU equal torch's, also in groups of some ranks."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from torchtitan.distributed.collectives import start_all_gather, start_reduce_scatter
from torchtitan.distributed.fsdp import CpuAllGather, CpuReduceScatter
from torchtitan.testing.gloo import run_ranks

_OPS = torch.ops._c10d_functional


def collect(dtype: torch.dtype) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Return (name, our result, torch's result) in a group of three ranks and of the last two."""
    results = []
    rank = dist.get_rank()
    last_two = dist.new_group([1, 2])
    torch.manual_seed(rank)
    for group in (dist.group.WORLD, last_two):
        if group is last_two and rank == 0:
            continue
        size, name = group.size(), group.group_name
        rows = torch.randn(5, 2 * size).to(dtype).T
        dense = rows.contiguous()
        gathers = start_all_gather(rows, size, name), _OPS.all_gather_into_tensor(dense, size, name)
        results.append(("gather", *map(_OPS.wait_tensor, gathers)))
        theirs = _OPS.reduce_scatter_tensor(dense, "sum", size, name)
        sums = start_reduce_scatter(rows, size, name), theirs
        results.append(("sum", *map(_OPS.wait_tensor, sums)))

        summands = torch.randn(7 * size).to(dtype)
        sums = [torch.empty(7, dtype=dtype) for _ in range(2)]
        for comm, out in zip((CpuReduceScatter(), DefaultReduceScatter()), sums, strict=True):
            comm(out, summands, group, dist.ReduceOp.SUM)
        results.append(("FSDP's sum", *sums))
        gathered = []
        for comm in (CpuAllGather(), DefaultAllGather()):
            whole = torch.zeros(7 * size, dtype=dtype)
            own = whole.view(size, 7)[group.rank()]
            comm(whole, own.copy_(summands[:7]), group)
            gathered.append(whole)
        results.append(("FSDP's gather", *gathered))
    return results


def test_collectives_on_the_cpu_are_torchs():
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        for found in run_ranks(collect, 3, dtype):
            for what, ours, theirs in found:
                if "gather" in what:
                    assert torch.equal(ours, theirs), what
                else:  # added in another order, or rounded once rather than twice
                    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
