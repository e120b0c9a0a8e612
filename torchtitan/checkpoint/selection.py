"""Which checkpoint is loaded. Each choice is a collective: rank 0 looks, all ranks hash."""

import os
from collections.abc import Callable
from typing import NamedTuple

from torchtitan.checkpoint.folder import (
    Contents,
    StepFolder,
    contents_of,
    find_damage,
    list_steps,
)
from torchtitan.checkpoint.hf import check_files
from torchtitan.checkpoint.states import WEIGHTS_ONLY, saved_shapes_in
from torchtitan.config.job_config import Checkpoint
from torchtitan.distributed.processes.ranks import from_rank_zero
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.logging import logger


class Source(NamedTuple):
    """The checkpoint to load, and what of it."""

    path: str
    model_only: bool
    from_hf: bool = False
    from_quantized: bool = False


class Selection:
    """Chooses among the steps of a run, the initial checkpoint, and folders given by path.

    damaged: gets the resolved paths of the steps that were found to be so.
    """

    def __init__(self, config: Checkpoint, damaged: set[str]) -> None:
        self._config = config
        self._damaged = damaged
        self._newest: tuple[list[StepFolder], StepFolder | None] | None = None

    def own(self, folder: str, step: int) -> Source | None:
        """The step to load of the run in `folder`; None if -1, the newest whole one, is none."""
        folders = from_rank_zero(lambda: list_steps(folder))
        if step == -1:
            chosen = self.newest_whole_step(folder, folders)
            if chosen is None:
                return None
        else:
            chosen = next((f for f in folders if f.step == step), None)
            if chosen is None:
                there = ", ".join(str(f.step) for f in folders) or "none"
                raise FileNotFoundError(
                    f"There is no checkpoint of step {step} in {folder} (steps there: {there}). "
                    "Set checkpoint.load_step to one of them, or to -1 for the newest"
                )
            self._check_whole(chosen.path, chosen.contents)
        if newer := [str(f.step) for f in folders if f.step > chosen.step]:
            logger.warning(
                f"{folder} holds steps after {chosen.step} ({', '.join(newer)}), which this "
                "run replaces as it comes to them"
            )
        if self._config.initial_load_path or self._config.initial_load_in_hf:
            logger.warning(
                f"{chosen.path} continues this run; checkpoint.initial_load_path and "
                "initial_load_in_hf are ignored. Use another checkpoint.folder to start anew"
            )
        from_hf = _warns_of_hf(chosen.path, chosen.contents)
        return Source(chosen.path, model_only=from_hf or chosen.step == 0, from_hf=from_hf)

    def newest_whole_step(self, folder: str, folders: list[StepFolder]) -> StepFolder | None:
        """The answer is kept while the folders are the same: hashing takes long.

        Raises ValueError if there are steps and all of them are damaged.
        """
        if self._newest is not None and self._newest[0] == folders:
            return self._newest[1]
        chosen: StepFolder | None = None
        damaged: dict[str, str] = {}
        for step in reversed(folders):
            if step.contents == Contents.UNFINISHED:
                reason = "its save was interrupted"
            elif step.contents == Contents.UNKNOWN:
                reason = "it holds no checkpoint, which has a file .metadata"
            elif damage := self._damage_of(step.path, step.contents) or _unreadable(step):
                reason = f"it is damaged, {damage}"
                damaged[step.path] = damage
            else:
                chosen = step
                break
            logger.warning(f"Passing over {step.path}: {reason}")
        if damaged and chosen is None:
            raise ValueError(
                f"Every checkpoint in {folder} is damaged ({', '.join(damaged)}). Move "
                "the folder away to start anew, or set checkpoint.verify_on_load = false to read what "
                f"has other hashes. In the newest, {next(iter(damaged.values()))}"
            )
        self._damaged.update(map(os.path.realpath, damaged))
        self._newest = folders, chosen
        return chosen

    def at(self, path: str, model_only: bool = False) -> Source:
        """The checkpoint in the folder `path`, in either format. model_only: no more is asked for."""

        def check() -> Contents:
            if not os.path.isdir(path):
                raise FileNotFoundError(
                    f"load(path=...) must be the folder of one checkpoint, got {path!r}, which is "
                    "no folder; correct the path"
                )
            return _check_known(path, "load(path=...)")

        contents = from_rank_zero(check)
        self._check_whole(path, contents)
        from_hf = contents == Contents.HF if model_only else _warns_of_hf(path, contents)
        return Source(path, from_hf, from_hf, from_hf and self._config.initial_load_in_hf_quantized)

    def initial(self, require_adapter: Callable[[], BaseStateDictAdapter]) -> Source | None:
        """Where a run without checkpoints of its own starts from, if that is configured."""
        config = self._config
        path, key = config.initial_load_path, "checkpoint.initial_load_path"
        if not path and config.initial_load_in_hf:
            path, key = require_adapter().hf_assets_path, "model.hf_assets_path"
            if not path:
                raise ValueError(
                    "checkpoint.initial_load_in_hf needs checkpoint.initial_load_path or "
                    "model.hf_assets_path, a folder with safetensors files; neither is set"
                )
        if not path:
            return None

        def check() -> Contents:
            if not os.path.isdir(path):
                raise ValueError(f"{key} must be a folder with a checkpoint, got {path!r}")
            if config.initial_load_in_hf:
                return contents_of(path)
            if (contents := _check_known(path, key)) == Contents.HF:
                raise ValueError(
                    f"{key} {path!r} holds Hugging Face weights; set "
                    "checkpoint.initial_load_in_hf = true to read them"
                )
            return contents

        self._check_whole(path, from_rank_zero(check))
        return Source(
            path,
            config.initial_load_model_only,
            config.initial_load_in_hf,
            config.initial_load_in_hf_quantized,
        )

    def _check_whole(self, path: str, contents: Contents) -> None:
        """For a checkpoint that was asked for by name: no other can take its place."""
        if contents == Contents.UNFINISHED:
            raise ValueError(f"The checkpoint {path} is incomplete: its save was interrupted")
        if damage := self._damage_of(path, contents):
            raise ValueError(
                f"The checkpoint {path} is damaged: {damage}. Load another one, or set "
                "checkpoint.verify_on_load = false to read it nevertheless"
            )

    def _damage_of(self, path: str, contents: Contents) -> str | None:
        is_checked = self._config.verify_on_load or contents == Contents.DAMAGED
        return find_damage(path) if is_checked else None


def _unreadable(step: StepFolder) -> str | None:
    """What is wrong with a file that says what stands where; None if nothing is. Collective."""
    check = check_files if step.contents == Contents.HF else saved_shapes_in
    try:
        from_rank_zero(lambda: check(step.path))
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _check_known(path: str, key: str) -> Contents:
    """What `path`, which `key` is set to, holds. ValueError if it is no checkpoint."""
    contents = contents_of(path)
    if contents == Contents.UNKNOWN:
        steps = ", ".join(os.path.basename(folder.path) for folder in list_steps(path))
        raise ValueError(
            f"{key} must be a checkpoint, which has a file .metadata, got "
            f"{path!r}; {f'name one of the checkpoints in it: {steps}' if steps else 'correct it'}"
        )
    return contents


def _warns_of_hf(path: str, contents: Contents) -> bool:
    """Whether the checkpoint is in Hugging Face format, which the log says then."""
    if contents == Contents.HF:
        logger.warning(f"{path} holds weights only, in Hugging Face format: {WEIGHTS_ONLY}")
    return contents == Contents.HF
