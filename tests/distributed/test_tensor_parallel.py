"""Sequence shards and their sums; that a split decoder trains as one process does is in test_layout_matrix."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_leaves

from tests.distributed import parallel_dims
from torchtitan.distributed import NoParallel
from torchtitan.distributed.activation_checkpoint import _context_fn
from torchtitan.distributed.collectives import start_reduce_scatter
from torchtitan.distributed.dtensor import whole_tensor
from torchtitan.distributed.sequence_parallel import SequenceShards
from torchtitan.models.parallelize import _op_sac_save_list
from torchtitan.testing.gloo import run_ranks

ROWS = 4


def pass_through_shards(overlap):
    """Return, for each length, the whole tensor, the results of two round trips, and their gradients."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shards = SequenceShards(init_device_mesh("cpu", (size,)), overlap)
    results = []
    for seq_len in range(1, 6):
        whole = torch.arange(ROWS * seq_len * 2.0).reshape(ROWS, seq_len, 2).requires_grad_()
        joined = shards.join(shards.split(whole), seq_len)
        (joined_grad,) = torch.autograd.grad(joined.square().sum(), whole)
        # A different summand on each rank, and a different use of the result.
        summed = shards.gather(shards.reduce(whole * (rank + 1)), seq_len)
        (summed_grad,) = torch.autograd.grad((summed * (rank + 1)).sum(), whole)
        results.append((whole, joined, joined_grad, summed, summed_grad / (rank + 1)))
    return [tuple(x.detach() for x in result) for result in results]


@pytest.mark.parametrize("overlap", [False, True])
def test_shards_of_any_length_join_to_the_whole_with_its_gradients(overlap):
    for found in run_ranks(pass_through_shards, 3, overlap):
        for whole, joined, joined_grad, summed, summed_grad in found:
            assert torch.equal(joined, whole) and torch.equal(joined_grad, 2 * whole)
            assert torch.equal(summed, whole * (1 + 2 + 3))
            assert torch.equal(summed_grad, torch.full_like(whole, 1 + 2 + 3))


def sum_summands():
    """Return the sum, the compiled sum, and the bytes that selective checkpointing keeps of it."""
    x = torch.arange(30.0).view(6, 5) * (torch.distributed.get_rank() + 1)

    def own_sum(x):
        sums = start_reduce_scatter(x, 2, torch.distributed.group.WORLD.group_name)
        return torch.ops._c10d_functional.wait_tensor(sums)

    forward, _ = _context_fn(_op_sac_save_list, frozenset())()
    with forward:
        out = own_sum(x)
    sizes = [value.val.nbytes for value in tree_leaves(forward.storage) if hasattr(value, "val")]
    return out, torch.compile(own_sum, backend="aot_eager", fullgraph=True)(x), sizes


def test_sum_over_ranks_is_the_same_compiled_and_checkpointing_keeps_no_summands():
    expected = 3 * torch.arange(30.0).view(6, 5)
    results = run_ranks(sum_summands, 2)
    for (out, compiled, sizes), own in zip(results, expected.chunk(2), strict=True):
        assert torch.equal(out, own) and torch.equal(compiled, own)
        assert sizes == [own.nbytes]


# ---- NoParallel ----


def gate_and_input():
    torch.manual_seed(0)
    return nn.Linear(3, 5, bias=False), torch.randn(4, 3)


def run_gates():
    """Return (output, whether it is a DTensor, gradient of the weight) of a gate on a tp mesh."""
    mesh, results = parallel_dims(tp=2).get_mesh("tp"), []
    layouts = {"input_layout": Shard(0), "output_layout": Shard(1), "use_local_output": False}
    for options in ({}, layouts):
        gate, x = gate_and_input()
        parallelize_module(gate, mesh, NoParallel(**options))
        assert gate.weight.placements == (Replicate(),)
        out = gate(x.chunk(2)[mesh.get_local_rank()] if options else x)
        out.sum().backward()
        is_dtensor, grad = isinstance(out, DTensor), whole_tensor(gate.weight.grad)
        results.append((whole_tensor(out).detach(), is_dtensor, grad))
    return results


def test_every_rank_computes_the_whole_module():
    gate, x = gate_and_input()
    expected = gate(x)
    expected.sum().backward()
    for of_rank in run_ranks(run_gates, 2):
        assert [is_dtensor for _, is_dtensor, _ in of_rank] == [False, True]
        for out, _, grad in of_rank:
            torch.testing.assert_close((out, grad), (expected.detach(), gate.weight.grad))
