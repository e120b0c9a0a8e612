"""Checkpoints of a small model in one process."""

import gc
import itertools
import json
import os
import shutil
import subprocess
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful
from torch.torch_version import TorchVersion

from tests import hostile
from torchtitan.checkpoint import dcp, folder, selection
from torchtitan.checkpoint.folder import (
    HASHES_FILE,
    UNFINISHED_MARKER,
    Contents,
    HashingWriter,
    find_damage,
    list_steps,
    mark_unfinished,
    remove_folder,
)
from torchtitan.checkpoint.retention import Retention
from torchtitan.checkpoint.saver import AsyncMode, HostCopies, Saver
from torchtitan.components import checkpoint as reference
from torchtitan.components.checkpoint import CheckpointManager, ModelWrapper
from torchtitan.config.job_config import Checkpoint
from torchtitan.optim.lr_scheduler import LRSchedulersContainer
from torchtitan.optim.optimizer import OptimizersContainer
from torchtitan.protocols.state_dict_adapter import StateDictAdapter


class Counter(Stateful):
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


class Positions(Stateful):
    """Stands in for the dataloader."""

    def state_dict(self) -> dict[str, Any]:
        return {"dp_rank_0": b"", "world_size": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == self.state_dict()


class Net(nn.Module):
    def __init__(self, width: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(width, width) for i in range(layers)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


class NetAdapter(StateDictAdapter):
    """HF calls the layers `model.<i>`; `model.<i>.inv_freq` is dropped."""

    from_hf_map = {
        "model.{}.weight": "layers.{}.weight",
        "model.{}.bias": "layers.{}.bias",
        "model.{}.inv_freq": None,
    }

    def to_hf(self, state_dict):
        return {name.replace("layers.", "model."): t for name, t in state_dict.items()}

    def from_hf(self, hf_state_dict):
        return {name.replace("model.", "layers."): t for name, t in hf_state_dict.items()}


class Run:
    """One training run: a small model, its optimizer and its checkpoint manager.

    Without a dataloader every save is due.
    """

    def __init__(self, dump_folder, model=None, dataloader=None, adapter=None, seed=0, **config):
        torch.manual_seed(seed)
        self.model = Net() if model is None else model
        self.optimizers = OptimizersContainer([self.model], torch.optim.AdamW, {"lr": 0.1})
        self.schedulers = LRSchedulersContainer(self.optimizers, lambda step: 1 / (step + 1))
        self.counter = Counter()
        self.dataloader = dataloader
        settings = dict(enable=True, interval=1, keep_latest_k=2)
        self.manager = CheckpointManager(
            dataloader=dataloader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.counter},
            checkpoint_config=Checkpoint(**(settings | config)),
            sd_adapter=adapter,
            base_folder=str(dump_folder),
        )

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.model(torch.full((1, 4), 0.5)).sum().backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedulers.step()
            self.counter.step += 1

    def save(self, *steps: int, trains: bool = False) -> None:
        """Save these steps, and wait until old ones are removed."""
        for step in steps:
            if trains:
                self.train()
            self.manager.save(step)
        self.manager.close()

    def train_and_save(self, *steps: int) -> None:
        self.save(*steps, trains=True)

    def everything(self) -> dict[str, Any]:
        state = dict(self.model.state_dict()) | self.optimizers.state_dict()
        state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        return state | {"schedule": self.schedulers.state_dict(), "step": self.counter.step}


def resumed(*args, **config) -> Run:
    """Return a new run that has loaded a checkpoint."""
    run = Run(*args, **config)
    assert run.manager.load()
    return run


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        same = torch.equal(value, second[name]) if torch.is_tensor(value) else value == second[name]
        assert same, name


def assert_same_weights(first: Run, second: Run) -> None:
    assert_same(dict(first.model.state_dict()), dict(second.model.state_dict()))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-80])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def steps_in(folder: Path) -> list[int]:
    """The steps in the checkpoint folder of the run in `folder`."""
    return sorted(int(p.name.removeprefix("step-")) for p in folder.glob("checkpoint/step-*"))


def saved_names(folder: Path, step: int) -> set[str]:
    path = folder / "checkpoint" / f"step-{step}"
    return set(FileSystemReader(path).read_metadata().state_dict_metadata)


# Which steps are saved


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


# What is in a checkpoint


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


# Which steps are kept


def test_only_the_newest_k_are_kept_as_set_at_run_time_and_after_a_last_save(tmp_path):
    run = Run(tmp_path, keep_latest_k=0)
    assert run.manager.purge_thread is None
    run.save(1, 2, 3)
    run.manager.keep_latest_k = 2
    run.manager.save(4, last_step=True)
    run.manager.close()
    assert steps_in(tmp_path) == [3, 4]


def test_save_that_was_due_since_the_last_call_is_made_now(tmp_path):
    run = Run(tmp_path, interval=3, keep_latest_k=0, enable_first_step_checkpoint=True)
    for since, step in ((0, 2), (2, 4), (4, 5), (5, 9), (9, 11)):
        run.manager.save(step, since=since)
    assert steps_in(tmp_path) == [2, 4, 9]
    run.manager.save(12, last_step=True, since=11)
    assert steps_in(tmp_path) == [2, 4, 9, 12]


def test_only_rank_zero_purges_but_every_rank_saves(tmp_path):
    with mock.patch.object(torch.distributed, "get_rank", return_value=1):
        Run(tmp_path, keep_latest_k=2).save(1, 2, 3)
    assert steps_in(tmp_path) == [1, 2, 3]


def test_what_this_process_saved_outlives_higher_steps_of_an_older_timeline(tmp_path):
    Run(tmp_path, keep_latest_k=0).save(2, 4, 6, 8)
    run = Run(tmp_path, keep_latest_k=2)
    for step, kept in ((3, [3, 8]), (4, [3, 4]), (5, [4, 5])):
        run.save(step)
        assert steps_in(tmp_path) == kept


class Folder:
    """A checkpoint folder with finished steps, which are empty, and its retention."""

    def __init__(self, dump_folder: Path, *steps: int) -> None:
        self.path = dump_folder / "checkpoint"
        self.retention = Retention(str(self.path))
        self.finish(*steps)

    def finish(self, *steps: int) -> None:
        for step in steps:
            (self.path / f"step-{step}").mkdir(parents=True)
            for name in (".metadata", HASHES_FILE):
                (self.path / f"step-{step}" / name).touch()

    def purge(self, n_kept: int, saving_to: Path | None = None) -> list[int]:
        """Return the steps that are left."""
        self.retention.purge(str(self.path), n_kept, saving_to and str(saving_to))
        self.retention.close()
        return steps_in(self.path.parent)


def test_step_that_is_being_written_neither_counts_nor_goes(tmp_path):
    folder = Folder(tmp_path, 1, 2, 9)
    writing = folder.path / "step-3"
    for is_written in (False, True):
        mark_unfinished(str(writing))
        if is_written:  # but the manager has not waited for it
            (writing / ".metadata").touch()
            (writing / UNFINISHED_MARKER).unlink()
        folder.retention.will_write(str(writing), warns=False)
        assert folder.purge(3, saving_to=writing) == [1, 2, 3, 9]


def test_interrupted_step_is_kept_until_a_newer_one_is_finished(tmp_path):
    folder = Folder(tmp_path, 1, 2)
    mark_unfinished(str(folder.path / "step-3"))
    assert folder.purge(3) == [1, 2, 3]
    folder.finish(4)
    assert folder.purge(3) == [1, 2, 4]


def test_damaged_step_that_is_written_again_counts_among_those_to_keep(tmp_path):
    folder = Folder(tmp_path, 1, 2, 3)
    folder.retention.damaged.add(str(folder.path.resolve() / "step-3"))
    folder.retention.will_write(str(folder.path / "step-3"), warns=False)
    assert folder.purge(1) == [3]


def test_step_that_waits_to_be_removed_is_unfinished_at_once(tmp_path):
    folder = Folder(tmp_path, 1, 2)
    folder.retention.start = lambda: None  # the thread is slow
    folder.purge(1)
    contents = [step.contents for step in list_steps(str(folder.path))]
    assert contents == [Contents.UNFINISHED, Contents.DCP]


def test_steps_are_listed_by_their_numbers_without_one_that_another_rank_removes(tmp_path):
    for step in (100, 9, 10):
        mark_unfinished(str(tmp_path / f"step-{step}"))
    (tmp_path / "step-5").mkdir()
    scandir = os.scandir

    def then_removed(folder):
        entries = list(scandir(folder))
        (tmp_path / "step-5").rmdir()
        return entries

    with mock.patch("os.scandir", then_removed):
        assert [folder.step for folder in list_steps(str(tmp_path))] == [9, 10, 100]


@pytest.mark.parametrize("target", ["elsewhere", "checkpoint/best"])
def test_linked_step_is_not_purged(tmp_path, target):
    for name in (target, "checkpoint"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    (tmp_path / target / HASHES_FILE).touch()
    (tmp_path / "checkpoint" / "step-1").symlink_to(tmp_path / target)
    Run(tmp_path, keep_latest_k=2).save(2, 3, 4)
    assert os.listdir(tmp_path / target) == [HASHES_FILE]


def test_folder_set_at_run_time_loses_only_what_this_manager_wrote(tmp_path, caplog):
    source = Run(tmp_path / "source", keep_latest_k=0)
    for step in (1, 2):
        source.save(step)
        source.manager.save(step, path=tmp_path / f"source/checkpoint/global_step_{step}")
    run = Run(tmp_path / "own")
    run.manager.keep_latest_k = 1
    run.manager.folder = str(tmp_path / "source" / "checkpoint")
    assert run.manager.load(step=2)
    assert "holds steps after 2" not in caplog.text  # of later steps the fault book has a row
    run.save(3, 4)
    kept = {"global_step_1", "global_step_2", "step-1", "step-2", "step-4"}
    assert set(os.listdir(tmp_path / "source" / "checkpoint")) == kept


def test_folders_of_other_tools_and_loaded_ones_are_never_purged(tmp_path):
    run = Run(tmp_path, keep_latest_k=0)
    run.save(1, 2)
    (tmp_path / "checkpoint" / "step-1" / HASHES_FILE).unlink()  # so another tool wrote it
    run = Run(tmp_path, keep_latest_k=0)
    run.manager.keep_latest_k = 1
    run.manager.load(path=tmp_path / "checkpoint" / "step-2")
    run.save(3, 4)
    assert steps_in(tmp_path) == [1, 2, 4]


def test_retention_leaves_folders_given_by_path_alone_in_later_processes_too(tmp_path):
    run = Run(tmp_path, keep_latest_k=0)
    run.manager.keep_latest_k = 1
    run.manager.save(1)
    run.manager.save(2, path=str(tmp_path / "checkpoint" / "step-2"))
    run.save(3)
    assert steps_in(tmp_path) == [2, 3]
    later = Run(tmp_path, keep_latest_k=0)
    later.manager.keep_latest_k = 1
    later.save(4)
    assert steps_in(tmp_path) == [2, 4]


def test_manager_that_is_dropped_is_closed_without_a_garbage_collection(tmp_path):
    gc.disable()
    try:
        run = Run(tmp_path)
        thread = run.manager.purge_thread
        assert thread.is_alive()
        del run
        assert not thread.is_alive()
    finally:
        gc.enable()


# Saves in the background


def test_copies_on_the_host_use_the_memory_of_earlier_copies_of_their_layout():
    def state(value, size=3, dtype=torch.float32):
        return {"weight": torch.full((size,), value, dtype=dtype), "inner": [torch.tensor(1), "x"]}

    copies, places = HostCopies(), []
    for live in (state(1.0), state(2.0), state(3.0, 1), state(4.0, 1, torch.bfloat16)):
        copied = copies.stage(live)
        expected = live["weight"].clone()
        places.append(copied["weight"].data_ptr())
        live["weight"].fill_(9)
        assert torch.equal(copied["weight"], expected) and copied["inner"] == [1, "x"]
    assert places[0] == places[1]


def test_next_async_save_waits_for_the_one_before_which_is_whole_once_written(tmp_path):
    run = Run(tmp_path, async_mode="async")
    assert run.manager.save_future is None
    run.manager.save(5)
    first = run.manager.save_future
    run.manager.save(6)
    second = run.manager.save_future
    assert first.done() and second is not first
    wait([second], timeout=60)
    assert run.manager.save_future is second  # the run has not waited for it
    assert Run(tmp_path, seed=1).manager.newest_step() == 6


@pytest.mark.parametrize("where", ["_staging_stream", "_stream_of_another_torch"])
def test_pinned_copies_come_after_what_makes_the_states_and_are_waited_for(
    tmp_path, monkeypatch, where
):
    events = []
    staging = SimpleNamespace(wait_stream=lambda other: events.append("staging waits"))
    compute = SimpleNamespace(
        synchronize=lambda: events.append("host waits"), is_capturing=lambda: False
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: compute)
    stager = SimpleNamespace(close=lambda: None, **{where: staging})
    monkeypatch.setattr(reference, "DefaultStager", lambda options: stager)
    answer = AsyncSaveResponse(Future(), Future())
    answer.staging_completion.set_exception(OSError("not staged"))
    answer.upload_completion.set_result(None)
    copies = mock.Mock(side_effect=lambda *_, **__: events.append("copies") or answer)
    monkeypatch.setattr(dcp, "async_save", copies)
    run = Run(tmp_path, async_mode="async_with_pinned_mem")
    run.counter.state_dict = lambda: events.append("state made") or {"step": 1}
    run.manager.save(1)
    waits = "staging waits" if where == "_staging_stream" else "host waits"
    assert events == ["state made", waits, "copies"]
    assert copies.call_args.kwargs["async_stager"] is stager
    assert run.manager.staging and run.manager.save_future is answer.upload_completion
    with pytest.raises(OSError, match="not staged"):
        run.manager.maybe_wait_for_staging()


@pytest.mark.parametrize("version, num_stagers", [("2.11.0", 2), ("2.13.0", 1)])
def test_stager_is_made_again_where_torch_closes_it_after_its_first_use(
    version, num_stagers, monkeypatch
):
    make_stager = mock.Mock(side_effect=lambda options: mock.Mock())
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(reference, "DefaultStager", make_stager)
    saver, stagers = Saver(), []
    for _ in range(2):
        saver.prepare(AsyncMode.ASYNC_WITH_PINNED_MEM)
        stagers.append(saver.stager)
    assert make_stager.call_count == num_stagers
    assert stagers[0].close.called is (num_stagers == 2) and not stagers[1].close.called


def test_pinned_mode_without_accelerator_saves_as_async(tmp_path, caplog):
    if torch.accelerator.is_available():
        pytest.skip("needs a machine without accelerator")
    run = Run(tmp_path, async_mode="async_with_pinned_mem")
    run.manager.save(1)
    run.manager.maybe_wait_for_staging()
    run.manager.close()
    assert 'using "async" instead' in caplog.text and steps_in(tmp_path) == [1]


def test_calls_of_dcp_are_those_that_the_reference_tests_replace(tmp_path, monkeypatch):
    calls = {name: mock.Mock() for name in ("save", "load", "async_save")}
    for name, fake in calls.items():
        monkeypatch.setattr(reference.dcp, name, fake)
    step = tmp_path / "checkpoint" / "step-5"
    step.mkdir(parents=True)
    (step / ".metadata").touch()
    run = resumed(tmp_path, keep_latest_k=0)
    calls["load"].assert_called_once_with(mock.ANY, checkpoint_id=str(step))
    run.manager.save(6)
    keys = {"checkpoint_id", "storage_writer"}
    assert calls["save"].call_args.kwargs.keys() == keys
    run = Run(tmp_path, keep_latest_k=0, async_mode="async")
    run.manager.save(7)
    assert calls["async_save"].call_args.kwargs.keys() == keys | {"process_group"}


# Restoring


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


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_files_are_hashed_as_they_are_written_as_xxh128sum_does(tmp_path, mode):
    with mock.patch.object(folder, "hash_file", side_effect=AssertionError("read again")):
        Run(tmp_path, async_mode=mode).train_and_save(1)
    step = tmp_path / "checkpoint" / "step-1"
    assert {p.name for p in step.iterdir()} == {".metadata", HASHES_FILE, "__0_0.distcp"}
    assert find_damage(str(step)) is None
    if shutil.which("xxh128sum"):
        subprocess.run(["xxh128sum", "-c", HASHES_FILE], cwd=step, check=True)


def test_hashes_of_earlier_releases_are_verified(tmp_path):
    Run(tmp_path).train_and_save(1)
    step = tmp_path / "checkpoint" / "step-1"
    hostile.remake_hashes(step)
    assert not (step / HASHES_FILE).exists() and find_damage(str(step)) is None
    subprocess.run(["sha256sum", "-c", ".sha256sums"], cwd=step, check=True)
    flip_bit(step / "__0_0.distcp")
    assert find_damage(str(step)) == (
        "__0_0.distcp does not have the content that was written (its hash differs)"
    )


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_large_shards_are_two_files_of_which_torch_reads_both(tmp_path, mode):
    run = Run(tmp_path, async_mode=mode)
    with (
        mock.patch.object(folder, "_BYTES_FOR_TWO_FILES", 1),
        mock.patch("torch.save", wraps=torch.save) as saved,
    ):
        run.train_and_save(1)
    pickled = [call.args[0] for call in saved.call_args_list]
    settings = [repr(value) for value in pickled if folder.is_plain(value)]
    assert settings and len(settings) == len(set(settings))  # equal ones are pickled once
    step = tmp_path / "checkpoint" / "step-1"
    names = {"__0_0.distcp", "__0_1.distcp"}
    assert {p.name for p in step.iterdir()} == {".metadata", HASHES_FILE, *names}
    weights = {name: torch.zeros_like(x) for name, x in run.model.state_dict().items()}
    torch.distributed.checkpoint.load(weights, checkpoint_id=step)
    assert_same(weights, dict(run.model.state_dict()))
    assert_same(resumed(tmp_path, seed=1).everything(), run.everything())
    for name in names:
        content = (step / name).read_bytes()
        (step / name).write_bytes(content[:-1])
        assert find_damage(str(step)).startswith(f"{name} does not have the content")
        (step / name).write_bytes(content)


def test_tensors_of_every_kind_are_read_and_written_as_torch_does(tmp_path):
    numbers = torch.randn(6, 4)
    tensors = {
        **{str(d): numbers.to(d) for d in (torch.bfloat16, torch.float64, torch.float8_e4m3fn)},
        **{str(d): numbers.mul(50).to(d) for d in (torch.int64, torch.int8, torch.uint16)},
        "bool": numbers > 0,
        "complex": torch.complex(numbers, -numbers).conj(),
        "transposed": numbers.t(),
        "transposed, into rows": numbers.t(),
        "view": torch.zeros(2**18)[2:4],
        "every other": numbers[::2, 1::2],
        "number": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }
    has_crc32 = torch.serialization.get_crc32_options()
    dcp.save(tensors, storage_writer=HashingWriter(str(tmp_path / "ours")))
    assert torch.serialization.get_crc32_options() is has_crc32
    assert (tmp_path / "ours" / "__0_0.distcp").stat().st_size < 2**18
    torch.distributed.checkpoint.save(tensors, checkpoint_id=tmp_path / "torch's")
    loads = [dcp.load, torch.distributed.checkpoint.load]
    for name, load in itertools.product(("ours", "torch's"), loads):
        loaded = {key: torch.empty_like(x).fill_(1) for key, x in tensors.items()}
        loaded["transposed, into rows"] = torch.empty(4, 6)
        load(loaded, checkpoint_id=str(tmp_path / name))
        assert_same(loaded, tensors)


def test_a_failure_in_the_second_file_fails_the_save(tmp_path):
    run, real_open = Run(tmp_path), folder.open_descriptor

    def full_disk(path, flags):
        if str(path).endswith("_1.distcp"):
            raise OSError(28, "disk full")
        return real_open(path, flags)

    with (
        mock.patch.object(folder, "_BYTES_FOR_TWO_FILES", 1),
        mock.patch.object(folder, "open_descriptor", full_disk),
        pytest.raises(RuntimeError, match="disk full.*holds no whole checkpoint yet"),
    ):
        run.manager.save(1)


def test_marker_goes_once_the_hashes_are_on_disk(tmp_path):
    real_unlink, real_fsync, events = os.unlink, os.fsync, []

    def fsync(file):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        real_fsync(file)

    def unlink(path, **kwargs):
        events.append(f"no more {os.path.basename(path)}")
        real_unlink(path, **kwargs)

    with mock.patch("os.fsync", fsync), mock.patch("os.unlink", unlink):
        Run(tmp_path).train_and_save(1)
    assert events[0] == UNFINISHED_MARKER
    assert events[-2:] == [HASHES_FILE, f"no more {UNFINISHED_MARKER}"]


def test_writer_can_be_sent_to_another_process(tmp_path):
    import pickle

    assert pickle.loads(pickle.dumps(HashingWriter(str(tmp_path)))).path == tmp_path


def test_files_without_metadata_and_hashes_are_no_checkpoint(tmp_path, caplog):
    Run(tmp_path).train_and_save(1, 2)
    for name in (".metadata", HASHES_FILE):
        (tmp_path / "checkpoint" / "step-2" / name).unlink()
    assert Run(tmp_path, verify_on_load=False).manager.load()
    assert "step-2: it is damaged, .metadata is missing" in caplog.text


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", HASHES_FILE])
@pytest.mark.parametrize("damage", [truncate, lambda path: path.write_bytes(b""), Path.unlink])
def test_damaged_newest_step_falls_back_to_the_one_before(tmp_path, name, damage, caplog):
    if (name, damage) == (HASHES_FILE, Path.unlink):
        pytest.skip("the folder is then as other tools write it, and whole")
    Run(tmp_path).train_and_save(1, 2)
    damage(tmp_path / "checkpoint" / "step-2" / name)
    assert resumed(tmp_path).counter.step == 1
    assert "step-2: it is damaged" in caplog.text and name in caplog.text


@pytest.mark.parametrize("half", [[], [([0, 0], [2, 4])]])
@pytest.mark.parametrize("name", ["layers.0.weight", "optimizer.state.layers.0.weight.exp_avg"])
def test_checkpoint_with_holes_is_not_loaded_whatever_its_hashes_say(tmp_path, name, half, caplog):
    Run(tmp_path).train_and_save(1, 2)
    step = tmp_path / "checkpoint" / "step-2"
    hostile.change_chunks(step, name, *half)
    hostile.remake_hashes(step)
    run = resumed(tmp_path)
    assert run.counter.step == 1 and "step-2: it is damaged" in caplog.text
    before = run.everything()
    for named in ({"step": 2}, {"path": str(step), "model_only": True}):
        with pytest.raises(ValueError, match=f"{len(half)} chunks of {name} do not cover every"):
            run.manager.load(**named)
    assert_same(before, run.everything())


@pytest.mark.parametrize("name", [".metadata", "model.safetensors"])
def test_junk_in_the_place_of_a_newer_step_is_passed_over(tmp_path, name, caplog):
    Run(tmp_path, keep_latest_k=2).train_and_save(1, 2)
    junk = tmp_path / "checkpoint" / "step-999999"
    junk.mkdir()
    (junk / name).write_bytes(b"junk")
    run = Run(tmp_path, keep_latest_k=2)
    assert run.manager.newest_step() == 2
    assert f"Passing over {junk}: it is damaged" in caplog.text
    run.manager.load()
    run.train_and_save(3)  # the junk is not counted among the steps to keep
    assert {step.step for step in list_steps(tmp_path / "checkpoint")} == {2, 3, 999999}


def test_files_are_hashed_once_to_find_and_load_the_newest_step(tmp_path):
    Run(tmp_path).train_and_save(1, 2)
    truncate(tmp_path / "checkpoint" / "step-2" / "__0_0.distcp")
    run = Run(tmp_path)
    with mock.patch.object(selection, "find_damage", side_effect=find_damage) as find:
        assert run.manager.newest_step() == 1
        assert run.manager.load()
    assert [Path(call.args[0]).name for call in find.call_args_list] == ["step-2", "step-1"]


def test_damaged_steps_do_not_count_among_those_to_keep(tmp_path):
    Run(tmp_path, keep_latest_k=0).train_and_save(1, 2, 3)
    for step, damage in ((2, truncate), (3, flip_bit)):
        damage(tmp_path / "checkpoint" / f"step-{step}" / "__0_0.distcp")
    run = resumed(tmp_path, keep_latest_k=2)
    assert run.counter.step == 1
    for step, kept in ((4, [1, 4]), (5, [4, 5])):
        run.save(step)
        assert steps_in(tmp_path) == kept


@pytest.mark.parametrize("n_removed", range(4))
def test_removal_killed_at_any_file_leaves_an_unfinished_step_that_goes_later(tmp_path, n_removed):
    """Files of a step: data, metadata, hashes; then the marker."""

    class Killed(BaseException): ...

    real_unlink, removed = os.unlink, []

    def unlink(path, **kwargs):
        if len(removed) == n_removed:
            raise Killed
        removed.append(path)
        real_unlink(path, **kwargs)

    Run(tmp_path).train_and_save(1, 2)
    folder = tmp_path / "checkpoint"
    with mock.patch("os.unlink", unlink), pytest.raises(Killed):
        remove_folder(str(folder / "step-1"))
    assert [f.contents for f in list_steps(str(folder))] == [Contents.UNFINISHED, Contents.DCP]
    Run(tmp_path).train_and_save(3)
    assert steps_in(tmp_path) == [2, 3]


def test_step_folder_made_and_not_yet_marked_is_unfinished(tmp_path, caplog):
    Run(tmp_path).train_and_save(1)
    (tmp_path / "checkpoint" / "step-2").mkdir()
    run = resumed(tmp_path)
    assert run.counter.step == 1
    assert "step-2: its save was interrupted" in caplog.text
    run.train_and_save(3)
    assert steps_in(tmp_path) == [1, 3]


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_failed_write_leaves_no_folder_and_no_byte_that_fills_the_disk(tmp_path, async_mode):
    run = Run(tmp_path, async_mode=async_mode)
    run.train_and_save(1)
    given, foreign = tmp_path / "given", tmp_path / "checkpoint/step-3"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("of somebody else")
    for number, path in ((2, None), (3, None), (4, str(given))):
        full = mock.patch.object(HashingWriter, "finish", side_effect=OSError("disk full"))
        with full, pytest.raises(RuntimeError, match="disk full"):
            run.manager.save(number, path=path)
            run.manager.close()
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["step-1", "step-3"]
    # The marker makes a resume pass over the folder.
    assert sorted(os.listdir(foreign)) == [UNFINISHED_MARKER, "notes.txt"]
    assert not given.exists()
    run.counter.step = 7
    assert run.manager.load() and run.counter.step == 1


def test_save_that_cannot_begin_leaves_the_whole_checkpoint_that_it_would_replace(tmp_path):
    run = Run(tmp_path)
    run.train_and_save(1)
    no_room = mock.patch.object(folder.storage, "write_text", side_effect=OSError("disk full"))
    with no_room, pytest.raises(RuntimeError, match="step-1 could not be written.*disk full"):
        run.manager.save(1)
    run.counter.step = 7
    assert run.manager.load() and run.counter.step == 1


def test_step_saved_again_replaces_what_was_there_and_is_read_again(tmp_path):
    run = Run(tmp_path)
    run.train_and_save(1)
    folder = tmp_path / "checkpoint" / "step-1"
    (folder / "__7_0.distcp").write_text("of another rank, once")
    (folder / "notes.txt").write_text("the user's own")
    run.train_and_save(1)
    assert not (folder / "__7_0.distcp").exists() and (folder / "notes.txt").exists()
    assert run.manager.load() and run.counter.step == 2
    run.manager.save(1, last_step=True)  # weights only
    run.counter.step = 7
    assert run.manager.load() and run.counter.step == 7


def test_damage_in_a_named_step_or_path_and_a_missing_step_are_errors(tmp_path):
    """Other folders without a checkpoint are in tests/reliability/faults/checkpoints.py."""
    run, folder = Run(tmp_path), tmp_path / "checkpoint"
    run.train_and_save(1, 2)
    truncate(folder / "step-2" / "__0_0.distcp")
    for named, error, message in (
        ({"path": folder / "step-2"}, ValueError, "step-2 is damaged"),
        ({"path": folder}, ValueError, r"load\(path=...\) must be.*checkpoints in it: step-1"),
        ({"path": tmp_path / "step-1"}, FileNotFoundError, "must be a folder with a checkpoint"),
        ({"step": 3}, FileNotFoundError, "step 3 in .*checkpoint .steps there: 1, 2"),
    ):
        with pytest.raises(error, match=message):
            run.manager.load(**named)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="initial_load_path .*: none$"):
        Run(tmp_path / "new", initial_load_path=str(tmp_path / "empty")).manager.load()


def test_verification_can_be_turned_off(tmp_path):
    Run(tmp_path).train_and_save(1)
    hashes = tmp_path / "checkpoint" / "step-1" / HASHES_FILE
    hashes.write_text(hashes.read_text().replace("a", "b"))
    with pytest.raises(ValueError, match="Every checkpoint in .* is damaged"):
        Run(tmp_path).manager.load()
    assert Run(tmp_path, verify_on_load=False).manager.load()


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


def test_initial_path_is_used_when_own_folder_holds_nothing_whole(tmp_path):
    source, own = Run(tmp_path / "source"), tmp_path / "own"
    source.train_and_save(1)
    config = dict(seed=1, initial_load_path=str(tmp_path / "source" / "checkpoint" / "step-1"))
    mark_unfinished(str(own / "checkpoint" / "step-5"))

    weights = resumed(own, **config)
    assert weights.counter.step == 0
    assert_same_weights(weights, source)
    # Also if the run does not save, whatever lies in its folder.
    source.manager.save(2)
    unsaving = resumed(tmp_path / "source", enable=False, **config)
    assert_same(unsaving.everything(), weights.everything())
    all_of_it = resumed(own, initial_load_model_only=False, **config)
    assert_same(all_of_it.everything(), source.everything())
    all_of_it.train_and_save(6)  # goes before the initial checkpoint from now on
    assert_same(resumed(own, **config).everything(), all_of_it.everything())


def test_step_zero_is_a_seed_of_weights(tmp_path):
    run = Run(tmp_path, last_save_model_only=False)
    run.manager.save(0, last_step=True)
    other = Run(tmp_path, seed=1)
    other.train(2)
    assert other.manager.load(step=0)
    assert other.counter.step == 2
    assert_same_weights(run, other)


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


# Hugging Face format


def write_index(folder: Path, **shards: str) -> str:
    for i in range(2):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        shards |= {f"model.{i}.weight": file, f"model.{i}.bias": file}
    folder.mkdir(parents=True)
    index = json.dumps({"weight_map": shards})
    (folder / "model.safetensors.index.json").write_text(index)
    return str(folder)


def test_hf_files_that_others_wrote_load_from_the_assets_folder(tmp_path):
    source, assets = Run(tmp_path), write_index(tmp_path / "assets")
    tensors = NetAdapter(None, None).to_hf(source.model.state_dict())
    tensors["model.0.inv_freq"] = torch.ones(2)
    save_file(tensors, f"{assets}/model-00001-of-00002.safetensors")
    run = resumed(tmp_path, adapter=NetAdapter(None, assets), initial_load_in_hf=True, seed=1)
    assert_same_weights(run, source)


def test_hf_tensor_in_two_files_or_with_a_part_missing_is_named(tmp_path):
    tensors, name = NetAdapter(None, None).to_hf(Net().state_dict()), "model.0.weight"
    half = {name: tensors.pop(name)[2:]}
    save_file(tensors, tmp_path / "model-00001-of-00002.safetensors")
    config = dict(initial_load_in_hf=True, initial_load_path=str(tmp_path))
    run = Run(tmp_path, adapter=NetAdapter(None, None), **config)
    before = run.everything()
    # The metadata of torch's distributed writer: this part is rows 2 and 3 of 4.
    where = json.dumps({name: {"saved_offsets": [2, 0]}})
    second = tmp_path / "model-00002-of-00002.safetensors"
    save_file(half, second, {"DCP_SHARDING_INFO": where})
    with pytest.raises(ValueError, match="its 1 chunks of model.0.weight do not cover"):
        run.manager.load()
    save_file(half | {"model.1.bias": torch.ones(4)}, second)
    with pytest.raises(ValueError, match="has model.1.bias twice, in .*00001-of.* and in .*00002-"):
        run.manager.load()
    assert_same(before, run.everything())


@pytest.mark.parametrize("in_bucket", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_hf_export_in_own_folder_continues_with_its_weights(
    tmp_path, caplog, monkeypatch, in_bucket
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = {"folder": f"file://{tmp_path}/bucket"} if in_bucket else {}
    run = Run(tmp_path / "a", adapter=NetAdapter(None, None), last_save_in_hf=True, **config)
    run.train_and_save(1)
    run.train()
    run.manager.save(2, last_step=True)
    run.manager.close()
    if in_bucket:
        shutil.rmtree(tmp_path / "a")
    other = Run(tmp_path / "a", adapter=NetAdapter(None, None), seed=1, **config)
    assert other.manager.newest_step() == 2
    assert other.manager.holds_weights_only(2) and not other.manager.holds_weights_only(1)
    assert other.manager.load()
    assert other.counter.step == 0 and "Hugging Face format" in caplog.text
    assert_same_weights(run, other)


@pytest.mark.filterwarnings("ignore")
def test_tensor_that_the_index_does_not_list_is_exported_all_the_same(tmp_path):
    adapter = NetAdapter(None, write_index(tmp_path / "assets"))
    run = Run(tmp_path, model=Net(layers=3), adapter=adapter, last_save_in_hf=True)
    run.manager.save(1, last_step=True)
    index = tmp_path / "checkpoint" / "step-1" / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    assert weight_map["model.2.weight"] == weight_map["model.1.bias"] != weight_map["model.0.bias"]
    assert Run(tmp_path, model=Net(layers=3), adapter=adapter, seed=1).manager.load()


def test_index_with_a_file_whose_name_has_no_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match="number in the shard's name, got 'last.safetensors'"):
        NetAdapter(None, write_index(tmp_path / "odd", other="last.safetensors"))
