"""Saving and loading a run: when, what, and exactly."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorProperties

from tests.unit.checkpoint.runs import (
    Counter,
    Net,
    Positions,
    Run,
    assert_same,
    assert_same_weights,
    resumed,
    saved_names,
    steps_in,
)
from torchtitan.components.checkpoint import ModelWrapper


@pytest.mark.parametrize(
    ("config", "calls", "saved"),
    [
        pytest.param(dict(interval=3), "1 2 2! 3 4 4!", [2, 3, 4], id="interval, and a last step"),
        pytest.param(dict(interval=10), "1 2 10", [10], id="first step not asked for"),
        pytest.param(
            dict(interval=10, enable_first_step_checkpoint=True), "1 2 10", [1, 10], id="first step"
        ),
        pytest.param(dict(interval=500), "3 4+", [4], id="force"),
        pytest.param(dict(load_only=True), "1!", [], id="load only"),
        pytest.param(dict(enable=False), "1!", [], id="disabled"),
        pytest.param(dict(interval=500, dataloader=None), "1 7", [1, 7], id="no dataloader"),
    ],
)
def test_interval_first_step_and_last_step_decide_what_is_saved(tmp_path, config, calls, saved):
    """calls: steps, with ! for the last one and + for one that is forced."""
    run = Run(tmp_path, **({"dataloader": Positions(), "keep_latest_k": 0} | config))
    for call in calls.split():
        run.manager.save(int(call.strip("!+")), last_step="!" in call, force="+" in call)
    run.manager.maybe_wait_for_staging()
    run.manager.close()
    assert steps_in(tmp_path) == saved
    assert config.get("enable", True) or not run.manager.load()


@pytest.mark.parametrize(
    ("config", "path", "message"),
    [
        (dict(enable=False), None, "enable = false leaves no folder.*give the step folder as path"),
        (dict(load_only=True), "somewhere", "load_only = true forbids saving"),
        (dict(keep_latest_k=1), None, "at least 2, .* got 1"),
        (dict(last_save_in_hf=True), None, "state_dict_adapter"),
    ],
)
def test_settings_that_contradict_each_other_or_a_save_are_refused(tmp_path, config, path, message):
    with pytest.raises(ValueError, match=message):
        Run(tmp_path, **config).manager.save(1, path=path and str(tmp_path / path), force=True)


def test_model_stands_at_the_top_and_the_last_save_has_nothing_else(tmp_path):
    run = Run(tmp_path, model=Net(layers=1))
    run.model.register_buffer("cache", torch.ones(3), persistent=False)
    run.model.register_buffer("kept", torch.ones(3))
    run.manager.save(1)
    run.manager.save(2, last_step=True)
    weights = {"layers.0.weight", "layers.0.bias", "kept"}
    assert saved_names(tmp_path, 2) == weights < saved_names(tmp_path, 1)
    others = {name.split(".")[0] for name in saved_names(tmp_path, 1) - weights}
    assert others == {"optimizer", "lr_scheduler", "train_state", "dataloader"}


def test_checkpoint_of_a_torch_that_describes_tensors_by_more_is_read(tmp_path, monkeypatch):
    described = TensorProperties.__getstate__
    with monkeypatch.context() as newer:  # torch 2.15 appended an entry in this way
        newer.setattr(TensorProperties, "__getstate__", lambda self: (*described(self), (4, 1)))
        saved = Run(tmp_path)
        saved.train_and_save(1)
    loaded = resumed(tmp_path, seed=1)
    assert_same(loaded.everything(), saved.everything())


@pytest.mark.parametrize("async_mode", ["disabled", "ASYNC"])  # in any case, as 0.2.x takes it
@pytest.mark.parametrize("path", [None, "elsewhere/global_step_2"])
def test_everything_is_restored_exactly_from_its_own_folder_and_any_other(
    tmp_path, async_mode, path
):
    """If a path is given, the run's own folder, which holds other weights, is ignored."""
    if path is not None:
        Run(tmp_path, seed=5).train_and_save(9)
        path = str(tmp_path / path)
    options = dict(enable=path is None or async_mode == "ASYNC", keep_latest_k=0)
    run = Run(tmp_path, async_mode=async_mode, **options)
    run.train(2)
    run.manager.save(2, path=path)
    saved = run.everything()
    run.train(3)  # must not change what an asynchronous save is writing
    run.manager.close()
    other = Run(tmp_path, seed=1, **options)
    assert other.manager.load(path=path)
    assert_same(saved, other.everything())
    other.train(3)
    assert_same(run.everything(), other.everything())
    assert steps_in(tmp_path) == ([2] if path is None else [9])


def test_load_by_path_can_leave_all_but_the_weights_alone(tmp_path):
    run = Run(tmp_path)
    run.train_and_save(1)
    other = Run(tmp_path, seed=1)
    other.train(2)
    expected = other.everything() | dict(run.model.state_dict())
    assert other.manager.load(path=str(tmp_path / "checkpoint" / "step-1"), model_only=True)
    assert_same(other.everything(), expected)


def test_checkpoint_from_before_weights_had_a_version_loads(tmp_path):
    class Versioned(Counter):
        def state_dict(self):
            return super().state_dict() | {"weights_version": 7}

        def load_state_dict(self, state_dict):
            self.loaded = state_dict

    Run(tmp_path).train_and_save(1)
    other = Run(tmp_path, seed=1)
    versioned = other.manager.states["train_state"] = Versioned()
    assert other.manager.load()
    assert versioned.loaded == {"step": 1}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Net(layers=3), "not in the checkpoint: layers.2.bias, layers.2.weight"),
        (Net(layers=1), "not in the model: layers.1.bias, layers.1.weight"),
        (Net(width=3), r"of another shape: layers.0.bias: saved \[4\], model \[3\]"),
    ],
)
def test_checkpoint_of_another_model_is_one_clear_error(tmp_path, other, message):
    Run(tmp_path).train_and_save(1)
    run = Run(tmp_path, model=other)
    run.manager.model_description = "llama3 8B"
    with pytest.raises(ValueError, match=message) as caught:
        run.manager.load()
    assert "does not fit llama3 8B" in str(caught.value)


def test_missing_component_names_the_way_to_load_without_it(tmp_path):
    Run(tmp_path).train_and_save(1)
    with pytest.raises(ValueError, match="lacks entries of dataloader.*exclude_from_loading"):
        Run(tmp_path, dataloader=Positions()).manager.load()
    run = resumed(tmp_path, dataloader=Positions(), exclude_from_loading=["dataloader"])
    assert run.counter.step == 1


def test_model_only_checkpoint_loads_with_a_warning(tmp_path, caplog):
    run = Run(tmp_path)
    run.train()
    with caplog.at_level("INFO"):
        run.manager.save(1)
        assert "last_save_model_only" not in caplog.text and not run.manager.holds_weights_only(1)
        run.manager.save(1, last_step=True)
    (told,) = [line for line in caplog.messages if "last_save_model_only" in line]
    assert told.endswith(
        "step 1's save, weights only: training cannot continue from it; "
        "checkpoint.last_save_model_only = false saves everything"
    )
    other = Run(tmp_path, seed=1)
    assert other.manager.holds_weights_only(1)
    assert other.manager.load()
    assert "holds weights only" in caplog.text
    assert other.counter.step == 0
    assert_same_weights(run, other)


def test_export_dtype_casts_weights_of_the_last_save_only(tmp_path):
    model = Net()
    model.register_buffer("counts", torch.tensor([1000001]))
    run = Run(tmp_path, model=model, export_dtype="bfloat16")
    for step, dtype in ((1, torch.float32), (2, torch.bfloat16)):
        run.manager.save(step, last_step=step == 2)
        saved = FileSystemReader(tmp_path / f"checkpoint/step-{step}").read_metadata()
        entries = saved.state_dict_metadata
        assert entries["layers.0.weight"].properties.dtype == dtype
        assert entries["counts"].properties.dtype == torch.int64


def test_parameters_moved_by_a_client_are_still_the_ones_saved(tmp_path):
    run = Run(tmp_path)
    for parameter in run.model.parameters():
        parameter.data = torch.full_like(parameter, 3.0)
    run.manager.save(1)
    other = Run(tmp_path)
    other.manager.load()
    assert all((p == 3).all() for p in other.model.parameters())


def test_model_parts_share_one_state_dict():
    wrapper = ModelWrapper([nn.ModuleDict({"a": nn.Linear(1, 1)}), nn.ModuleDict({"b": Net()})])
    assert wrapper.state_dict().keys() == wrapper.cache_state_dict.keys()
    wrapper.load_state_dict({k: torch.ones_like(v) for k, v in wrapper.whole().items()})
    assert all((t == 1).all() for t in wrapper.state_dict().values())
    assert {"a.weight", "b.layers.1.bias"} <= wrapper.state_dict().keys()
