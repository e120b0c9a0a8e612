"""Saves in the background, and saves that fail."""

import os
from concurrent.futures import Future, wait
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.torch_version import TorchVersion

from tests.unit.checkpoint.runs import (
    Run,
    resumed,
    steps_in,
)
from torchtitan.checkpoint import dcp, folder
from torchtitan.checkpoint.folder import (
    UNFINISHED_MARKER,
    HashingWriter,
)
from torchtitan.checkpoint.saver import AsyncMode, HostCopies, Saver
from torchtitan.components import checkpoint as reference


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
