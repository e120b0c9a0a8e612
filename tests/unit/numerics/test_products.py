"""Products of matrices by oneDNN, on CPUs where it is the faster library."""

import warnings

import pytest
import torch
from torch import nn

from torchtitan.numerics import products
from torchtitan.numerics.linear import Linear
from torchtitan.tools import host, torch_parts

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN"
)


class Tenant:
    """A holder of changes to the process, like an engine."""


def use_onednn(layer):
    host.move_in(tenant := Tenant())
    products.use_onednn(layer, torch.device("cpu"))
    return tenant


@pytest.fixture
def fast_onednn(monkeypatch):
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)


@pytest.fixture
def multiplied(monkeypatch):
    """Shapes of the products that oneDNN computes."""
    shapes = []
    product = torch.ops.mkldnn._linear_pointwise.default

    def record(x, weight, *args):
        shapes.append((*x.shape, len(weight)))
        return product(x, weight, *args)

    monkeypatch.setattr(torch.ops.mkldnn._linear_pointwise, "default", record)
    return shapes


def step_of(layer, x):
    """(output, gradient of x, gradient of the weight)."""
    x = x.clone().requires_grad_()
    out = layer(x)
    return out.detach(), *torch.autograd.grad(out.square().sum(), (x, layer.weight))


def test_large_products_of_our_layers_are_onednns_while_an_engine_lives(fast_onednn, multiplied):
    torch.manual_seed(0)
    layer, x = Linear(256, 512, bias=False), torch.randn(2, 128, 256)
    of_host = nn.Linear(256, 512, bias=False)
    before = step_of(layer, x)
    assert not multiplied
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tenants = [use_onednn(layer), use_onednn(layer)]
    during = step_of(layer, x)
    # The weight's gradient has a transposed first matrix.
    assert multiplied == [(256, 256, 512), (256, 512, 256)]
    for one, other in zip(during, before, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    step_of(of_host, x)
    assert len(multiplied) == 2  # the host's products are torch's
    frozen = x.clone().requires_grad_() * 1
    layer.weight.requires_grad_(False)
    out = layer(frozen).sum()
    frozen.zero_()  # torch.mm keeps no first factor for the gradient of a weight that is frozen
    out.backward()
    layer.weight.requires_grad_(True)
    del multiplied[2:]
    host.move_out(tenants[0])
    step_of(layer, x)
    assert len(multiplied) == 4
    host.move_out(tenants[1])
    after = step_of(layer, x)
    assert len(multiplied) == 4
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("a_is_transposed", [False, True])
@pytest.mark.parametrize("b_is_transposed", [False, True])
def test_products_of_adapters_are_onednns_and_equal_torchs(
    a_is_transposed, b_is_transposed, multiplied, monkeypatch
):
    monkeypatch.setattr(products, "_is_used", True)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn((512, 8) if a_is_transposed else (8, 512), generator=generator)
    b = torch.randn((1024, 512) if b_is_transposed else (512, 1024), generator=generator)
    a, b = a.t() if a_is_transposed else a, b.t() if b_is_transposed else b
    found = products.mm_of_few_rows(a, b)
    assert multiplied == [(1024, 512, 8) if b_is_transposed else (8, 512, 1024)]
    # fp32, 512 summands of about 1.
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=0, atol=1e-4)
    for small in (b[:, :512], b[:, ::2]):  # too small; with gaps between numbers or rows
        assert torch.equal(products.mm_of_few_rows(a, small), a @ small)
    assert len(multiplied) == 1


@pytest.mark.parametrize(
    "a, b",
    [
        (torch.randn(8, 16), torch.randn(16, 8)),
        (torch.randn(512, 256).t(), torch.randn(512, 512)),
        (torch.randn(1, 8192), torch.randn(8192, 2048)),
        (torch.randn(256, 256).bfloat16(), torch.randn(256, 512).bfloat16()),
        (torch.randn(256, 256).double(), torch.randn(256, 512).double()),
        (torch.arange(6).view(2, 3), torch.arange(12).view(3, 4)),
        (torch.randn(0, 256), torch.randn(256, 512)),
        (torch.randn(4096, 0), torch.randn(0, 4096)),
        (torch.randn(256, 512), torch.randn(4095).unfold(0, 512, 7)),
        (torch.randn(256, 512), torch.randn(4095).unfold(0, 512, 7).t()),
    ],
    ids="small,transposed,one row,bf16,fp64,int64,no rows,no columns,windows,windows.T".split(","),
)
def test_other_products_are_torchs(a, b, multiplied):
    assert torch.equal(torch.ops.torchtitan.mm(a, b), torch.mm(a, b))
    assert not multiplied


def test_a_model_of_small_products_keeps_torchs(fast_onednn):
    tenant = use_onednn(nn.Linear(64, 64))
    is_used = products._is_used
    host.move_out(tenant)
    assert not is_used


@pytest.mark.slow  # inductor compiles C++
def test_compiled_code_multiplies_by_onednn(fast_onednn, multiplied):
    torch.manual_seed(0)
    layer, x = nn.Linear(256, 512, bias=False), torch.randn(256, 256)
    options = products.compile_options()
    assert options == products.compile_options()  # otherwise engines would share no compiled code
    compiled = step_of(torch.compile(layer, fullgraph=True, options=options), x)
    assert multiplied == [(256, 256, 512), (256, 512, 256)]
    for one, other in zip(compiled, step_of(layer, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    # A pass of this class lets compiled code be cached.
    assert isinstance(options["post_grad_custom_post_pass"], torch_parts.GraphPass)


def test_an_inductor_pass_of_the_host_is_kept(fast_onednn):
    with torch_parts.inductor_config.patch(post_grad_custom_post_pass=lambda _: None):
        assert products.compile_options() is None
