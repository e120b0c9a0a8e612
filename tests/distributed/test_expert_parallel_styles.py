"""Dispatch and combine without a model: uneven shares, padding, compiled experts."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from torchtitan.distributed import expert_parallel
from torchtitan.distributed.expert_parallel import (
    ExpertParallel,
    ExpertTensorParallel,
    ReordererSequenceParallel,
    TensorParallel,
)
from torchtitan.models.moe import MoEArgs, build_moe
from torchtitan.testing.gloo import run_ranks

DIM = 8


def build(**changes):
    moe = build_moe(MoEArgs(num_experts=4, top_k=2, num_shared_experts=0, **changes), DIM, 16)
    torch.manual_seed(0)
    with torch.no_grad():
        moe.init_weights(0.1)
    return moe


def tokens(n):
    return torch.randn(1, n, DIM, generator=torch.Generator().manual_seed(1))


def outputs_and_gradients(moe, num_tokens):
    x = tokens(num_tokens).requires_grad_()
    out = moe(x)
    out.square().sum().backward()
    return out.detach(), x.grad, moe.router.gate.weight.grad


def share_out():
    """Both ranks have all tokens; each routes its share."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    moe = build()
    parallelize_module(moe.experts, mesh, ExpertParallel())
    parallelize_module(moe.reorderer, mesh, ReordererSequenceParallel())
    return [moe(tokens(n)).detach() for n in (6, 5, 1)]


def test_shares_of_tokens_add_up_for_any_number_of_them():
    shares = run_ranks(share_out, 2)
    for num_tokens, ours, theirs in zip((6, 5, 1), *shares, strict=True):
        expected = build()(tokens(num_tokens)).detach()
        torch.testing.assert_close(ours + theirs, expected, rtol=1e-5, atol=1e-6)
        half = -(-num_tokens // 2)
        assert not ours[:, half:].any() and not theirs[:, :half].any()


def padded(alignment):
    """Run experts whose kernel needs padded groups, on tokens that differ between ranks."""
    expert_parallel.kernel_alignment = lambda device: alignment
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    moe = build()
    counts = []
    parallelize_module(moe.experts, mesh, ExpertParallel())
    # After the dispatch, as it was registered later.
    moe.experts.register_forward_pre_hook(lambda module, args: counts.append(args[1].tolist()))
    results = outputs_and_gradients(moe, 5 + torch.distributed.get_rank())
    return counts[0], results


@pytest.mark.parametrize("alignment", [1, 8])
def test_padding_changes_no_result(alignment):
    ranks = run_ranks(padded, 2, alignment)
    for rank, (counts, results) in enumerate(ranks):
        assert all(count % alignment == 0 for count in counts)
        expected = outputs_and_gradients(build(), 5 + rank)
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-6)


def refusals():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "etp"))
    across = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep", "etp"))
    three, some = build_moe(MoEArgs(num_experts=3, top_k=1), DIM, 15).experts, {"w1": 1, "w2": 2}
    not_divided = "expert_parallel_degree must divide dimension 0 of the experts' w1"
    three_rows = r"got 2 with shape \[3, 15, 8\]; choose a divisor of 3"
    not_named = "the experts' parameter 'w3', only for 'w1', 'w2'; add its"
    for experts, own_mesh, style, words in (
        (three, mesh["ep"], ExpertParallel(), f"{not_divided}.*{three_rows}"),
        (three, across["etp"], TensorParallel(), "tensor_parallel_degree must divide dimension 1"),
        (three, mesh, ExpertTensorParallel(), not_divided),
        (build().experts, mesh["etp"], TensorParallel(some), not_named),
        (build().experts, mesh, ExpertTensorParallel(some), not_named),
    ):
        with pytest.raises(ValueError, match=words):
            parallelize_module(experts, own_mesh, style)


def test_experts_that_a_style_does_not_fit_are_refused():
    run_ranks(refusals, 2)
