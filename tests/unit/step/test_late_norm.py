"""A step whose gradients are not finite, where the device decides and the host reads it later.

On a CPU the engine reads the norm at once; `late_engine` makes it wait as on an accelerator.
"""

import dataclasses
import math

import pytest
import torch

from tests.unit.test_engine import backward, make_engine, poison
from torchtitan.optim.optimizer import skips_on_device
from torchtitan.tools import host_copy

pytestmark = [pytest.mark.usefixtures("narrow_debugmodel"), pytest.mark.long]
MOE = "--model.name=qwen3", "--model.flavor=debugmodel_moe_small"


def late_engine(tmp_path, *overrides):
    engine = make_engine(tmp_path, *overrides)
    engine.update.skips_on_device = True
    return engine


def states(engine) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer state, under names of their own."""
    (model,) = engine.model_parts
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, p in model.named_parameters():
        if p in engine.optimizers.state:
            state = engine.optimizers.state[p]
            found |= {f"{name}.{key}": value.clone() for key, value in state.items()}
    return found


def differing(ours, theirs) -> list[str]:
    """The names of states whose bits differ."""
    return [name for name in ours.keys() & theirs.keys() if not ours[name].equal(theirs[name])]


def good_bad_good(engine) -> tuple[list[bool], list[int]]:
    skipped, versions = [], []
    for step, is_bad in enumerate((False, True, False)):
        backward(engine, seed=step)
        if is_bad:
            poison(engine)
        skipped.append(engine.optim_step().skipped)
        versions.append(engine.weights_version)
    return skipped, versions


@pytest.mark.parametrize("model", [(), MOE], ids=["dense", "mixture of experts"])
def test_device_skips_the_steps_that_the_host_would_skip(tmp_path, model, caplog):
    results = {}
    for is_late in (False, True):
        with make_engine(tmp_path, *model) as engine:
            engine.update.skips_on_device = is_late
            caplog.clear()
            results[is_late] = good_bad_good(engine), states(engine)
            assert "step 2: the gradient norm is nan" in caplog.text
    assert results[True][0] == results[False][0] == ([False, True, False], [1, 1, 2])
    assert differing(results[True][1], results[False][1]) == []


def test_first_step_may_be_skipped(tmp_path):
    with late_engine(tmp_path) as engine:
        before = states(engine)
        backward(engine)
        poison(engine, math.inf)
        result = engine.optim_step()
        assert result.skipped is True
        assert dataclasses.asdict(result)["skipped"] is True
        after = states(engine)
        assert differing(before, after) == []
        steps = [value for name, value in after.items() if name.endswith(".step")]
        assert steps and not any(steps)
        assert engine.lr_schedulers.last_epoch == 1
        backward(engine)
        engine.optimizers.step()  # by a caller that does not use skipping
        assert differing(before, states(engine)) != []


def test_host_reads_a_step_when_the_next_one_updates_or_when_it_is_asked(tmp_path, monkeypatch):
    reads = []
    read_later = host_copy.read_later

    def noted(tensor):
        read = read_later(tensor)
        return lambda: (reads.append(len(reads)), read())[1]

    monkeypatch.setattr(host_copy, "read_later", noted)
    with late_engine(tmp_path) as engine:
        backward(engine)
        result = engine.optim_step()
        backward(engine)
        assert reads == []
        engine.optim_step()
        assert reads == [0]
        assert not result.skipped and reads == [0, 1]
        engine.save(str(tmp_path / "saved"))
        assert reads == [0, 1, 2]
        assert engine.weights_version == 2 and reads == [0, 1, 2]


def test_stop_is_raised_by_the_next_look_and_no_weight_has_changed(tmp_path):
    with late_engine(tmp_path, "--training.nonfinite_grad_norm=stop") as engine:
        before = states(engine)
        looks = (
            engine.optim_step,
            lambda: engine.save(str(tmp_path / "saved")),
            lambda: engine.weights_version,
        )
        for number, look in enumerate(looks, start=1):
            poison(engine)
            engine.optim_step()
            backward(engine)
            with pytest.raises(
                FloatingPointError, match=f"the gradient norm is nan, {number} time"
            ):
                look()
            assert differing(before, states(engine)) == []
        assert engine.weights_version == 0  # logged once


def test_load_forgets_the_step_before_it(tmp_path, caplog):
    with late_engine(tmp_path, "--training.nonfinite_grad_norm=stop") as engine:
        engine.save(str(tmp_path / "saved"))
        poison(engine)
        engine.optim_step()
        engine.load(str(tmp_path / "saved"))
        assert engine.weights_version == 0


def test_denominator_on_the_device_divides_and_is_refused_late(tmp_path):
    flags = "--training.nonfinite_grad_norm=ignore", "--optimizer.weight_decay=0"
    with late_engine(tmp_path, *flags) as engine:
        before = states(engine)
        for total in (-1.0, math.inf, math.nan):
            backward(engine)
            engine.optim_step(denominator=torch.tensor(total))
            backward(engine)
            with pytest.raises(ValueError, match="step 1: optim_step's denominator must add up"):
                engine.optim_step()
            engine.optimizers.zero_grad()
            assert differing(before, states(engine)) == []
            assert engine.weights_version == 0
        norms = []
        for total in (None, torch.tensor(0), torch.tensor([4.0])):
            backward(engine)
            norms.append(engine.optim_step(lr=0.0, denominator=total).grad_norm.item())
        assert norms == [norms[0], norms[0], pytest.approx(norms[0] / 4, rel=1e-6)]
        assert engine.weights_version == 3
        # A valid denominator does not make a non-finite gradient finite.
        training = engine.update.training
        engine.update.training = dataclasses.replace(training, nonfinite_grad_norm="skip")
        backward(engine)
        poison(engine)
        assert engine.optim_step(denominator=torch.tensor(4.0)).skipped


def test_other_implementations_than_fused_let_the_host_look_at_once(tmp_path):
    for implementation, can_skip in (("fused", True), ("foreach", False)):
        with make_engine(tmp_path, f"--optimizer.implementation={implementation}") as engine:
            assert skips_on_device(engine.optimizers) is can_skip
            assert not engine.update.skips_on_device  # on a CPU
