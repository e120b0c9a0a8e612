"""Faults of saving and resuming: no step is lost without a word, and none that is whole."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tests.reliability.faults import SAVING, Fault
from tests.reliability.jobs import TOKENIZER
from torchtitan.tools.folder_lock import FolderLock

# With the limit of tests/reliability/file_size_limit.py on some ranks.
LIMITED = "--experimental.custom_import=tests.reliability.file_size_limit"
FULL_DISK = "--experimental.custom_import=tests.reliability.full_disk"
HF_EXPORT = ("--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf")


def step(folder: Path, number: int) -> Path:
    return folder / "outputs/checkpoint" / f"step-{number}"


def resume(*arguments: str, change: Callable[[Path], object] | None = None):
    """Goes on with a finished run, 4 steps long, after a change to its files."""

    def arrange(folder: Path) -> list[str]:
        if change is not None:
            change(folder)
        return [*SAVING, *arguments]

    return arrange


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
    """One that has two tokens in each other's place."""
    shutil.copytree(TOKENIZER, folder / "tokenizer")
    path = folder / "tokenizer/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["od"], vocab["st"] = vocab["st"], vocab["od"]
    path.write_text(json.dumps(tokenizer))
    return [*SAVING, "--training.steps=5", f"--model.hf_assets_path={folder}/tokenizer"]


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


def start_in_folder_of_other_job(name: str):
    def arrange(folder: Path) -> list[str]:
        _locks[folder] = FolderLock(str(folder / name))
        return SAVING

    return arrange


def release(folder: Path) -> None:
    _locks.pop(folder).release()


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


after_run = functools.partial(Fault, after_run=True)


def flags(*arguments: str):
    return lambda folder: [*SAVING, *arguments]


FAULTS = {
    # Damaged steps
    "newest checkpoint cut short": after_run(resume(change=truncate), check=whole_steps(2, 4)),
    "checkpoint without .metadata": after_run(
        resume(change=remove_metadata_of(4)), check=whole_steps(2, 4)
    ),
    "list of hashes emptied": after_run(
        resume(change=lambda f: (step(f, 4) / ".xxh128sums").write_text(""))
    ),
    "every checkpoint damaged": after_run(resume(change=remove_metadata_of(2, 4))),
    "save that was interrupted": after_run(resume(change=interrupt), check=whole_steps(2, 4)),
    "damaged step asked for by number": after_run(
        resume("--checkpoint.load_step=4", change=truncate)
    ),
    "interrupted step asked for by number": after_run(
        resume("--checkpoint.load_step=4", change=interrupt)
    ),
    "older step asked for by number": after_run(resume("--checkpoint.load_step=2")),
    # What a run starts from
    "foreign folder among the checkpoints": after_run(start_from_elsewhere),
    "initial_load_path that is the folder of all steps": after_run(start_from_folder_of_steps),
    "initial_load_path with Hugging Face files": start_from_hf_files,
    "checkpoint of another model": after_run(resume("--model.name=qwen3", "--training.steps=5")),
    "newest checkpoint with weights only": after_run(
        resume("--training.steps=6", change=keep_weights_only),
        absent=("start from zero", "Loading the checkpoint"),
    ),
    "run that is complete": after_run(resume(), absent=("Loading the checkpoint",)),
    # What a resume has otherwise
    "resume with another optimizer": after_run(
        resume("--optimizer.name=Adam", "--training.steps=5")
    ),
    "resume with another tokenizer": after_run(take_other_tokenizer),
    "resume with another sequence length and batch": after_run(
        resume("--training.seq_len=64", "--training.local_batch_size=2", "--training.steps=5")
    ),
    "resume of another function": after_run(
        resume("--model.args", "norm_eps=1e-3", "--training.steps=5")
    ),
    "resume with other data": after_run(
        resume(
            "--training.dataset=python_docs", "--training.dataset_path=None", "--training.steps=5"
        )
    ),
    # Settings
    "unknown name in exclude_from_loading": flags("--checkpoint.exclude_from_loading=foo"),
    # Failed saves
    "two jobs in one checkpoint folder": Fault(
        start_in_folder_of_other_job("outputs/checkpoint"), check=release
    ),
    "two jobs in one dump folder": Fault(start_in_folder_of_other_job("outputs"), check=release),
    "file where the checkpoint folder should be": put_file_in_place_of_checkpoints,
    "disk that gets full": after_run(
        resume("--training.steps=6", FULL_DISK), check=older_steps_are_whole
    ),
    "disk that gets full while a save is written beside training": after_run(
        resume("--training.steps=7", "--checkpoint.async_mode=async", FULL_DISK),
        check=older_steps_are_whole,
    ),
    "limit on the size of files": Fault(
        flags(LIMITED), ranks=2, environment={"LIMITED_RANKS": "1"}, check=removed_step(2)
    ),
    "file where a step's folder should be": after_run(
        resume("--training.steps=6", change=lambda f: step(f, 6).write_text("a file"))
    ),
    "export to Hugging Face files that fails": Fault(
        flags(LIMITED, *HF_EXPORT, "--checkpoint.interval=9"),
        environment={"LIMITED_RANKS": "0"},
        check=removed_step(4),
    ),
    "export to Hugging Face files that fails on one rank": Fault(
        flags(LIMITED, *HF_EXPORT, "--checkpoint.interval=9"),
        ranks=2,
        environment={"LIMITED_RANKS": "0"},  # which writes the only file
        check=removed_step(4),
    ),
}
