"""Muon against torch.optim.Muon, groups against torch.optim.AdamW, and moments in bf16."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from tests.unit.config.test_config_checks import config_with
from tests.unit.optim.test_optimizer import one_rank, train_and_resume, two_parts
from torchtitan.config import Optimizer
from torchtitan.config.checks import check_job_config
from torchtitan.config.job_config import Muon as MuonOptions
from torchtitan.config.job_config import ParameterGroup
from torchtitan.engine import TrainingEngine
from torchtitan.optim.adam import RoundedAdam, round_at_random
from torchtitan.optim.groups import ParameterGroups, check_groups
from torchtitan.optim.muon import Muon
from torchtitan.optim.optimizer import build_optimizers
from torchtitan.testing.tiny_jobs import add_tiny_flavors, make_documents, pack, run_step, tiny_job
from torchtitan.tools.errors import ConfigError

add_tiny_flavors()
DECAYING = dict(warmup_steps=2, min_lr_factor=0.1)
MUON = dict(name="Muon", lr=1e-2, weight_decay=0.1)


def engine_of(folder, flavor="tiny", optimizer=None, **sections) -> TrainingEngine:
    return TrainingEngine(
        tiny_job(str(folder), flavor, optimizer=optimizer or {}, lr_scheduler=DECAYING, **sections)
    )


def parameters_of(engine) -> dict[str, nn.Parameter]:
    return {name: p for name, p in engine.model_parts[0].named_parameters() if p.requires_grad}


# --- Muon -----------------------------------------------------------------------------------


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_are_updated_bit_for_bit_as_by_torchs_muon_and_the_rest_as_by_adamw(
    adjust_lr_fn, nesterov
):
    torch.manual_seed(0)
    shapes = [(24, 72), (72, 24), (64, 64), (5, 48, 96), (3, 40, 16)]  # the last two: of experts
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    other = nn.Parameter(torch.ones(9))
    theirs = [[nn.Parameter(m.clone()) for m in p.detach().view(-1, *p.shape[-2:])] for p in ours]
    their_other = nn.Parameter(other.detach().clone())
    options = dict(adjust_lr_fn=adjust_lr_fn, nesterov=nesterov, momentum=0.9, ns_steps=6)
    common, of_adamw = dict(lr=0.02, weight_decay=0.1), dict(betas=(0.9, 0.95), eps=1e-8)
    settings = dict(options=MuonOptions(**options), **of_adamw, **common)
    muon = Muon([{"params": [*ours, other]}], matrices=ours, **settings)
    oracles = [
        torch.optim.Muon([m for matrices in theirs for m in matrices], **options, **common),
        torch.optim.AdamW([their_other], **of_adamw, **common),
    ]
    for _ in range(25):
        for p, matrices in zip(ours, theirs, strict=True):
            p.grad = p.detach() + torch.randn_like(p)
            for matrix, grad in zip(matrices, p.grad.view(-1, *p.shape[-2:]), strict=True):
                matrix.grad = grad.clone()
        other.grad = torch.randn_like(other)
        their_other.grad = other.grad.clone()
        for optimizer in (muon, *oracles):
            optimizer.step()
    for p, matrices in zip(ours, theirs, strict=True):
        assert torch.equal(p, torch.stack(list(matrices)).view_as(p))
    assert torch.equal(other, their_other)


def test_matrices_are_in_layers_and_no_biases():
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("tok_embeddings", "output")})
    model["layers"] = nn.ModuleDict({"0": nn.Linear(2, 2)})
    for name, shape in {"experts": (3, 2, 2), "experts_bias": (3, 2), "scale": (2,)}.items():
        model["layers"]["0"].register_parameter(name, nn.Parameter(torch.ones(shape)))
    layer = model["layers"]["0"]
    found = ParameterGroups([model], Optimizer(name="Muon")).matrices()
    assert len(found) == 2 and found[0] is layer.weight and found[1] is layer.experts


# --- Groups ---------------------------------------------------------------------------------


def test_groups_train_as_those_of_torchs_adamw():
    tables = [
        ParameterGroup(pattern="norm|bias", weight_decay=0.0, beta1=0.8),
        ParameterGroup(pattern="^first", lr=1e-3, eps=1e-4),
        ParameterGroup(pattern="^output", lr=3e-2, beta2=0.99),
    ]
    model = nn.ModuleDict({x: nn.Linear(4, 4) for x in ("norm", "first", "second", "output")})
    twin = copy.deepcopy(model)
    biases = [twin[name].bias for name in ("first", "second", "output")]
    groups = [
        {"params": [*twin.norm.parameters(), *biases], "weight_decay": 0.0, "betas": (0.8, 0.95)},
        {"params": twin.first.weight, "lr": 1e-3, "eps": 1e-4},
        {"params": twin.output.weight, "lr": 3e-2, "betas": (0.9, 0.99)},
        {"params": twin.second.weight},
    ]
    settings = dict(lr=1e-2, weight_decay=0.1, eps=1e-3)
    ours = build_optimizers([model], Optimizer(groups=tables, **settings), one_rank())
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True, **settings)
    for _ in range(8):
        for p, other in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            other.grad = p.grad.clone()
        ours.step()
        theirs.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert type(ours.optimizers[0]) is torch.optim.AdamW


def test_rate_of_one_step_keeps_the_ratios_of_the_groups(tmp_path):
    tables = [ParameterGroup(pattern="norm", lr=1e-3), ParameterGroup(pattern="output")]
    with engine_of(tmp_path, optimizer=dict(lr=1e-2, groups=tables)) as engine:
        rates = []
        engine.optimizers.register_step_pre_hook(
            lambda *_: rates.append([group["lr"] for group in engine.optimizers.param_groups])
        )
        run_step(engine, make_documents(0))
        batch, labels = pack(make_documents(1))
        engine.forward_backward_step(input_dict=batch, labels=labels, global_valid_tokens=100)
        assert engine.optim_step(lr=0.5).lr == 0.5
    assert rates[0] == pytest.approx([0.5e-2, 0.5e-3, 0.5e-2])  # the first of two steps to warm up
    assert rates[1] == pytest.approx([0.5, 0.05, 0.5])


@pytest.mark.parametrize("options", [{}, {"state_dtype": "bfloat16"}], ids=["AdamW", "bf16"])
def test_groups_that_are_empty_in_a_part_resume_bitwise(options):
    tables = [ParameterGroup(pattern="^first", lr=0.3), ParameterGroup(pattern="second", lr=0.2)]

    def make(seed):
        parts = two_parts(seed)
        optimizers = build_optimizers(
            parts, Optimizer(lr=0.1, groups=tables, **options), one_rank()
        )
        sizes = [[len(group["params"]) for group in one.param_groups] for one in optimizers]
        assert sizes == [[0, 2, 0], [0, 0, 2]]
        return parts, optimizers

    _, rates, rates_of_resumed = train_and_resume(make, make)
    assert rates == rates_of_resumed == pytest.approx([0.3 * 0.7, 0.2 * 0.7])


# --- Moments in bf16 ------------------------------------------------------------------------


def test_rounding_is_right_on_average_and_to_a_neighbour():
    x = torch.tensor([1.001, -3.0e-5, 0.0, 2.0, math.inf]).repeat(40_000, 1)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    round_at_random(x, out, torch.Generator().manual_seed(0))
    error = (out.double() - x.double())[:, :4] / x.double()[:, :4].abs().clamp(min=1e-30)
    assert error.abs().max() < 2**-7
    # Standard deviation of the mean: at most 2**-8 / sqrt(40,000) = 2e-5.
    assert error.mean(0).abs().max() < 8e-5
    assert torch.equal(out[:, 2:], x[:, 2:].bfloat16())


def train_one(make, steps: int, beta2: float) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """Train 4096 numbers on noise that is 10 times smaller from step 100 on."""
    p = nn.Parameter(torch.zeros(4096))
    settings = dict(lr=1e-3, betas=(0.9, beta2), eps=1e-8, weight_decay=0.0)
    optimizer = make([{"params": [p]}], **settings)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        p.grad = torch.randn(4096, generator=generator) * (1.0 if step < 100 else 0.1)
        optimizer.step()
    return p, optimizer


def test_moments_in_bf16_follow_those_in_fp32():
    make = partial(RoundedAdam, state_dtype=torch.bfloat16)
    for beta2 in (0.95, 0.999):  # the latter changes a second moment by 1/1000, rounding by 1/256
        p, ours = train_one(make, 1000, beta2)
        twin, theirs = train_one(torch.optim.AdamW, 1000, beta2)
        moment, expected = (o.state[x]["exp_avg_sq"] for o, x in ((ours, p), (theirs, twin)))
        assert moment.dtype == torch.bfloat16
        assert (moment.double().mean() / expected.double().mean() - 1).abs() < 0.01
        assert (p - twin).norm() / twin.norm() < 0.1


def test_rounded_adam_without_rounding_is_torchs():
    for cls, decoupled in ((torch.optim.AdamW, True), (torch.optim.Adam, False)):
        p, _ = train_one(partial(RoundedAdam, decoupled_weight_decay=decoupled), 30, 0.95)
        assert torch.equal(p, train_one(cls, 30, 0.95)[0])


# --- Checkpoints ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"state_dtype": "bfloat16"}], ids=["fp32", "bf16"])
def test_run_with_muon_and_groups_resumes_bitwise(options, tmp_path):
    tables = [ParameterGroup(pattern="norm", lr=1e-3, weight_decay=0.0)]
    optimizer = {**MUON, **options, "groups": tables}
    job = partial(engine_of, tmp_path, optimizer=optimizer, checkpoint=dict(enable=True))
    documents = make_documents(0)
    with job() as engine:
        for _ in range(3):
            run_step(engine, documents)
            engine.step += 1
        engine.save()
        expected = [run_step(engine, documents) for _ in range(3)]
        weights_of_first = {name: p.detach().clone() for name, p in parameters_of(engine).items()}
        states = [s for s in engine.optimizers.state.values() if "momentum_buffer" in s]
        dtypes = {state["momentum_buffer"].dtype for state in states}
        assert dtypes == {torch.bfloat16 if options else torch.float32}
    with job() as engine:
        assert engine.load()
        assert [run_step(engine, documents) for _ in range(3)] == expected
        for name, p in parameters_of(engine).items():
            assert torch.equal(p, weights_of_first[name]), name


# --- Wrong settings -------------------------------------------------------------------------


def table(**changes) -> dict:
    return {"optimizer__groups": [ParameterGroup(**{"pattern": "norm", **changes})]}


def muon(**options) -> dict:
    return {"optimizer__name": "Muon"} | {f"optimizer__muon__{k}": v for k, v in options.items()}


GROUPS, EARLY = r"optimizer\.groups\[0\]\.", {"optimizer__early_step_in_backward": True}
BF16 = {"optimizer__state_dtype": "bfloat16", "training__dtype": "bfloat16"}


@pytest.mark.parametrize(
    "settings, message",
    [
        (table(pattern="(norm"), GROUPS + r"pattern must be a regular expression, got '\(norm': "),
        (table(lr=-1.0), GROUPS + "lr must be at least 0, got -1.0"),
        (table(beta2=-0.1), GROUPS + "beta2 must be at least 0, got -0.1"),
        (table(muon=False), GROUPS + "muon = False has no effect .* 'AdamW'; remove it"),
        (table() | EARLY, "got the number of optimizer.groups = 1"),
        (muon() | EARLY, "early_step_in_backward .*got optimizer.name = 'Muon'; change one of"),
        ({"optimizer__muon__momentum": 0.5}, "muon.momentum = 0.5 has no effect .*'AdamW'"),
        ({"optimizer__muon__ns_steps": 0}, "muon.ns_steps must be at least 1"),
        (muon(ns_coefficients=[1.0, math.nan, 1.0]), "ns_coefficients must be three finite"),
        (BF16, "state_dtype = 'bfloat16' .*got training.dtype = 'bfloat16'.*; remove it"),
    ],
)
def test_wrong_setting_is_one_sentence_with_key_value_and_remedy(settings, message):
    with pytest.raises(ConfigError, match=message) as raised:
        check_job_config(config_with(**settings))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "patterns, message",
    [
        (["layers", "wq"], r"groups\[1\].* fits only parameters that earlier tables take, such as"),
        (["wq", "frozen"], r"groups\[1\].* fits only frozen parameters, such as frozen.weight"),
    ],
)
def test_table_without_parameters_is_refused_with_the_reason(patterns, message):
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("norm", "frozen")})
    model["layers"] = nn.ModuleDict({"wq": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    config = Optimizer(groups=[ParameterGroup(pattern=pattern) for pattern in patterns])
    with pytest.raises(ConfigError, match=message):
        check_groups(model, config)
    del config.groups[1]
    check_groups(model, config)


def test_muon_without_matrices_in_layers_is_refused():
    with pytest.raises(ConfigError, match="'Muon' needs matrices .*; set it to 'AdamW'"):
        check_groups(nn.ModuleDict({"output": nn.Linear(2, 2)}), Optimizer(name="Muon"))
