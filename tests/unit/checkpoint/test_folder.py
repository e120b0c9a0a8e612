"""The files of a step: data, metadata, hashes and the marker of an unfinished save."""

import itertools
import os
import shutil
import subprocess
from unittest import mock

import pytest
import torch

from tests import hostile
from tests.unit.checkpoint.runs import (
    Run,
    assert_same,
    flip_bit,
    resumed,
)
from torchtitan.checkpoint import dcp, folder
from torchtitan.checkpoint.folder import (
    HASHES_FILE,
    UNFINISHED_MARKER,
    HashingWriter,
    find_damage,
    list_steps,
    mark_unfinished,
)


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
