import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from tests.distributed import parallel_dims
from tests.distributed.layout_matrix import whole
from torchtitan.distributed import NoParallel
from torchtitan.testing.gloo import run_ranks


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
        results.append((whole(out), isinstance(out, DTensor), whole(gate.weight.grad)))
    return results


def test_every_rank_computes_the_whole_module():
    gate, x = gate_and_input()
    expected = gate(x)
    expected.sum().backward()
    for of_rank in run_ranks(run_gates, 2):
        assert [is_dtensor for _, is_dtensor, _ in of_rank] == [False, True]
        for out, _, grad in of_rank:
            torch.testing.assert_close((out, grad), (expected.detach(), gate.weight.grad))
