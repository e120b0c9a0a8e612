import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from torchtitan.distributed import NoParallel, ParallelDims
from torchtitan.testing.gloo import run_ranks


def run_gate(style_options, input_is_sharded):
    """Run a gate on a tp mesh; returns (output, its type, gradient of the weight)."""
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=2, pp=1, ep=1, etp=1, world_size=2)
    mesh = dims.get_mesh("tp")
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


def test_every_rank_computes_the_whole_module():
    out, grad = expected()
    for got, is_dtensor, got_grad in run_ranks(run_gate, 2, {}, False):
        assert not is_dtensor
        torch.testing.assert_close(got, out)
        torch.testing.assert_close(got_grad, grad)


def test_sharded_input_is_gathered_and_output_laid_out_as_asked():
    out, grad = expected()
    options = {"input_layout": Shard(0), "output_layout": Shard(1), "use_local_output": False}
    for got, is_dtensor, got_grad in run_ranks(run_gate, 2, options, True):
        assert is_dtensor
        torch.testing.assert_close(got, out)
        torch.testing.assert_close(got_grad, grad)
