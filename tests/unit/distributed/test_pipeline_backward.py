"""A stage's backward in two halves, compared with autograd's backward in one."""

import gc
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.distributed import pipeline_stage


class Doubled(torch.autograd.Function):
    """A product with two outputs, written in Python."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight, 2 * (x @ weight)

    @staticmethod
    def backward(ctx, first, second):
        x, weight = ctx.saved_tensors
        gradient = first + 2 * second
        return gradient @ weight.T, x.T @ gradient


class Model(nn.Module):
    """Weights used once, twice, in a side branch, and never."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"once": (4, 4), "shared": (4, 4), "side": (4,), "python": (4, 4), "unused": (4,)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.norm = nn.LayerNorm(4)

    def forward(self, hidden):
        hidden = (hidden + torch.tanh(hidden @ self.once)) @ self.shared
        hidden = torch.tanh(hidden @ self.shared) + self.side.exp() * hidden * self.frozen
        first, second = Doubled.apply(self.norm(hidden), self.python)
        hidden = torch.tanh(first + second) @ self.shared.T + hidden
        return (hidden @ self.once).view(-1, 2, 2).transpose(1, 2)


def inputs():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=generator) for _ in range(2)]


def gradients(model, backward):
    """Return the gradients of two microbatches' inputs, and of the weights."""
    hidden = [x.requires_grad_() for x in inputs()]
    outputs = [model(x) for x in hidden]
    backward(outputs, hidden)
    weights = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden": torch.stack([x.grad for x in hidden])} | weights


def at_once(outputs, hidden):
    for output in outputs:
        output.backward(torch.arange(12.0).view(output.shape))


def in_halves(outputs, hidden):
    edges = [torch.autograd.graph.get_gradient_edge(output) for output in outputs]
    gradient = torch.arange(12.0).view(outputs[0].shape)
    outputs.clear()
    halves = [
        pipeline_stage._backward_input(edge, gradient, x)
        for edge, x in zip(edges, hidden, strict=True)
    ]
    assert all(x.grad is not None for x in hidden)
    stage = object.__new__(pipeline_stage.PipelineStage)
    stage.is_first, stage.submod, stage._contexts = False, nn.Identity(), [nullcontext] * 2
    stage._weight_halves = {i: (edges[i], halves[i]) for i in range(2)}
    del edges
    gc.collect()
    for i in range(2):
        stage.backward_weight(i)


@pytest.mark.parametrize("hooked", [False, True])
def test_halves_give_the_gradients_of_a_whole_backward(hooked):
    expected_model, model = Model(), Model()
    if hooked:
        for each in (expected_model, model):
            each.norm.register_forward_hook(
                lambda m, x, y: y.register_hook(lambda g: 3 * g) and None
            )
            each.register_forward_hook(lambda m, x, y: y.register_hook(lambda g: 5 * g) and None)
    expected, found = gradients(expected_model, at_once), gradients(model, in_halves)
    assert found.keys() == expected.keys() >= {"once", "shared", "side", "python", "hidden"}
    assert "unused" not in found
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6, msg=name)


def test_first_half_computes_no_weight_and_second_half_repeats_no_product_of_the_path():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    hidden = torch.randn(2, 8, requires_grad=True)
    edge = torch.autograd.graph.get_gradient_edge(model(hidden))
    with FlopCounterMode(display=False) as first:
        halves = pipeline_stage._backward_input(edge, torch.ones(2, 8), hidden)
    assert all(layer.weight.grad is None for layer in model)
    with FlopCounterMode(display=False) as second:
        for half in halves:
            pipeline_stage._backward_weight(half)
    one_product = 2 * 2 * 8 * 8
    assert first.get_total_flops() == second.get_total_flops() == 4 * one_product
