"""Only regular files are opened, and files are not written through links."""

import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.unit.checkpoint.runs import NetAdapter, Run
from torchtitan.adapters import peft_files
from torchtitan.callbacks.metrics import JsonlLogger
from torchtitan.callbacks.profiling import MemorySnapshot
from torchtitan.checkpoint.folder import HF_INDEX
from torchtitan.config import JobConfig
from torchtitan.rl.metrics import append_episodes
from torchtitan.tools import events
from torchtitan.tools.errors import RunError
from torchtitan.tools.files import open_file

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


WRITERS = {
    "checkpoint/.lock": save,
    "checkpoint/step-1/.incomplete": save,
    "checkpoint/step-1/.metadata.tmp": save,
    "checkpoint/step-1/.metadata": save,
    "checkpoint/step-1/.xxh128sums": save,
    "checkpoint/step-1/run.json": save,
    "checkpoint/step-1/__0_0.distcp": save,
    "checkpoint/step-1/.keep": lambda folder: Run(folder).manager.save(
        1, path=str(folder / "checkpoint/step-1")
    ),
    f"checkpoint/step-1/{HF_INDEX}": save_hf,
    "checkpoint/step-1/model-00001-of-00001.safetensors": save_hf,
    "config.json": save_config,
    events.FILE_NAME: record,
    "metrics.jsonl": lambda folder: JsonlLogger(str(folder / "metrics.jsonl")).close(),
    "episodes.jsonl": lambda folder: append_episodes(
        str(folder / "episodes.jsonl"), 1, [SimpleNamespace(to_dict=dict)]
    ),
    "iteration_1/rank0_memory_snapshot.pickle": lambda folder: MemorySnapshot(
        SimpleNamespace(_snapshot=list), str(folder), "", 1, 0
    ).step(),
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
    refusal = ""
    try:
        WRITERS[name](folder)
    except (OSError, RunError) as error:
        refusal = str(error)
    assert mine.exists() == exists and (not exists or mine.read_text() == "without a line end")
    was_replaced = not os.path.islink(folder / name)
    assert was_replaced or "it is a link" in refusal or name == events.FILE_NAME


def test_shards_go_to_no_linked_folder(tmp_path, monkeypatch):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "checkpoint/step-1"
    for place in (elsewhere, folder):
        place.mkdir(parents=True)
    (elsewhere / "mine").touch()
    (folder / "sharded").symlink_to(elsewhere)
    save_hf(tmp_path)
    assert [entry.name for entry in elsewhere.iterdir()] == ["mine"]
    assert not (folder / "sharded").exists()


# Files of the system and of this program itself, which nobody else prepares.
OPENED_OTHERWISE = {
    "cluster/engines.py": 'files("torchtitan.cluster")',
    "config/checks/files.py": "with open(os.path.join(trial",
    "data/local_files.py": "with open(self.content",
    "data/python_docs.py": "text.read_bytes()",
    "numerics/products.py": 'open("/proc/cpuinfo")',
    "tools/logging.py": "os.devnull",
    "testing/gloo.py": "",
    "tools/files.py": "",
    "tools/host.py": 'open("/proc/self/',
    "tools/torch_parts.py": "path.read_text()",
    "tools/utils.py": 'Path("/proc/meminfo")',
    "train.py": 'with open(path, "w")',  # torchrun's file for errors
    "report/page.py": 'f"page.{name}"',
    "rl/weight_sync.py": "os.scandir(folder)",  # a folder of the process's own
}
OPENS = re.compile(r"(?<![\w.])open\(|\.(read_text|read_bytes|from_file)\(|safe_open\(|load_file\(|ParquetFile\(")  # fmt: skip


def test_every_file_is_opened_by_the_module_that_refuses_pipes():
    package = Path(peft_files.__file__).parents[1]
    others = [
        f"{name}: {line.strip()}"
        for file in package.rglob("*.py")
        for line in file.read_text().splitlines()
        if OPENS.search(line) and not re.search(r"regular_file\(|def open\(", line)
        for name in [str(file.relative_to(package))]
        if OPENED_OTHERWISE.get(name, "\0") not in line
    ]
    assert others == []
