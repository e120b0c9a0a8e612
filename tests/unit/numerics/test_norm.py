"""RMS normalisation on the CPU: torch's result, and its gradient in fewer passes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchtitan.numerics.norm import RMSNorm, rms_norm


def inputs(*shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, requires_grad=True)
    weight = torch.randn(shape[-1:], generator=generator, requires_grad=True)
    return x, weight, torch.randn(shape, generator=generator)


@pytest.mark.parametrize("shape", [(7,), (1, 1, 16), (2, 5, 3, 8), (4, 64, 96), (0, 4)])
def test_result_has_torchs_bits_and_gradients_are_those_of_fp64(shape):
    x, weight, grad = inputs(*shape)
    out = rms_norm(x, shape[-1:], weight, 1e-5)
    assert torch.equal(out, F.rms_norm(x, shape[-1:], weight, 1e-5))
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = F.rms_norm(exact[0], shape[-1:], exact[1], 1e-5)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    found = torch.autograd.grad(out, (x, weight), grad)
    for gradient, exact_gradient in zip(found, wanted, strict=True):
        scale = max([1.0, *exact_gradient.abs().flatten().tolist()])
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=0, atol=1e-6 * scale)


def test_gradient_of_one_input_is_the_same_if_the_other_is_frozen():
    x, weight, grad = inputs(3, 8)
    both = torch.autograd.grad(rms_norm(x, (8,), weight, 1e-5), (x, weight), grad)
    (of_x,) = torch.autograd.grad(rms_norm(x, (8,), weight.detach(), 1e-5), (x,), grad)
    (of_weight,) = torch.autograd.grad(rms_norm(x.detach(), (8,), weight, 1e-5), (weight,), grad)
    assert torch.equal(of_x, both[0]) and torch.equal(of_weight, both[1])


def test_autocast_and_recomputation_change_nothing():
    x, weight, grad = inputs(4, 8)
    wanted = torch.autograd.grad(rms_norm(x, (8,), weight, 1e-5), (x, weight), grad)
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.utils.checkpoint.checkpoint(
            rms_norm, x, (8,), weight, 1e-5, use_reentrant=False
        )
        found = torch.autograd.grad(out, (x, weight), grad)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_no_weight_are_left_to_torch(dtype):
    x = torch.randn(2, 8, dtype=dtype)
    weight = torch.randn(8, dtype=dtype)
    assert torch.equal(rms_norm(x, (8,), weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5))
    assert torch.equal(rms_norm(x, (8,), None, None), F.rms_norm(x, (8,)))


def test_module_is_torchs():
    ours, theirs = RMSNorm(8, eps=1e-5), nn.RMSNorm(8, eps=1e-5)
    assert isinstance(ours, nn.RMSNorm) and ours.state_dict().keys() == theirs.state_dict().keys()
    x = torch.randn(2, 8)
    assert torch.equal(ours(x), theirs(x))
