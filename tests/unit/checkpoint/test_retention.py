"""Which steps are kept and which are removed."""

import gc
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.unit.checkpoint.runs import (
    Run,
    flip_bit,
    resumed,
    steps_in,
    truncate,
)
from torchtitan.checkpoint.folder import (
    HASHES_FILE,
    UNFINISHED_MARKER,
    Contents,
    list_steps,
    mark_unfinished,
    remove_folder,
)
from torchtitan.checkpoint.retention import Retention


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
