import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from tests.distributed import parallel_dims
from torchtitan.distributed import NoParallel
from torchtitan.testing.gloo import run_ranks


def run_gate(style_options, input_is_sharded):
    """Run a gate on a tp mesh; returns (output, its type, gradient of the weight)."""
    mesh = parallel_dims(tp=2).get_mesh("tp")
    torch.manual_seed(0)
    gate = nn.Linear(3, 5, bias=False)
    x = torch.randn(4, 3)
    parallelize_module(gate, mesh, NoParallel(**style_options))
    assert isinstance(gate.weight, DTensor) and gate.weight.placements == (Replicate(),)
    out = gate(x.chunk(2)[mesh.get_local_rank()] if input_is_sharded else x)
    out.sum().backward()
    whole = out.full_tensor() if isinstance(out, DTensor) else out
    return whole.detach(), isinstance(out, DTensor), gate.weight.grad.full_tensor()


def expected():
    torch.manual_seed(0)
    gate = nn.Linear(3, 5, bias=False)
    out = gate(torch.randn(4, 3))
    out.sum().backward()
    return out.detach(), gate.weight.grad


CASES = [
    ({}, False),
    ({"input_layout": Shard(0), "output_layout": Shard(1), "use_local_output": False}, True),
]


def run_gates():
    return [run_gate(*case) for case in CASES]


def test_every_rank_computes_the_whole_module():
    out, grad = expected()
    for of_rank in run_ranks(run_gates, 2):
        assert [is_dtensor for _, is_dtensor, _ in of_rank] == [False, True]
        for got, _, got_grad in of_rank:
            torch.testing.assert_close((got, got_grad), (out, grad))
