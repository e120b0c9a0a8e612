"""Rules about the files and folders that a job reads and writes."""

import glob
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

from torchtitan.config.checks.common import (
    data_sections,
    guess,
    is_file,
    is_path,
    needs,
    problem_in,
    value_of,
)
from torchtitan.config.fields import settings_of
from torchtitan.config.job_config import JobConfig
from torchtitan.tools import storage
from torchtitan.tools.files import find_shipped

# Datasets that have no default path.
_READ_A_PATH = ("local", "tokens", "chat", "preference")


# Prefixes of keys whose value may be an address (see `storage`), such as training.mixture[0].dataset_path.
_TAKE_AN_ADDRESS = (
    *("job.config_file", "checkpoint.folder", "checkpoint.initial_load_path", "lora.adapter_path"),
    *("training.dataset_path", "training.mixture", "validation.dataset_path"),
)


def addresses(job_config: JobConfig) -> Iterator[str]:
    """An address such as s3://... needs a package that opens it, and a setting that takes addresses."""
    for key, value, *_ in settings_of(job_config, in_lists=True):
        if not (is_path(key) and isinstance(value, str) and storage.is_address(value)):
            continue
        if not key.startswith(_TAKE_AN_ADDRESS):
            storage.require_disk(key, value)
        yield from (f"{key}: {problem}" for problem in problem_in(storage.resolve, value))


def checkpoint_folders(job_config: JobConfig) -> Iterator[str]:
    checkpoint, path = job_config.checkpoint, job_config.checkpoint.initial_load_path
    is_missing = path and not (os.path.isdir(path) or storage.is_address(path))
    if is_missing and not (checkpoint.enable and _own_steps(job_config)):
        yield (
            f"checkpoint.initial_load_path must be an existing checkpoint folder, got {path!r}; "
            f"give the step folder itself, such as .../checkpoint/step-1000"
        )


def checkpoint_ranks(job_config: JobConfig, world_size: int) -> Iterator[str]:
    checkpoint, mode = job_config.checkpoint, job_config.comm.mode
    if checkpoint.create_seed_checkpoint:
        yield from needs(job_config, "checkpoint.create_seed_checkpoint", "checkpoint.enable")
        if world_size != 1:
            yield (
                f"checkpoint.create_seed_checkpoint runs on 1 process, got {world_size}; start it "
                f"with --nproc-per-node 1 (NGPU=1)"
            )
    if mode == "fake_backend" and world_size > 1 and checkpoint.enable and not checkpoint.load_only:
        yield (
            f"checkpoint.enable = True with comm.mode = {mode!r} would save only one rank's part of "
            f"the model, of {world_size} ranks; set checkpoint.enable to False"
        )


def output_paths(job_config: JobConfig, builds_data: bool) -> Iterator[str]:
    """Rules for output paths. builds_data: False for an engine without a trainer; by default it writes no files."""
    # A relative path must stay in the dump folder, because other folders may hold another job's files.
    for key in (
        "checkpoint.folder",
        "job.save_config_file",
        "metrics.save_tb_folder",
        "metrics.save_jsonl_file",
        "profiling.save_traces_folder",
        "profiling.save_memory_snapshot_folder",
        "comm.save_traces_folder",
    ):
        path = value_of(job_config, key) or ""
        if ".." in path.split(os.sep):
            yield (
                f"{key} is a path inside job.dump_folder, so it must not contain '..', got {path!r}; "
                "correct it, or give an absolute path"
            )
    checkpoint, job = job_config.checkpoint, job_config.job
    files = {"job.save_config_file": job.save_config_file}
    if job_config.metrics.enable_jsonl:
        files["metrics.save_jsonl_file"] = job_config.metrics.save_jsonl_file
    for key, name in files.items():
        if name is not None and (
            not os.path.basename(name) or os.path.isdir(os.path.join(job.dump_folder, name))
        ):
            yield (
                f"{key} must name a file under job.dump_folder, got {name!r}, which is a folder; give a "
                "name"
            )
    if builds_data or checkpoint.enable or job.save_config_file is not None:
        if not job.dump_folder:
            yield "job.dump_folder must name a folder, got ''; the default is './outputs'"
        yield from _unwritable("job.dump_folder", job.dump_folder)
        if checkpoint.enable and not checkpoint.load_only:
            own, bucket = checkpoint.places()
            yield from _unwritable(
                "checkpoint.folder", bucket or os.path.join(job.dump_folder, own)
            )


def _unwritable(key: str, folder: str) -> Iterator[str]:
    if storage.is_address(folder):
        try:
            storage.check_writable(folder)
        except OSError as error:
            yield f"{key} must be an address to which this job may write, got {folder!r}: {error}"
        return
    path = existing = os.path.abspath(folder)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    try:
        # Write a file, because for root os.access reports every folder as writable.
        with tempfile.TemporaryDirectory(dir=existing, prefix=".writable-") as trial:
            os.makedirs(os.path.join(trial, os.path.relpath(path, existing)), exist_ok=True)
            with open(os.path.join(trial, "file"), "w") as file:
                file.write("Is there room?")
    except OSError as error:
        yield (
            f"{key} must be a writable folder, got {folder!r}, but it cannot be created in {existing!r} "
            f"({error.strerror}); choose another, or make room"
        )


def dataset_paths(job_config: JobConfig) -> Iterator[str]:
    parts = _datasets(job_config)
    for name, section in parts.items():
        path = section.dataset_path
        if path and _looks_local(path) and not glob.glob(path) and not _is_there(path):
            yield (
                f"{name}.dataset_path must be an existing file or folder, or the name of a dataset "
                f"on the hub, got {path!r} (looked in {os.getcwd()}); correct the path"
            )
    template = job_config.training.chat_template
    if template and any(part.dataset.lower() in ("chat", "preference") for part in parts.values()):
        remedy = "correct the path, or leave it out for the template in model.hf_assets_path"
        yield from is_file("training.chat_template", template, " with a Jinja template", remedy)


def datasets(job_config: JobConfig, known: Collection[str]) -> Iterator[str]:
    for section, data in _datasets(job_config).items():
        name, path = data.dataset, data.dataset_path
        if name not in known and name.lower() not in known:
            yield (
                f"{section}.dataset must be a registered dataset ({', '.join(known)}), got "
                f"{name!r}{guess(name, known)}; correct it, or register it in the module that "
                f"experimental.custom_import names"
            )
        if name.lower() in _READ_A_PATH and not _is_there(path):
            yield (
                f"{section}.dataset = {name.lower()!r} reads the file or folder {section}.dataset_path, "
                f"which must exist, got {path!r} (looked in {os.getcwd()}); set or correct the path"
            )


def preference_pairs(job_config: JobConfig) -> Iterator[str]:
    """Preference pairs need `loss.name = "dpo"` and vice versa; rows must not split a pair."""
    training, loss = job_config.training, job_config.loss
    for section, data in _datasets(job_config).items():
        if (data.dataset.lower() == "preference") != (loss.name == "dpo"):
            yield (
                f"{section}.dataset = {data.dataset!r} does not go with loss.name = {loss.name!r}: 'dpo' needs "
                "'preference' pairs, and other losses cannot use them; change one of the two"
            )
    if loss.name == "dpo" and training.packing == "concat":
        yield "training.packing = 'concat' splits preference pairs over rows; set it to 'fit' or 'none'"
    if loss.reference == "precomputed" and training.too_long == "cut":
        yield (
            "training.too_long = 'cut' truncates answers, but loss.reference = 'precomputed' takes log-probs of "
            "whole answers from the data; set it to 'skip' or 'error'"
        )


def hf_assets(job_config: JobConfig, needs_tokenizer: bool) -> Iterator[str]:
    """The folders with the tokenizer and with the initial weights must exist."""
    path, checkpoint = find_shipped(job_config.model.hf_assets_path), job_config.checkpoint
    loads_from_it = checkpoint.initial_load_in_hf and not checkpoint.initial_load_path
    if not os.path.isdir(path) and (
        needs_tokenizer or loads_from_it and not (checkpoint.enable and _own_steps(job_config))
    ):
        yield (
            f"model.hf_assets_path must be a folder with Hugging Face files, got {path!r} (looked in "
            f"{os.getcwd()}); correct the path, or fetch them with `hf download OWNER/NAME --local-dir FOLDER`"
        )


def _datasets(job_config: JobConfig) -> dict[str, Any]:
    """Return key -> section, or table of a mixture, for each dataset that the job reads."""
    sections, mixture = data_sections(job_config), job_config.training.mixture
    if mixture:
        del sections["training"]
    return sections | {f"training.mixture[{i}]": part for i, part in enumerate(mixture)}


def _is_there(path: str | None) -> bool:
    """True for an existing file or folder, the common stem of two token files, and any address."""
    if path is None or storage.is_address(path):
        return path is not None  # reading an address without data fails later
    return os.path.exists(path) or os.path.exists(f"{path}.idx")


def _own_steps(job_config: JobConfig) -> list[str]:
    """Return the names of this run's step folders, on disk and at the address they are uploaded to."""
    (folder, bucket), names = job_config.checkpoint.places(), []
    with suppress(OSError):  # `_unwritable` reports an address that cannot be read
        names = [name for name in storage.names_in(bucket) if name.startswith("step-")]
    return names + glob.glob("step-*", root_dir=os.path.join(job_config.job.dump_folder, folder))


def _looks_local(path: str) -> bool:
    """True if `path` is a local path rather than a hub dataset such as owner/name."""
    if "://" in path:
        return False
    if path.startswith(("/", "./", "../", "~")) or path.count("/") != 1:
        # A hub name has at most one slash. A name without slash and dot may be an old hub name.
        return "/" in path or "." in path
    endings = (".json", ".jsonl", ".txt", ".parquet")
    return os.path.isdir(path.split("/")[0]) or path.endswith(endings)
