"""Only regular files are opened, and files are not written through links."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.unit.checkpoint.test_checkpoint import NetAdapter, Run
from torchtitan.checkpoint.folder import HF_INDEX
from torchtitan.config import JobConfig
from torchtitan.listeners.metrics import JsonlLogger
from torchtitan.listeners.profiling import MemorySnapshot
from torchtitan.rl.metrics import append_episodes
from torchtitan.tools import events
from torchtitan.tools.errors import RunError
from torchtitan.tools.files import open_file, read_json_object

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def a_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def a_socket(folder: Path) -> Path:
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))  # a socket's path has at most 107 characters
    return path


@pytest.mark.parametrize("mode", ["r", "rb", "w", "a", "rb+", "x"])
@pytest.mark.parametrize("make", [a_pipe, a_socket, lambda _: Path("/dev/zero"), lambda f: f])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, monkeypatch, mode, make):
    monkeypatch.chdir(tmp_path)
    path = make(tmp_path)
    with pytest.raises(OSError, match=r"not a regular file|Is a directory|File exists"):
        open_file(path, mode)


def test_links_are_read_through_and_not_written_through(tmp_path):
    (tmp_path / "there").write_text("mine")
    (tmp_path / "link").symlink_to("there")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "folder").symlink_to(tmp_path)  # a link of the folder itself, as to a larger disk
    with open_file(tmp_path / "link") as file:
        assert file.read() == "mine"
    for mode in ("w", "a", "r+"):
        for name in ("link", "dangling", "folder/link"):
            with pytest.raises(
                OSError, match="it is a link, and files are not written through links; remove"
            ):
                open_file(tmp_path / name, mode)
    with open_file(tmp_path / "folder" / "new", "w") as file:
        file.write("text")
    assert (tmp_path / "new").read_text() == "text"
    assert (tmp_path / "there").read_text() == "mine" and not (tmp_path / "nowhere").exists()


def save(folder: Path) -> None:
    run = Run(folder)
    run.manager.claim_folder()
    run.manager.run_record = {"optimizer.name": "AdamW"}
    try:
        run.train_and_save(1)
    finally:
        run.manager.close()


def save_by_path(folder: Path) -> None:
    Run(folder).manager.save(1, path=str(folder / "checkpoint/step-1"))


def save_hf(folder: Path) -> None:
    run = Run(folder, adapter=NetAdapter(None, None))
    run.manager.save_hf(str(folder / "checkpoint/step-1"))


def save_config(folder: Path) -> None:
    config = JobConfig()
    config.job.dump_folder, config.job.save_config_file = str(folder), "config.json"
    config.maybe_log()


def record(folder: Path) -> None:
    config = JobConfig()
    config.job.dump_folder = str(folder)
    with events.recording(config):
        pass


def append_sample(folder: Path) -> None:
    append_episodes(str(folder / "episodes.jsonl"), 1, [SimpleNamespace(to_dict=dict)])


def snapshot(folder: Path) -> None:
    MemorySnapshot(SimpleNamespace(_snapshot=list), str(folder), "", 1, 0).step()


WRITERS = {
    "checkpoint/.lock": save,
    "checkpoint/step-1/.incomplete": save,
    "checkpoint/step-1/.metadata.tmp": save,
    "checkpoint/step-1/.metadata": save,
    "checkpoint/step-1/.sha256sums": save,
    "checkpoint/step-1/run.json": save,
    "checkpoint/step-1/__0_0.distcp": save,
    "checkpoint/step-1/.keep": save_by_path,
    f"checkpoint/step-1/{HF_INDEX}": save_hf,
    "checkpoint/step-1/model-00001-of-00001.safetensors": save_hf,
    "config.json": save_config,
    events.FILE_NAME: record,
    "metrics.jsonl": lambda folder: JsonlLogger(str(folder / "metrics.jsonl")).close(),
    "episodes.jsonl": append_sample,
    "iteration_1/rank0_memory_snapshot.pickle": snapshot,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("exists", [True, False])
def test_no_link_in_a_run_folder_is_written_through(tmp_path, monkeypatch, name, exists):
    monkeypatch.setattr(dist, "is_initialized", lambda: WRITERS[name] is save_config)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    mine, folder = tmp_path / "mine", tmp_path / "run"
    if exists:
        mine.write_text("without a line end")
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(mine)
    error = None
    try:
        WRITERS[name](folder)
    except (OSError, RunError) as refusal:
        error = str(refusal)
    assert mine.exists() == exists and (not exists or mine.read_text() == "without a line end")
    # The link is refused, or was replaced by a file.
    assert (
        "it is a link" in (error or "")
        or name == events.FILE_NAME
        or not os.path.islink(folder / name)
    )


def test_shards_go_to_no_linked_folder(tmp_path, monkeypatch):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "checkpoint/step-1"
    for place in (elsewhere, folder):
        place.mkdir(parents=True)
    (elsewhere / "mine").touch()
    (folder / "sharded").symlink_to(elsewhere)
    save_hf(tmp_path)
    assert [entry.name for entry in elsewhere.iterdir()] == ["mine"]
    assert not (folder / "sharded").exists()


@pytest.mark.parametrize("make", [a_pipe, lambda _: Path("/dev/zero"), lambda _: Path("/dev/full")])
def test_run_goes_on_without_its_history_where_that_is_no_file(tmp_path, caplog, make):
    (tmp_path / events.FILE_NAME).symlink_to(make(tmp_path))
    record(tmp_path)
    assert "The run goes on, but without a record of its events" in caplog.text


def test_pipe_in_the_place_of_a_file_ends_no_reading_in_waiting(tmp_path):
    from torchtitan.checkpoint.hf import check_files

    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors is not a regular file"):
        check_files(str(tmp_path))
    os.mkfifo(tmp_path / "index")
    for path in (tmp_path / "index", "/dev/zero"):
        with pytest.raises(OSError, match="not a regular file"):
            read_json_object(path)
