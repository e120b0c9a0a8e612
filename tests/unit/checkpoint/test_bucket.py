"""Checkpoints at an address, a folder that fsspec opens: uploads, loads, kills at any object, retention.

tests/reliability/test_bucket.py has a real S3 server.
"""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.unit.checkpoint.runs import (
    NetAdapter,
    Run,
    assert_same,
    assert_same_weights,
    flip_bit,
    steps_in,
    truncate,
)
from torchtitan.checkpoint import folder as folders
from torchtitan.checkpoint import hf
from torchtitan.checkpoint.folder import HASHES_FILE, UNFINISHED_MARKER, HashingWriter
from torchtitan.tools import storage
from torchtitan.tools.errors import RunError


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "bucket"


def run_with(bucket: Path, disk: Path, **config) -> Run:
    return Run(disk, folder=f"file://{bucket}", **config)


def loaded(bucket: Path, disk: Path, expected: Run | int) -> Run:
    """Return a new run that has loaded the state of the run `expected`, or this step."""
    run = run_with(bucket, disk, seed=1)
    assert run.manager.load()
    if isinstance(expected, Run):
        assert_same(run.everything(), expected.everything())
    else:
        assert run.counter.step == expected
    return run


def steps_at(bucket: Path) -> list[int]:
    return sorted({int(path.parent.name.removeprefix("step-")) for path in bucket.glob("step-*/*")})


class Calls(list[tuple[str, str]]):
    """What is done to the store, in order: (function, name of the object)."""

    limit: int | None = None
    """The process is killed when it begins one more call."""


@pytest.fixture
def calls(monkeypatch):
    done = Calls()
    for name in ("write_text", "upload", "delete"):
        function = getattr(storage, name)

        def call(*arguments, function=function, name=name):
            address = arguments[1 if name == "upload" else 0]
            if storage.is_address(address):
                if len(done) == done.limit:
                    raise KeyboardInterrupt("killed")
                done.append((name, os.path.basename(address)))
            return function(*arguments)

        monkeypatch.setattr(storage, name, call)
    return done


def test_step_is_uploaded_with_its_hashes_last_and_loads_without_the_disk(bucket, tmp_path, calls):
    run = run_with(bucket, tmp_path / "a", async_mode="async")
    run.train_and_save(1)
    assert calls[0] == ("write_text", UNFINISHED_MARKER)
    assert calls[-2:] == [("upload", HASHES_FILE), ("delete", UNFINISHED_MARKER)]
    uploaded = {path.name: path.read_bytes() for path in (bucket / "step-1").iterdir()}
    local = tmp_path / "a/checkpoint/step-1"
    assert uploaded == {path.name: path.read_bytes() for path in local.iterdir()}
    other = loaded(bucket, tmp_path / "b", run)  # another machine
    assert other.manager.newest_step() == 1 and not other.manager.holds_weights_only(1)
    other.train_and_save(2)
    assert steps_at(bucket) == [1, 2] and steps_in(tmp_path / "b") == [2]


def test_upload_killed_at_any_object_never_counts_and_is_finished_later(bucket, tmp_path, calls):
    run = run_with(bucket, tmp_path / "a")
    run.train_and_save(1)
    for number in range(len(calls)):
        run.train()
        calls.clear()
        calls.limit = number
        with pytest.raises(KeyboardInterrupt):
            run.save(2)
        calls.limit = None
        loaded(bucket, tmp_path / "other", 1)  # step 1 of the bucket
        loaded(bucket, tmp_path / "a", run).manager.close()  # step 2 of the disk
        assert not (bucket / "step-2" / UNFINISHED_MARKER).exists()
        assert (bucket / "step-2" / HASHES_FILE).exists()
        shutil.rmtree(bucket / "step-2")
        shutil.rmtree(tmp_path / "a/checkpoint/step-2")


@pytest.mark.parametrize(
    "damage, name", [(truncate, "*.distcp"), (Path.unlink, "*.distcp"), (Path.unlink, HASHES_FILE)]
)
def test_damaged_copy_is_passed_over_wherever_it_is_and_not_uploaded(
    bucket, tmp_path, damage, name
):
    run = run_with(bucket, tmp_path / "a")
    run.train_and_save(1, 2)
    damage(next((tmp_path / "a/checkpoint/step-2").glob(name)))
    before = {path: path.read_bytes() for path in bucket.glob("step-2/*")}
    loaded(bucket, tmp_path / "a", run).manager.close()  # from the bucket
    assert before == {path: path.read_bytes() for path in bucket.glob("step-2/*")}
    damage(next((bucket / "step-2").glob(name)))
    other = loaded(bucket, tmp_path / "a", 1)
    with pytest.raises(ValueError, match="file://.*step-2 is (damaged|incomplete)"):
        other.manager.load(step=2)


def test_step_that_a_listing_shows_too_early_does_not_count(bucket, tmp_path, monkeypatch):
    run = run_with(bucket, tmp_path / "a")
    run.train_and_save(1, 2)
    shutil.rmtree(tmp_path / "a")
    stale = storage.find(f"file://{bucket}")
    (bucket / "step-2" / HASHES_FILE).unlink()
    monkeypatch.setattr(folders.storage, "find", lambda address: stale)
    assert run.manager.load() and run.counter.step == 1


def test_old_steps_are_removed_from_the_disk_and_from_the_bucket(bucket, tmp_path):
    (bucket / "step-0").mkdir(parents=True)
    (bucket / "step-0" / "theirs").write_text("no checkpoint of this run")
    run = run_with(bucket, tmp_path / "a", keep_latest_k=2)
    run.train_and_save(1, 2, 3)
    assert steps_at(bucket) == [0, 2, 3] and steps_in(tmp_path / "a") == [2, 3]
    other = run_with(bucket, tmp_path / "b", keep_latest_k=2)
    other.manager.load()
    other.train_and_save(4)
    assert steps_at(bucket) == [0, 3, 4]


def test_initial_checkpoint_and_a_step_by_path_may_be_at_an_address(bucket, tmp_path):
    run, address = Run(tmp_path / "a"), f"file://{bucket}/export"
    run.train(3)
    run.manager.save(3, path=address)
    run.manager.close()
    assert not os.path.exists(storage.staging_folder(address))
    other = Run(tmp_path / "b", seed=1, initial_load_path=address, initial_load_model_only=False)
    assert other.manager.load()
    assert_same(run.everything(), other.everything())
    third = Run(tmp_path / "c", seed=2)
    assert third.manager.load(path=address, model_only=True)
    assert_same_weights(run, third)
    with pytest.raises(FileNotFoundError, match="must be a folder with a checkpoint, got 'file://"):
        third.manager.load(path=f"{address}/none")


def test_hugging_face_files_are_exported_to_an_address_and_imported_from_it(bucket, tmp_path):
    run = Run(tmp_path / "a", adapter=NetAdapter(None, None))
    address = f"file://{bucket}/hf"
    for name in ("hf/old.safetensors", "hf/notes.txt", "hf/other/model.safetensors"):
        storage.write_text(f"file://{bucket}/{name}", "of an earlier export, or of the user")
    run.manager.save_hf(address)
    assert not (bucket / "hf/old.safetensors").exists()
    assert (bucket / "hf/notes.txt").exists() and (bucket / "hf/other/model.safetensors").exists()
    assert (bucket / "hf/model.safetensors.index.json").exists()
    assert not (bucket / "hf" / UNFINISHED_MARKER).exists()
    config = dict(initial_load_path=address, initial_load_in_hf=True)
    other = Run(tmp_path / "b", seed=1, adapter=NetAdapter(None, None), **config)
    assert other.manager.load()
    assert_same_weights(run, other)
    flip_bit(next((bucket / "hf").glob("*.safetensors")))
    with pytest.raises(ValueError, match="damaged.*its hash differs"):
        other.manager.load()


def test_base_of_untrained_parts_that_is_gone_is_told_at_the_start_and_fails_no_export(
    bucket, tmp_path, caplog
):
    config = dict(untrained_weights="copy", initial_load_path=f"file://{bucket}/base")
    Run(tmp_path).train_and_save(1)
    run = Run(tmp_path, adapter=NetAdapter(None, None), initial_load_in_hf=True, **config)
    message = "untrained_weights.*no files of a Hugging Face.*bucket/base"
    with pytest.raises(RunError, match=message):
        run.manager.load()
    run.manager.save_hf(str(tmp_path / "out"))
    assert (tmp_path / "out/model.safetensors.index.json").exists()
    assert "lacks the parts that are not trained" in caplog.text


@pytest.mark.parametrize("damage", [flip_bit, Path.unlink])
def test_uploaded_copy_that_is_not_whole_is_replaced_by_the_one_on_the_disk(
    bucket, tmp_path, damage
):
    run = run_with(bucket, tmp_path / "a")
    run.train_and_save(1)
    name = HASHES_FILE if damage is flip_bit else "__0_0.distcp"
    whole = (bucket / "step-1" / name).read_bytes()
    damage(bucket / "step-1" / name)
    loaded(bucket, tmp_path / "a", run).manager.close()
    assert (bucket / "step-1" / name).read_bytes() == whole


def test_step_is_removed_whole_although_a_listing_shows_nothing(bucket, tmp_path, monkeypatch):
    run_with(bucket, tmp_path / "a").train_and_save(1)
    monkeypatch.setattr(folders.storage, "find", lambda address: {})
    folders.remove_folder(f"file://{bucket}/step-1")
    assert not (bucket / "step-1" / HASHES_FILE).exists()


def test_rank_whose_folder_rank_zero_removes_after_an_upload_removes_nothing(
    bucket, tmp_path, monkeypatch
):
    run = Run(tmp_path / "a")
    run.train_and_save(1)
    folder = tmp_path / "a/checkpoint/step-1"
    names = {path.name for path in folder.iterdir()} | {"__1_0.distcp"}
    (folder / "__1_0.distcp").write_text("of rank 1")
    calls = []

    def on_all_ranks(work, group):
        calls.append(work())
        if len(calls) == 3:  # rank 0 may go on from here
            shutil.rmtree(folder)
        return [names]

    monkeypatch.setattr(folders, "on_all_ranks", on_all_ranks)
    monkeypatch.setattr(folders.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(folders.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(folders.dist, "get_world_size", lambda group: 2)
    folders.upload_folder(str(folder), f"file://{bucket}/step-1")
    assert [path.name for path in (bucket / "step-1").iterdir()] == ["__1_0.distcp"]
    assert len(calls) == 3


def test_failed_upload_is_one_error_and_leaves_the_step_on_the_disk(bucket, tmp_path, monkeypatch):
    run = run_with(bucket, tmp_path / "a")
    run.train_and_save(1)

    def refuses(path: str, address: str) -> None:
        raise storage.StorageError(13, "the store refuses (Forbidden)", address)

    with monkeypatch.context() as patch:
        patch.setattr(folders.storage, "upload", refuses)
        run.train()
        message = "refuses.*last whole checkpoint in .* is that of step 2"
        with pytest.raises(RunError, match=message):
            run.save(2)
    loaded(bucket, tmp_path / "a", 2).manager.close()
    assert steps_at(bucket) == [1, 2] and (bucket / "step-2" / HASHES_FILE).exists()


@pytest.mark.parametrize(
    "broken", [[(storage, "upload")], [(HashingWriter, "finish"), (hf, "finish_writing")]]
)
def test_failed_save_to_an_address_leaves_no_copy_in_the_cache(
    bucket, tmp_path, broken, monkeypatch
):
    def fails(*args, **options):
        raise OSError("it broke")

    for module, name in broken:
        monkeypatch.setattr(module, name, fails)
    run = Run(tmp_path / "a", adapter=NetAdapter(None, None))
    address = f"file://{bucket}/x"
    for save in (partial(run.manager.save, 1, path=address), partial(run.manager.save_hf, address)):
        with pytest.raises(RunError, match=f"{address}.* it broke") as error:
            save()
        assert "staged_" not in str(error.value)
        assert not os.path.exists(storage.staging_folder(address))
