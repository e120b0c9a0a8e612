"""The optimizer step: what it divides, clips, skips and refuses, on one process and the debug model."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from tests.unit.test_engine import (
    backward,
    gradients,
    make_engine,
    num_valid,
    poison,
    random_batch,
    run_backward,
)
from torchtitan.batch.dummy_microbatches import token_counters, without_counting
from torchtitan.step.update import MAX_SKIPPED_STEPS_IN_A_ROW

pytestmark = [pytest.mark.usefixtures("narrow_debugmodel"), pytest.mark.long]


@pytest.fixture
def engine(tmp_path):
    return make_engine(tmp_path)


def test_optim_step_reports_norm_and_learning_rate_of_the_first_step(tmp_path):
    engine = make_engine(tmp_path, "--optimizer.lr=1e-3")
    batch, labels = random_batch(2, 32)
    run_backward(engine, batch, labels, num_valid(labels))
    expected = torch.stack([g.double().norm() for g in gradients(engine).values()]).norm()
    result = engine.optim_step()
    # On the CPU norms are taken row by row; elsewhere by torch's kernel, in fp32.
    rel = 1e-5 if engine.device.type == "cpu" else 2e-4
    assert result.grad_norm.item() == pytest.approx(expected.item(), rel=rel)
    assert result.lr == pytest.approx(1e-3 / 5)
    assert result.skipped is False


def test_non_finite_gradient_is_skipped_and_leaves_the_weights(engine, caplog):
    before = copy.deepcopy(engine.model_parts[0].state_dict())
    for value in (math.nan, math.inf):
        backward(engine)
        poison(engine, value)
        assert engine.optim_step().skipped is True
        for name, tensor in engine.model_parts[0].state_dict().items():
            assert torch.equal(tensor, before[name])
        assert engine.weights_version == 0  # a look at what an accelerator said
        assert f"gradient norm is {value}" in caplog.text
    assert "first bad loss" not in caplog.text  # backward overflowed


def test_too_many_skipped_steps_in_a_row_stop_the_run(engine):
    for step_is_bad in (True, False):  # not in a row with those that follow
        poison(engine) if step_is_bad else backward(engine)
        engine.optim_step()
    for _ in range(MAX_SKIPPED_STEPS_IN_A_ROW):
        poison(engine)
        engine.optim_step()
    poison(engine)
    with pytest.raises(FloatingPointError, match="nonfinite_grad_norm"):
        engine.optim_step()
        engine.weights_version  # noqa: B018 (on an accelerator the error comes with a look)


def test_first_bad_microbatch_after_a_loss_of_the_callers_own_has_its_own_documents(engine, caplog):
    batch, labels = random_batch(2, 32, 0)
    with engine.train_context(), engine.maybe_enable_amp:
        microbatch = engine.prepare(batch, labels)
        own = engine.model_parts[0](microbatch.inputs, **microbatch.kwargs).sum()
    engine.backward(own)
    for number in (1, 2):
        batch["input"].sample_ids = torch.tensor([[number, number], [7, 7]])
        run_backward(engine, batch, labels, loss_fn=lambda logits, *_: logits.sum() * math.nan)
    engine.optim_step()
    assert engine.weights_version == 0
    assert "nan, in microbatch 2 of 3, row 1 (document 1), row 2 (document 7)" in caplog.text


def test_learning_rate_of_one_step_leaves_the_schedule_alone(tmp_path):
    engine = make_engine(tmp_path, "--optimizer.lr=1e-3", "--optimizer.weight_decay=0")
    before = copy.deepcopy(dict(engine.model_parts[0].named_parameters()))
    assert engine.lr == pytest.approx(1e-3 / 5)
    backward(engine)
    assert engine.optim_step(lr=0.0).lr == 0.0
    for name, p in engine.model_parts[0].named_parameters():
        assert torch.equal(p, before[name])
    assert engine.lr == pytest.approx(2e-3 / 5)
    # A number, however it comes: a tensor would stay, and be saved.
    backward(engine)
    result = engine.optim_step(lr=torch.tensor(0.5))
    assert (result.lr, type(result.lr)) == (0.5, float)
    assert engine.lr == pytest.approx(3e-3 / 5)


def test_arguments_that_would_make_weights_useless_are_refused(engine):
    backward(engine)
    lrs = [("lr", value) for value in (-1e-3, math.nan, math.inf)]
    for name, value in (*lrs, ("max_norm", 0), ("max_norm", torch.tensor(-1.0))):
        with pytest.raises(ValueError, match=f"optim_step's {name} must be .*; correct it"):
            engine.optim_step(**{name: value})
    assert engine.optim_step().grad_norm > 0  # the gradients are still there


def test_max_norm_of_one_step_replaces_that_of_the_config(engine):
    seen = []
    engine.optimizers.register_step_pre_hook(
        lambda *_: seen.append(torch.stack([g.norm() for g in gradients(engine).values()]).norm())
    )
    for max_norm in (0.25, float("inf")):
        backward(engine)
        result = engine.optim_step(max_norm=max_norm)
        # Clipping adds 1e-6 to the norm that it divides by.
        expected = min(max_norm, result.grad_norm.item())
        assert seen.pop().item() == pytest.approx(expected, rel=1e-4)


def test_deferred_denominator_gives_the_gradient_of_the_denominator_known_before(tmp_path):
    engine = make_engine(tmp_path, "--training.max_norm=1e9")
    batch, labels = random_batch(2, 32)
    norms = []
    for divide_by, later in ((num_valid(labels), None), (1, torch.tensor(num_valid(labels)))):
        run_backward(engine, batch, labels, divide_by)
        norms.append(engine.optim_step(lr=0.0, denominator=later).grad_norm.item())
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    nothing = {"input_dict": [], "labels": [], "global_valid_tokens": 1}
    engine.forward_backward_step(**nothing)
    assert engine.optim_step(denominator=0).grad_norm.item() == 0
    run_backward(engine, batch, labels, divide_by)
    undivided = engine.optim_step(lr=0.0, denominator=0).grad_norm.item()
    assert undivided == pytest.approx(norms[0] * num_valid(labels), rel=1e-5)
    for denominator in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="denominator must add up to a finite number"):
            engine.optim_step(denominator=denominator)


def test_denominators_of_ranks_are_reduced_as_their_gradients_are(engine, monkeypatch):
    """Two ranks give 2 and 6: sums of gradients are divided by the sum, means by the mean."""
    engine.update.dp_group = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total, group: total.add_(6.0))
    norm = math.sqrt(sum(p.numel() for p in engine.model_parts[0].parameters()))
    for reduction, divisor in (("sum", 8), ("mean", 4)):
        training = engine.update.training
        engine.update.training = dataclasses.replace(training, gradient_reduction=reduction)
        poison(engine, 1.0)
        result = engine.optim_step(denominator=2.0)
        assert result.grad_norm.item() == pytest.approx(norm / divisor, rel=1e-5)


def test_what_comes_too_late_is_refused_where_weights_are_updated_in_backward(tmp_path):
    engine = make_engine(tmp_path, "--optimizer.early_step_in_backward")
    with pytest.raises(ValueError, match=r"optim_step\(lr=...\) comes too late"):
        engine.optim_step(lr=1e-3)
    batch, labels = random_batch(2, 32)
    with pytest.raises(ValueError, match="a step has one microbatch, got 2"):
        run_backward(engine, [batch, batch], [labels, labels])
    with pytest.raises(IndexError):
        run_backward(engine, batch, labels, loss_fn=lambda *_: [][0])
    for _ in range(2):
        backward(engine)
        with pytest.raises(ValueError, match=r"got 2 before optim_step\(\)"):
            backward(engine)
        engine.optim_step()


@pytest.mark.parametrize("flags", [(), ("--optimizer.early_step_in_backward",)], ids=str)
def test_update_waits_for_a_save_that_is_still_copying(flags, tmp_path, monkeypatch):
    engine = make_engine(tmp_path, *flags)
    (weight, *_) = engine.model_parts[0].parameters()
    before, waited_with = weight.clone(), []
    monkeypatch.setattr(
        engine.checkpointer, "maybe_wait_for_staging", lambda: waited_with.append(weight.clone())
    )
    backward(engine)
    if not flags:  # backward changes nothing
        assert not waited_with
        engine.optim_step()
    assert waited_with and torch.equal(waited_with[0], before) and not torch.equal(weight, before)


def test_step_without_a_gradient_is_refused_and_one_with_a_clients_own_is_not(engine):
    with pytest.raises(ValueError, match="found no gradient on any rank; call forward_backward"):
        engine.optim_step()
    assert engine.weights_version == 0 and engine.lr_schedulers.last_epoch == 0
    for parameter in engine.model_parts[0].parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.optim_step()
    backward(engine)
    engine.optimizers.zero_grad()
    engine.optim_step()  # of no gradient: of a backward pass whose gradients were dropped
    with pytest.raises(ValueError, match="found no gradient"):
        engine.optim_step()


def test_skipped_and_failed_steps_forget_how_many_tokens_each_expert_got(tmp_path):
    engine = make_engine(tmp_path, "--model.name=qwen3", "--model.flavor=debugmodel_moe_small")
    backward(engine)
    counters = token_counters(engine.model_parts)
    assert counters and all(counter.sum() > 0 for counter in counters)
    poison(engine)
    assert engine.optim_step().skipped
    assert all(counter.sum() == 0 for counter in counters)
    with pytest.raises(ZeroDivisionError), without_counting(engine.model_parts):
        counters[0].add_(1)
        raise ZeroDivisionError
    assert counters[0].sum() == 0
    with pytest.raises(ZeroDivisionError):
        run_backward(engine, *random_batch(2, 32), loss_fn=lambda *_: 1 / 0)
    assert all(counter.sum() == 0 for counter in counters)


def test_update_with_learning_rate_0_is_warned_of_once_per_engine(tmp_path, caplog):
    batch, labels = random_batch(2, 8)
    for _ in range(2):
        caplog.clear()
        with make_engine(tmp_path, "--lr_scheduler.step_offset=-1") as engine:
            before = [p.detach().clone() for p in engine.model_parts[0].parameters()]
            for lr in (None, 0.0):
                run_backward(engine, batch, labels)
                assert engine.optim_step(lr=lr).lr == 0
            assert all(map(torch.equal, before, engine.model_parts[0].parameters()))
        assert caplog.text.count("an update with learning rate 0 changes no weight") == 1


def test_converters_hook_runs_between_the_update_and_zeroing_and_not_after_a_load(
    tmp_path, monkeypatch
):
    with make_engine(tmp_path) as engine:
        (part,), seen = engine.model_parts, []
        weights = [p.detach().clone() for p in part.parameters()]

        def note(parts):
            changed = not all(map(torch.equal, weights, part.parameters()))
            seen.append((parts == [part], changed, all(p.grad.any() for p in part.parameters())))

        monkeypatch.setattr(engine.model_converters, "post_optimizer_hook", note)
        batch, labels = random_batch(2, 8)
        for denominator in (1.0, math.nan):  # the second step is skipped
            run_backward(engine, batch, labels)
            if denominator != 1.0:
                next(part.parameters()).grad.fill_(math.nan)
            engine.optim_step()
        engine.save(f"{tmp_path}/saved")
        engine.load(f"{tmp_path}/saved")
        assert seen == [(True, True, True)]
