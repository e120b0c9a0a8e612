"""Faults of saving and resuming: no step is lost without a word, and none that is whole."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.reliability.faults import SAVING, Fault
from tests.reliability.faults.config import flags
from tests.reliability.faults.data import other_tokenizer
from tests.reliability.faults.processes import broken
from torchtitan.tools.folder_lock import FolderLock

HF_EXPORT = ("--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf")


def step(folder: Path, number: int) -> Path:
    return folder / "outputs/checkpoint" / f"step-{number}"


def resumed(
    *arguments: str, change: Callable[[Path], object] = lambda folder: None, **more: Any
) -> Fault:
    """A finished run, 4 steps long, goes on after a change to its files."""

    def arrange(folder: Path) -> list[str]:
        change(folder)
        return [*SAVING, *arguments]

    return Fault(arrange, after_run=True, **more)


def truncate(folder: Path) -> None:
    path = step(folder, 4) / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])


def remove_metadata_of(*steps: int):
    def remove(folder: Path) -> None:
        for number in steps:
            (step(folder, number) / ".metadata").unlink()

    return remove


def interrupt(folder: Path) -> None:
    (step(folder, 4) / ".incomplete").touch()


def put_file_in_place_of_checkpoints(folder: Path) -> list[str]:
    (folder / "outputs").mkdir()
    (folder / "outputs/checkpoint").write_text("a file")
    return SAVING


def start_from_elsewhere(folder: Path) -> list[str]:
    """The own folder holds only what isn't a checkpoint; the initial one is whole."""
    (folder / "outputs/checkpoint").rename(folder / "source")
    step(folder, 9).mkdir(parents=True)
    (step(folder, 9) / "notes.txt").write_text("of somebody else")
    return [*SAVING, f"--checkpoint.initial_load_path={folder}/source/step-4"]


def start_from_folder_of_steps(folder: Path) -> list[str]:
    (folder / "outputs/checkpoint").rename(folder / "source")
    return [*SAVING, f"--checkpoint.initial_load_path={folder}/source"]


def start_from_hf_files(folder: Path) -> list[str]:
    (folder / "weights").mkdir()
    (folder / "weights/model.safetensors").touch()
    return [*SAVING, f"--checkpoint.initial_load_path={folder}/weights"]


def take_other_tokenizer(folder: Path) -> list[str]:
    return [*SAVING, "--training.steps=5", f"--model.hf_assets_path={other_tokenizer(folder)}"]


def keep_weights_only(folder: Path) -> None:
    path = step(folder, 4)
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(entry.size)
        for name, entry in entries.items()
        if hasattr(entry, "size") and not name.startswith("optimizer.")
    }
    dcp.load(weights, checkpoint_id=path, no_dist=True)
    shutil.rmtree(path)
    dcp.save(weights, checkpoint_id=path, no_dist=True)


_locks: dict[Path, FolderLock] = {}


def in_folder_of_other_job(name: str) -> Fault:
    def arrange(folder: Path) -> list[str]:
        _locks[folder] = FolderLock(str(folder / name))
        return SAVING

    return Fault(arrange, check=lambda folder: _locks.pop(folder).release())


def whole_steps(*numbers: int):
    def check(folder: Path) -> None:
        for number in numbers:
            names = {path.name for path in step(folder, number).iterdir()}
            assert {".metadata", ".xxh128sums"} <= names and ".incomplete" not in names

    return check


def removed_step(number: int):
    def check(folder: Path) -> None:
        assert not step(folder, number).exists()

    return check


def older_steps_are_whole(folder: Path) -> None:
    whole_steps(2, 4)(folder)
    removed_step(6)(folder)


def full_disk(*arguments: str) -> Fault:
    more = dict(step=None, after_run=True, check=older_steps_are_whole)
    return broken("fill the disk", *SAVING, *arguments, **more)


def failed_export(ranks: int) -> Fault:
    """Rank 0, which writes the only file, fails."""
    arguments = [*SAVING, *HF_EXPORT, "--checkpoint.interval=9"]
    return broken("limit files", *arguments, step=None, ranks=ranks, check=removed_step(4))


FAULTS = {
    # Damaged steps
    "newest checkpoint cut short": resumed(change=truncate, check=whole_steps(2, 4)),
    "checkpoint without .metadata": resumed(change=remove_metadata_of(4), check=whole_steps(2, 4)),
    "list of hashes emptied": resumed(change=lambda f: (step(f, 4) / ".xxh128sums").write_text("")),
    "every checkpoint damaged": resumed(change=remove_metadata_of(2, 4)),
    "save that was interrupted": resumed(change=interrupt, check=whole_steps(2, 4)),
    "damaged step asked for by number": resumed("--checkpoint.load_step=4", change=truncate),
    "interrupted step asked for by number": resumed("--checkpoint.load_step=4", change=interrupt),
    "older step asked for by number": resumed("--checkpoint.load_step=2"),
    # What a run starts from
    "foreign folder among the checkpoints": Fault(start_from_elsewhere, after_run=True),
    "initial_load_path that is the folder of all steps": Fault(
        start_from_folder_of_steps, after_run=True
    ),
    "initial_load_path with Hugging Face files": start_from_hf_files,
    "checkpoint of another model": resumed("--model.name=qwen3", "--training.steps=5"),
    "newest checkpoint with weights only": resumed(
        "--training.steps=6",
        change=keep_weights_only,
        absent=("start from zero", "Loading the checkpoint"),
    ),
    "run that is complete": resumed(absent=("Loading the checkpoint",)),
    # What a resume has otherwise
    "resume with another optimizer": resumed("--optimizer.name=Adam", "--training.steps=5"),
    "resume with another tokenizer": Fault(take_other_tokenizer, after_run=True),
    "resume with another sequence length and batch": resumed(
        "--training.seq_len=64", "--training.local_batch_size=2", "--training.steps=5"
    ),
    "resume of another function": resumed("--model.args", "norm_eps=1e-3", "--training.steps=5"),
    "resume with other data": resumed(
        "--training.dataset=python_docs", "--training.dataset_path=None", "--training.steps=5"
    ),
    # Settings
    "unknown name in exclude_from_loading": flags(*SAVING, "--checkpoint.exclude_from_loading=foo"),
    # Failed saves
    "two jobs in one checkpoint folder": in_folder_of_other_job("outputs/checkpoint"),
    "two jobs in one dump folder": in_folder_of_other_job("outputs"),
    "file where the checkpoint folder should be": put_file_in_place_of_checkpoints,
    "disk that gets full": full_disk("--training.steps=6"),
    "disk that gets full while a save is written beside training": full_disk(
        "--training.steps=7", "--checkpoint.async_mode=async"
    ),
    "limit on the size of files": broken(
        "limit files", *SAVING, rank=1, step=None, ranks=2, check=removed_step(2)
    ),
    "file where a step's folder should be": resumed(
        "--training.steps=6", change=lambda f: step(f, 6).write_text("a file")
    ),
    "export to Hugging Face files that fails": failed_export(ranks=1),
    "export to Hugging Face files that fails on one rank": failed_export(ranks=2),
}
