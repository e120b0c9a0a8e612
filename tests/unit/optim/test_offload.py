"""Moves of an engine's states; "meta" stands in for the device that a CPU test lacks."""

import copy
import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchtitan.optim.offload import HOST, Offloader
from torchtitan.optim.optimizer import OptimizersContainer
from torchtitan.tools import host

META = torch.device("meta")


def trained(device=HOST, **optimizer):
    """(a model after one step, with gradients of the next step, and its offloader)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.ones(2))
    optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": 0.1} | optimizer)
    for _ in range(2):
        optimizers.step()
        model(torch.ones(1, 3)).sum().backward()
    return model, Offloader([model], optimizers, torch.device(device))


@pytest.fixture
def swapped_parameters():
    """Parameters stay the same objects when they move to "meta", as to any device."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapped_parameters")
def test_gradients_elsewhere_than_their_parameters_wait_to_be_back():
    model, offloader = trained()
    gradients, moved = [p.grad.clone() for p in model.parameters()], []
    offloader.replace({"model"}, lambda tensor: moved.append(tensor) or tensor.to(META))
    assert len(moved) == len(gradients) + 1  # + 1 for the buffer; the shared weight counts once
    assert all(p.is_meta and p.grad is None for p in model.parameters())
    offloader.replace({"model"}, lambda tensor: torch.zeros_like(tensor, device=HOST))
    found = [p.grad for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))
    offloader.replace({"grad"}, lambda tensor: tensor.to(META))
    assert all(p.grad is None for p in model.parameters())
    offloader.replace({"model"}, lambda tensor: tensor.to(META))
    assert all(p.grad.is_meta for p in model.parameters())


@pytest.mark.parametrize(("optimizer", "counts"), [({}, "cpu"), ({"fused": True}, "meta")])
def test_steps_are_counted_on_the_host_unless_the_kernel_counts_them(optimizer, counts):
    model, offloader = trained(**optimizer)
    model(torch.ones(1, 3)).sum().backward()
    offloader.optimizers.step()
    offloader.replace({"optimizer"}, lambda tensor: tensor.to(META))
    states = list(offloader.optimizers.state.values())
    assert states and all(state["exp_avg"].is_meta for state in states)
    assert {state["step"].device.type for state in states} == {counts}
    assert not any(p.is_meta for p in model.parameters())


def test_loaded_state_goes_where_the_optimizer_is_not_where_its_parameters_are():
    _, offloader = trained(META)
    (optimizer,) = offloader.optimizers
    saved = copy.deepcopy(optimizer.state_dict())
    offloader.replace({"optimizer"}, lambda tensor: tensor.to(META))
    offloader.places["model"] = HOST  # as to("cpu", optimizer=False) leaves it
    optimizer.load_state_dict(saved)
    assert all(state["exp_avg"].is_meta for state in optimizer.state.values())
    assert {state["step"].device for state in optimizer.state.values()} == {HOST}


@pytest.fixture
def on_device(monkeypatch):
    """(list of events, a trained model, its offloader), with the CPU acting as an accelerator."""
    events = []
    stream = SimpleNamespace(synchronize=lambda: events.append("wait"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: events.append("free"), raising=False)

    def copy_to(self, target, non_blocking=False):
        events.append("copy" if non_blocking else "blocking copy")
        return self.detach().clone()

    model, offloader = trained(fused=True)
    monkeypatch.setattr(torch.Tensor, "to", copy_to)
    offloader.places = dict.fromkeys(offloader.places, META)
    return events, model, offloader


def test_host_waits_once_for_all_copies(on_device):
    events, model, offloader = on_device

    def tensors():
        states = offloader.optimizers.state.values()
        gradients = [p.grad for p in model.parameters()]
        in_states = [value for state in states for value in state.values()]
        return [*model.parameters(), model.table, *gradients, *in_states]

    before = [(tensor.data_ptr(), tensor.clone()) for tensor in tensors()]
    offloader.move(HOST, model=True, optimizer=True, grad=True)
    assert events == ["copy"] * len(before) + ["wait", "free"]
    for tensor, (memory, value) in zip(tensors(), before, strict=True):
        assert torch.equal(tensor, value) and tensor.data_ptr() != memory
    assert model[1].weight is model[0].weight


def test_only_what_was_asked_for_is_copied_to_the_host(on_device):
    events, model, offloader = on_device
    offloader.move(HOST, model=False, optimizer=False, grad=True)
    assert events.count("copy") == len(list(model.parameters()))
    events.clear()
    offloader.move(HOST, model=False, optimizer=False, grad=True)  # it is there already
    assert events == []


def test_last_engine_that_closes_gives_pinned_memory_back(on_device, monkeypatch):
    events, _, offloader = on_device
    gc.collect()  # engines that other tests have not closed live until then
    name, release = "empty_host_cache", lambda: events.append("release")
    monkeypatch.setattr(torch.accelerator, name, release, raising=False)  # torch 2.11 lacks it
    host.move_in(offloader)
    for _ in range(2):
        offloader.move(HOST, model=True, optimizer=False, grad=False)
        offloader.places = dict.fromkeys(offloader.places, META)
    host.move_out(offloader)
    assert events.count("release") == 1


def test_step_without_its_state_names_what_is_away_and_the_call_that_brings_it_back():
    _, offloader = trained("cuda:0")  # in name only, so nothing is moved
    offloader.move(HOST, model=False, optimizer=True, grad=True)
    offloader.check_here("forward_step", "model")
    message = r"optim_step needs optimizer and grad on cuda:0, but to\(\) has moved them to cpu.*"
    with pytest.raises(RuntimeError, match=message + r"'cuda:0', optimizer=True, grad=True\)"):
        offloader.check_here("optim_step", "model", "optimizer", "grad")


@pytest.mark.parametrize("device", ["meta", "cuda", "cuda:1"])
def test_only_the_engines_own_device_and_the_host_are_targets(device):
    _, offloader = trained()
    with pytest.raises(ValueError, match=f"got '{device}', but this engine computes on cpu"):
        offloader.check_target(device)
    assert offloader.check_target("cpu") == HOST
    _, on_device = trained("cuda:0")
    assert on_device.check_target("cuda") == torch.device("cuda:0")
    assert on_device.check_target("cpu") == HOST
