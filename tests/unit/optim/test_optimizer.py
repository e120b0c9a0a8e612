import copy
from collections import OrderedDict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl

from torchtitan.config import LRScheduler, Optimizer
from torchtitan.distributed import ParallelDims
from torchtitan.optim.lr_scheduler import build_lr_schedulers
from torchtitan.optim.optimizer import (
    OptimizersContainer,
    build_optimizers,
    build_optimizers_with_moe_load_balancing,
)
from torchtitan.testing.gloo import run_ranks


def one_rank(**degrees) -> ParallelDims:
    sizes = {name: degrees.get(name, 1) for name in ("dp_replicate", "cp", "tp", "pp", "ep", "etp")}
    return ParallelDims(**sizes, dp_shard=-1, world_size=sizes["pp"] * sizes["tp"] * sizes["cp"])


def two_parts(seed: int = 0) -> list[nn.Module]:
    """Two model parts with different parameter names, like pipeline stages."""
    torch.manual_seed(seed)
    layers = {"first": nn.Linear(4, 8)}, {"second": nn.Linear(8, 2)}
    return [nn.Sequential(OrderedDict(layer)) for layer in layers]


def backward(parts: list[nn.Module], seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(3, 4, generator=generator)
    parts[1](parts[0](inputs)).square().sum().backward()


def weights(parts) -> list[torch.Tensor]:
    return [p.detach().clone() for part in parts for p in part.parameters()]


def plain_container(parts, **options) -> OptimizersContainer:
    return build_optimizers(parts, Optimizer(lr=0.1, **options), one_rank())


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_container_steps_like_one_torch_optimizer_over_all_parts(name, implementation):
    parts, twins = two_parts(), two_parts()
    common = dict(eps=1e-6, weight_decay=0.01)
    optimizers = plain_container(
        parts, name=name, implementation=implementation, beta1=0.8, **common
    )
    parameters = [p for part in twins for p in part.parameters()]
    cls = getattr(torch.optim, name)
    expected = cls(parameters, lr=0.1, betas=(0.8, 0.95), foreach=False, **common)
    for step in range(3):
        for modules, optimizer in ((parts, optimizers), (twins, expected)):
            backward(modules, seed=step)
            optimizer.step()
            optimizer.zero_grad()
    # Adam's update is about lr whatever the gradient's size, so rounding is seen at lr * 1e-5.
    torch.testing.assert_close(weights(parts), weights(twins), atol=1e-6, rtol=1e-5)
    assert all(p.grad is None for part in parts for p in part.parameters())
    for group in optimizers.param_groups:
        assert group["fused"] is (implementation == "fused")
        assert group["foreach"] is (implementation == "foreach")


def test_step_hooks_fire_once_per_container_step():
    parts, calls = two_parts(), []
    optimizers = OptimizersContainer(parts, torch.optim.Adam, {"lr": 0.1, "fused": True})

    def hook(optimizer, args, kwargs, model_parts):
        calls.append((optimizer, model_parts))

    optimizers.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizers.register_step_post_hook(partial(hook, model_parts=parts))
    backward(parts)
    assert calls == []
    optimizers.step()
    assert calls == ["pre", (optimizers, parts)]
    assert [type(optimizer) for optimizer in optimizers] == [torch.optim.Adam] * 2
    assert len(optimizers) == 2 and optimizers.optimizers[0].defaults["fused"] is True


def test_state_and_param_groups_are_those_of_the_optimizers_inside():
    parts = two_parts()
    optimizers = plain_container(parts)
    params = [p for part in parts for p in part.parameters()]
    assert not optimizers.state
    assert [p for group in optimizers.param_groups for p in group["params"]] == params
    assert params[0] not in optimizers.state and optimizers.state[params[0]] == {}
    backward(parts)
    optimizers.step()
    assert len(optimizers.state) == len(params) and set(optimizers.state) == set(params)
    assert optimizers.state[params[-1]] is optimizers.optimizers[1].state[params[-1]]
    with pytest.raises(KeyError):
        optimizers.state[nn.Parameter(torch.zeros(1))]


def test_frozen_parameters_get_no_optimizer():
    parts = two_parts()
    before = parts[0].first.weight.requires_grad_(False).clone()
    for in_backward in (False, True):
        optimizers = plain_container(parts, early_step_in_backward=in_backward)
        backward(parts)
        assert all(p.grad is None for part in parts for p in part.parameters()) is in_backward
        optimizers.step()
        assert "state.first.weight.exp_avg" not in optimizers.state_dict()
        assert "state.first.bias.exp_avg" in optimizers.state_dict()
        assert torch.equal(parts[0].first.weight, before)


def train_and_resume(make, make_other):
    """Train two parts; continue from a copy of their state as without a break, bit for bit.

    make, make_other: functions of a seed that return parts and their optimizers. Returns the saved
    state, and for both runs the learning rates of groups that have parameters.
    """
    runs = []
    for parts, optimizers in (make(0), make_other(5)):
        schedule = LRScheduler(warmup_steps=0)
        runs.append((parts, optimizers, build_lr_schedulers(optimizers, schedule, 10)))
    (parts, optimizers, schedulers), (resumed, loaded, follower) = runs
    for step in range(2):
        backward(parts, seed=step)
        optimizers.step()
        optimizers.zero_grad()
        schedulers.step()
    saved = copy.deepcopy(optimizers.state_dict())
    for part, source in zip(resumed, parts, strict=True):
        part.load_state_dict(source.state_dict())
    loaded.load_state_dict(saved)
    follower.load_state_dict(copy.deepcopy(schedulers.state_dict()))
    for modules, container, of_run in runs:
        backward(modules, seed=7)
        container.step()
        of_run.step()  # saving and loading leave each group in its place
    assert all(map(torch.equal, weights(parts), weights(resumed)))
    rates = [[g["lr"] for g in run[1].param_groups if g["params"]] for run in runs]
    return saved, *rates


@pytest.mark.parametrize("saved_in_backward", [False, True])
@pytest.mark.parametrize("loaded_in_backward", [False, True])
def test_state_is_keyed_by_name_and_resumes_bitwise(saved_in_backward, loaded_in_backward):
    def make(seed, early):
        parts = two_parts(seed)
        return parts, plain_container(parts, early_step_in_backward=early)

    makers = (partial(make, early=early) for early in (saved_in_backward, loaded_in_backward))
    saved, *rates = train_and_resume(*makers)
    assert all(rate == pytest.approx(0.1 * 0.7) for run in rates for rate in run)
    assert "state.first.weight.exp_avg" in saved and "param_groups.second.bias.lr" in saved


def test_unknown_optimizer_names_the_choices():
    with pytest.raises(NotImplementedError, match=r"\['Adam', 'AdamW', 'Muon'\], got 'SGD'"):
        plain_container(two_parts(), name="SGD")


@pytest.mark.parametrize("degree, key", [("pp", "pipeline"), ("ep", "expert")])
def test_stepping_in_backward_is_refused_with_pipeline_and_expert_parallelism(degree, key):
    dims = SimpleNamespace(**{"pp": 1, "ep": 1, degree: 2})
    with pytest.raises(NotImplementedError, match=f"early_step_in_backward.*{key}_parallel_degree"):
        build_optimizers(two_parts(), Optimizer(early_step_in_backward=True), dims)


def test_fault_tolerance_is_refused_only_when_enabled():
    build_optimizers(two_parts(), Optimizer(), one_rank(), SimpleNamespace(enabled=False))
    with pytest.raises(NotImplementedError, match="fault_tolerance.enable = false"):
        build_optimizers(two_parts(), Optimizer(), one_rank(), SimpleNamespace(enabled=True))


# --- MoE load balancing ---------------------------------------------------------------------


class Moe(nn.Module):
    def __init__(self, counts: list[float], coeff: float | None):
        super().__init__()
        self.load_balance_coeff = coeff
        self.register_buffer("tokens_per_expert", torch.tensor(counts))
        self.register_buffer("expert_bias", torch.zeros(len(counts)))


def moe_model(*moes: Moe) -> nn.Module:
    """A dense block, and one for each of `moes`."""
    model = nn.Module()
    model.layers = nn.ModuleDict()
    for i, moe in enumerate([None, *moes]):
        block = nn.Linear(2, 2)
        block.moe_enabled, block.moe = moe is not None, moe
        model.layers[str(i)] = block
    return model


def balanced_step(model: nn.Module) -> None:
    no_mesh = SimpleNamespace(get_optional_mesh=lambda name: None)
    build_optimizers_with_moe_load_balancing([model], Optimizer(), no_mesh).step()


def test_expert_bias_moves_towards_the_idle_experts_and_keeps_its_mean():
    moes = Moe([8.0, 0.0, 2.0, 2.0], coeff=0.1), Moe([1.0, 1.0, 1.0, 5.0], coeff=0.2)
    balanced_step(moe_model(*moes))
    # Signs of mean - count: (-, +, +, +) and (+, +, +, -), minus the mean of the changes.
    expected = torch.tensor([-0.1, 0.1, 0.1, 0.1]) - 0.05, torch.tensor([0.2, 0.2, 0.2, -0.2]) - 0.1
    for moe, bias in zip(moes, expected, strict=True):
        torch.testing.assert_close(moe.expert_bias, bias, atol=1e-7, rtol=0)
        assert moe.tokens_per_expert.count_nonzero() == 0


@pytest.mark.parametrize("is_compiled, change", [(False, 0.0), (True, 0.1)])
def test_recomputed_block_counts_each_token_once(is_compiled, change):
    model = moe_model(Moe([3.0, 2.0], coeff=0.1))
    block = model.layers["1"]
    block.checkpoint_impl = CheckpointImpl.NO_REENTRANT
    if is_compiled:  # which counts once by itself
        block._orig_mod = None  # the attribute of a compiled module
    balanced_step(model)
    # Halved with rounding down, (3, 2) becomes (1, 1), which is even.
    torch.testing.assert_close(block.moe.expert_bias, torch.tensor([-change, change]))


@pytest.mark.parametrize("coeff", [None, 0.0])
def test_without_a_coefficient_nothing_is_balanced(coeff):
    model = moe_model(Moe([5.0, 1.0], coeff=coeff))
    balanced_step(model)
    moe = model.layers["1"].moe
    assert moe.expert_bias.count_nonzero() == 0 and moe.tokens_per_expert.tolist() == [5.0, 1.0]


def balanced_bias_of_this_rank() -> list[float]:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    dims = ParallelDims(
        dp_replicate=1, dp_shard=world_size, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=world_size
    )
    model = moe_model(Moe([4.0, 0.0, 1.0] if rank == 0 else [0.0, 6.0, 1.0], coeff=1.0))
    build_optimizers_with_moe_load_balancing([model], Optimizer(), dims).step()
    return model.layers["1"].moe.expert_bias.tolist()


def test_expert_load_is_summed_over_ranks():
    # Counts 4, 6, 2 with mean 4: changes 0, -1, +1.
    assert run_ranks(balanced_bias_of_this_rank, 2) == [[0.0, -1.0, 1.0]] * 2


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_saving_before_the_first_step_changes_no_step(implementation):
    trained = []
    for saves in (False, True):
        parts = two_parts()
        optimizers = plain_container(parts, implementation=implementation)
        for step in range(2):
            backward(parts)
            if saves and step == 0:
                gradients = [p.grad for part in parts for p in part.parameters()]
                state = optimizers.state_dict()
                assert "state.first.weight.exp_avg" in state
                optimizers.load_state_dict(state)
                kept = [p.grad for part in parts for p in part.parameters()]
                assert list(map(id, kept)) == list(map(id, gradients))
            optimizers.step()
            optimizers.zero_grad()
        trained.append(weights(parts))
    assert all(map(torch.equal, *trained))
