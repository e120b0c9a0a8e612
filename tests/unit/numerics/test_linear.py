"""Products of bf16 matrices, on CPUs that are slow at them and on others."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from torchtitan.models.moe.grouped_mm import grouped_mm
from torchtitan.numerics import linear as linear_module
from torchtitan.numerics.linear import Linear


@pytest.fixture(params=[False, True], ids=["no bf16 instructions", "bf16 instructions"])
def any_cpu(request, monkeypatch):
    monkeypatch.setattr(linear_module, "_cpu_multiplies_bf16", request.param)
    return request.param


@pytest.fixture
def slow_cpu(monkeypatch):
    monkeypatch.setattr(linear_module, "_cpu_multiplies_bf16", False)


@pytest.mark.parametrize("lacking", ["library", "operator"])
def test_layers_are_built_where_torch_has_no_onednn(lacking, monkeypatch):
    monkeypatch.setattr(linear_module, "_cpu_multiplies_bf16", None)
    monkeypatch.setattr(linear_module.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: lacking != "library")
    operator = None if lacking == "operator" else (lambda: 1 / 0)  # without the library it fails
    parts = SimpleNamespace(onednn_has_bf16=operator)
    monkeypatch.setattr(linear_module, "torch_parts", parts)
    Linear(24, 16)
    assert not linear_module.cpu_multiplies_bf16()


def bf16_layer_and_input():
    torch.manual_seed(0)
    layer = Linear(24, 16).bfloat16()
    return layer, torch.randn(3, 5, 24).bfloat16().requires_grad_()


def test_bf16_is_rounded_once_forward_and_backward(any_cpu):
    layer, x = bf16_layer_and_input()
    exact_x = x.detach().double().requires_grad_()
    exact = F.linear(exact_x, layer.weight.double(), layer.bias.double())
    out = layer(x)
    grad = torch.randn_like(out)
    out.backward(grad)
    exact.backward(grad.double())
    assert out.dtype == x.grad.dtype == layer.weight.grad.dtype == torch.bfloat16
    # Half a unit of bf16's last place (8 bits), plus the error of the sum.
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(x.grad.double(), exact_x.grad, rtol=2**-8, atol=1e-3)


def test_a_slow_product_has_the_bits_of_the_rounded_fp32_product(slow_cpu):
    layer, x = bf16_layer_and_input()
    expected = F.linear(x.float(), layer.weight.float(), layer.bias.float()).bfloat16()
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)


def test_autocast_rounds_its_inputs_as_it_does_elsewhere(any_cpu):
    layer, x = bf16_layer_and_input()
    fp32_layer = Linear(24, 16)
    fp32_layer.load_state_dict(layer.state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fp32_layer(x.float())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, layer(x), rtol=2**-7, atol=1e-3)


def test_groups_of_rows_are_multiplied_in_fp32_too(slow_cpu):
    x, weights = torch.randn(12, 16).bfloat16(), torch.randn(2, 16, 8).bfloat16()
    out = grouped_mm(x, weights, torch.tensor([4, 12], dtype=torch.int32))
    expected = torch.cat([x[:4].float() @ weights[0].float(), x[4:].float() @ weights[1].float()])
    torch.testing.assert_close(out, expected.bfloat16(), rtol=2**-7, atol=1e-3)


def test_compiled_code_knows_the_cpu(slow_cpu):
    layer, x = bf16_layer_and_input()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=0)
