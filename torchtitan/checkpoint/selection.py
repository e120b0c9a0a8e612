"""Chooses the checkpoint to load. Collective: rank 0 lists folders, all ranks share the hashing."""

import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torchtitan.checkpoint.folder import (
    Contents,
    StepFolder,
    contents_of,
    find_damage,
    is_base,
    list_steps,
)
from torchtitan.checkpoint.hf import check_files
from torchtitan.checkpoint.states import WEIGHTS_ONLY, keys_outside_model, saved_shapes_in
from torchtitan.distributed.processes.ranks import from_rank_zero
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools.logging import logger


class Source(NamedTuple):
    """The checkpoint to load, and which part of it."""

    path: str
    model_only: bool
    from_hf: bool = False
    from_quantized: bool = False


class Selection:
    """Chooses among the steps of a run, the initial checkpoint, and a folder given by path.

    damaged: the resolved paths of damaged steps are added to this set.
    verify, in the methods: compare the files with their recorded hashes.
    """

    def __init__(self, damaged: set[str]) -> None:
        self._damaged = damaged
        self._newest: tuple[list[StepFolder], StepFolder | None] | None = None

    def for_run(
        self,
        folder: str,
        step: int,
        verify: bool,
        initial: Source,
        require_adapter: Callable[[], BaseStateDictAdapter],
        reads_initial_too: bool = False,
    ) -> Source | None:
        """The checkpoint that a run with its own steps in `folder` loads; None if there is none.

        step: -1 loads the newest whole step, or the initial checkpoint if the run has none.
        initial: the `initial_load_*` settings. If it has no path, Hugging Face files come from the
        adapter's folder. reads_initial_too: the caller reads them before a step of the run.
        Raises FileNotFoundError if there is no such step, ValueError if it is not whole.
        """
        folders = from_rank_zero(lambda: list_steps(folder))
        if step == -1:
            chosen = self.newest_whole_step(folder, verify)
            if chosen is None:
                return initial_source(initial, require_adapter, verify)
        else:
            chosen = next((f for f in folders if f.step == step), None)
            if chosen is None:
                steps = ", ".join(str(f.step) for f in folders) or "none"
                raise FileNotFoundError(
                    f"There is no checkpoint of step {step} in {folder} (steps there: {steps}). "
                    "Set checkpoint.load_step to one of them, or to -1 for the newest"
                )
            _check_whole(chosen.path, chosen.contents, verify)
        bases = from_rank_zero(
            lambda: [f.path for f in folders if f.step > chosen.step and is_base(f.path)]
        )
        if bases:
            raise ValueError(
                f"A run that continues from {chosen.path} would replace {bases[0]}, the base model of "
                "adapters, when it reaches that step; set checkpoint.folder to another folder and "
                f"checkpoint.initial_load_path to {chosen.path}"
            )
        if newer := [str(f.step) for f in folders if f.step > chosen.step]:
            logger.warning(
                f"{folder} holds steps after {chosen.step} ({', '.join(newer)}), which this "
                "run replaces when it reaches them"
            )
        if (initial.path or initial.from_hf) and not reads_initial_too:
            logger.warning(
                f"This run continues from {chosen.path}; checkpoint.initial_load_path and "
                "initial_load_in_hf are ignored. Use another checkpoint.folder to start again"
            )
        from_hf = _warns_of_hf(chosen.path, chosen.contents)
        return Source(chosen.path, model_only=from_hf or chosen.step == 0, from_hf=from_hf)

    def newest_whole_step(self, folder: str, verify: bool) -> StepFolder | None:
        """The newest whole step; None if there is none.

        The result is cached while the folders stay the same, because hashing takes long.
        Raises ValueError if no step is whole and at least one is damaged.
        """
        folders = from_rank_zero(lambda: list_steps(folder))
        if self._newest is not None and self._newest[0] == folders:
            return self._newest[1]
        chosen: StepFolder | None = None
        damaged: dict[str, str] = {}
        for step in reversed(folders):
            if step.contents == Contents.UNFINISHED:
                reason = "its save was interrupted"
            elif step.contents == Contents.UNKNOWN:
                reason = "it holds no checkpoint (there is no file .metadata)"
            elif damage := _damage_of(step.path, step.contents, verify) or _unreadable(step):
                reason = f"it is damaged, {damage}"
                damaged[step.path] = damage
            else:
                chosen = step
                break
            logger.warning(f"Passing over {step.path}: {reason}")
        if damaged and chosen is None:
            raise ValueError(
                f"Every checkpoint in {folder} is damaged ({', '.join(damaged)}). Move the folder away "
                "to start again, or set checkpoint.verify_on_load = false to read files whose hashes "
                f"differ. In the newest, {next(iter(damaged.values()))}"
            )
        self._damaged.update(map(os.path.realpath, damaged))
        self._newest = folders, chosen
        return chosen


def at_path(path: str, verify: bool, model_only: bool, from_quantized: bool) -> Source:
    """The checkpoint in the folder `path`, in either format.

    model_only: the caller loads the weights only, so weights-only files need no warning.
    from_quantized: Hugging Face files are quantized.
    Raises FileNotFoundError or ValueError if there is no whole checkpoint.
    """

    def check() -> Contents:
        if not os.path.isdir(path):
            raise FileNotFoundError(
                f"load(path=...) must be the folder of one checkpoint, got {path!r}, which is "
                "not a folder; correct the path"
            )
        return _check_known(path, "load(path=...)")

    contents = from_rank_zero(check)
    _check_whole(path, contents, verify)
    from_hf = contents == Contents.HF if model_only else _warns_of_hf(path, contents)
    return Source(path, from_hf, from_hf, from_hf and from_quantized)


def holds_weights_only(path: str, states: Iterable[str]) -> bool:
    """True if the step folder `path` has nothing of `states`, a run's components, but the model."""
    if (saved := saved_shapes_in(path)) is None:
        return contents_of(path) == Contents.HF
    return not keys_outside_model(saved, states)


def initial_source(
    initial: Source, require_adapter: Callable[[], BaseStateDictAdapter], verify: bool
) -> Source | None:
    """The checkpoint that a run without steps of its own starts from; None if not configured."""
    path, key = initial.path, "checkpoint.initial_load_path"
    if not path and initial.from_hf:
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
        if initial.from_hf:
            return contents_of(path)
        if (contents := _check_known(path, key)) == Contents.HF:
            raise ValueError(
                f"{key} {path!r} holds Hugging Face weights; set "
                "checkpoint.initial_load_in_hf = true to read them"
            )
        return contents

    _check_whole(path, from_rank_zero(check), verify)
    return initial._replace(path=path)


def _check_whole(path: str, contents: Contents, verify: bool) -> None:
    """Raise ValueError if a checkpoint that the user named is interrupted or damaged."""
    if contents == Contents.UNFINISHED:
        raise ValueError(f"The checkpoint {path} is incomplete: its save was interrupted")
    if damage := _damage_of(path, contents, verify):
        raise ValueError(
            f"The checkpoint {path} is damaged: {damage}. Load another checkpoint, or set "
            "checkpoint.verify_on_load = false to read this one anyway"
        )


def _damage_of(path: str, contents: Contents, verify: bool) -> str | None:
    return find_damage(path) if verify or contents == Contents.DAMAGED else None


def _unreadable(step: StepFolder) -> str | None:
    """The error of reading the index of the step's tensors; None if it is readable. Collective."""
    check = check_files if step.contents == Contents.HF else saved_shapes_in
    try:
        from_rank_zero(lambda: check(step.path))
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _check_known(path: str, key: str) -> Contents:
    """The contents of the folder `path`, the value of the setting `key`.

    Raises ValueError if the folder is not a checkpoint.
    """
    contents = contents_of(path)
    if contents == Contents.UNKNOWN:
        steps = ", ".join(os.path.basename(folder.path) for folder in list_steps(path))
        raise ValueError(
            f"{key} must be the folder of a checkpoint (with a file .metadata), got "
            f"{path!r}; {f'name one of the checkpoints in it: {steps}' if steps else 'correct it'}"
        )
    return contents


def _warns_of_hf(path: str, contents: Contents) -> bool:
    """Return True, and warn, if the checkpoint is in Hugging Face format."""
    if contents == Contents.HF:
        logger.warning(f"{path} holds weights only, in Hugging Face format: {WEIGHTS_ONLY}")
    return contents == Contents.HF
