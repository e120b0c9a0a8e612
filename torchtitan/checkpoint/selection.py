"""Chooses the checkpoint to load: rank 0 reads the folders, and all ranks get its `Facts`.

A run that saves to an address has each step twice: in its local folder, and uploaded. The local step is
loaded if every rank can read all of its files.
"""

import os
from collections.abc import Collection
from typing import Any, NamedTuple

from torchtitan.checkpoint.folder import (
    HASHES_FILE,
    Contents,
    StepFolder,
    contents_of,
    find_damage,
    hashes_file_in,
    list_steps,
    recorded_hashes,
)
from torchtitan.checkpoint.hf_assets import check_files
from torchtitan.checkpoint.run_record import read_record
from torchtitan.checkpoint.states import Shapes, keys_outside_model, saved_shapes_in
from torchtitan.distributed.processes.ranks import all_ranks, from_rank_zero
from torchtitan.tools import storage
from torchtitan.tools.logging import logger


class Facts(NamedTuple):
    """What rank 0 knows about a checkpoint folder.

    step: -1 if the folder is not one of the run's own steps.
    hashes: the recorded hashes to compare the files with; empty: no comparison.
    shapes: shapes of the entries of a DCP checkpoint; None for HF files. record: see `run_record`.
    damage: a problem that was found without hashing the files, or None.
    """

    path: str
    contents: Contents
    step: int = -1
    hashes: dict[str, str] = {}
    shapes: Shapes | None = None
    record: dict[str, Any] = {}
    damage: str | None = None

    @property
    def is_hf(self) -> bool:
        return self.contents == Contents.HF

    @property
    def has_adapters(self) -> bool:
        """True if this is a DCP checkpoint with LoRA adapters, which lacks the base model."""
        return any(name.endswith(("lora_a", "lora_b")) for name in self.shapes or ())

    def holds_weights_only(self, states: Collection[str]) -> bool:
        """True if the model is the only component of `states` that the checkpoint has."""
        return self.is_hf if self.shapes is None else not keys_outside_model(self.shapes, states)

    def find_damage(self) -> str | None:
        """Return what is wrong with the files, or None. Collective: each rank hashes its share."""
        return (self.hashes and find_damage(self.path, self.hashes)) or self.damage

    def require_whole(self) -> "Facts":
        """Return self; raise ValueError if the checkpoint is unfinished or damaged. Collective."""
        if self.contents == Contents.UNFINISHED:
            raise ValueError(f"The checkpoint {self.path} is incomplete: its save was interrupted")
        if damage := self.find_damage():
            raise ValueError(
                f"The checkpoint {self.path} is damaged: {damage}. Load another checkpoint, or, if only "
                "hashes differ, set checkpoint.verify_on_load = false to read this one anyway"
            )
        return self


class Selection:
    """Chooses among the steps of a run. The methods are collective.

    damaged: a set to which the resolved paths of damaged steps are added. bucket: the address of the
    uploaded steps, or "". verify: True compares hashes.
    """

    def __init__(self, damaged: set[str], bucket: str = "") -> None:
        self._damaged, self._bucket = damaged, bucket
        self._folders: list[StepFolder] = []
        self._newest: Facts | None = None

    def step(self, folder: str, step: int, verify: bool) -> Facts | None:
        """Return the facts of a step in `folder`; step -1 is the newest complete step, None if none.

        Raises FileNotFoundError or ValueError if the step is missing or not complete, or if a later step,
        which this run would replace, is the base model of adapters.
        """
        if step == -1:
            chosen, folders = self.newest(folder, verify), self._folders
        else:
            folders, copies = from_rank_zero(lambda: self._named_step(folder, step, verify))
            whole = (facts for facts in copies[:-1] if self._problem_of(facts, folder) is None)
            if (chosen := next(whole, None)) is None:
                last = copies[-1]
                damage = self._missing_files(last, folder) or last.damage
                chosen = last._replace(damage=damage).require_whole()
        if chosen is None:
            return None
        newer = [f for f in folders if f.step > chosen.step]
        if bases := [f.path for f in newer if f.is_base]:
            raise ValueError(
                f"A run that continues from {chosen.path} would replace {bases[0]}, the base model of "
                "adapters; set another checkpoint.folder, and checkpoint.initial_load_path to the first step"
            )
        if newer:
            logger.warning(
                f"{folder} holds steps after {chosen.step} ({', '.join(map(str, sorted({f.step for f in newer})))}), "
                "which this run replaces when it reaches them"
            )
        return chosen

    def newest(self, folder: str, verify: bool) -> Facts | None:
        """Return the facts of the newest complete step, cached until the folders change; None if none.

        Raises ValueError if no step is complete and at least one is damaged.
        """
        problems: dict[str, str] = {}
        while True:
            folders, facts = from_rank_zero(lambda: self._newest_step(folder, verify, problems))
            if not problems and folders == self._folders:
                return self._newest
            if facts is None or (problem := self._problem_of(facts, folder)) is None:
                break
            problems[facts.path] = problem
        damaged = {path: why for path, why in problems.items() if why != _ELSEWHERE}
        for step in reversed(folders):
            if facts is not None and step.path == facts.path:
                break
            reason = "its save was interrupted"
            if step.path in problems:
                reason = _ELSEWHERE
            if step.path in damaged:
                reason = f"it is damaged, {damaged[step.path]}"
            elif step.contents == Contents.UNKNOWN:
                reason = "it holds no checkpoint (there is no file .metadata)"
            logger.warning(f"Passing over {step.path}: {reason}")
        if damaged and facts is None:
            raise ValueError(
                f"Every checkpoint in {folder} is damaged ({', '.join(damaged)}). Move the folder away "
                "to start again, or set checkpoint.verify_on_load = false to read files whose hashes "
                f"differ. In the newest, {next(iter(damaged.values()))}"
            )
        self._damaged.update(map(storage.resolved, damaged))
        self._folders, self._newest = folders, facts
        return facts

    def facts_of(self, folder: str, step: int) -> Facts:
        """Return the facts of a step, unverified; the facts of the newest step are cached."""
        if self._newest is not None and self._newest.step == step:
            return self._newest
        return from_rank_zero(lambda: self._named_step(folder, step, False)[1][0])

    def _problem_of(self, facts: Facts, folder: str) -> str | None:
        """Return why a step cannot be loaded, or None. folder: this run's step folders. Collective."""
        return self._missing_files(facts, folder) or facts.find_damage()

    def _missing_files(self, facts: Facts, folder: str) -> str | None:
        """Return why a rank cannot read all files of a step on the disk; None if all ranks can. Collective."""
        if self._bucket and not storage.is_address(facts.path):
            try:
                names = from_rank_zero(lambda: [*recorded_hashes(facts.path)])
            except ValueError as error:
                return str(error)
            if not names:  # without hashes, a step with missing files would look complete
                return f"{HASHES_FILE} is missing"
            own = os.path.join(folder, os.path.basename(facts.path))

            def found_in(place: str) -> set[str]:
                return {name for name in names if os.path.isfile(os.path.join(place, name))}

            # Each machine may have its own disk; after an upload, only rank 0's disk keeps the files.
            of_ranks = all_ranks((found_in(facts.path), found_in(own)))
            if any(len(readable) < len(names) for readable, _ in of_ranks):
                n_kept = len(set().union(*(kept for _, kept in of_ranks)))
                if n_kept == len(names):
                    return _ELSEWHERE
                return f"{len(names) - n_kept} of its {len(names)} files are on no disk of this job"
        return None

    def _steps(self, folder: str) -> list[StepFolder]:
        """Return the steps, sorted; the uploaded folder of a step comes before its local one."""
        uploaded = list_steps(self._bucket) if self._bucket else []
        return sorted([*uploaded, *list_steps(folder)], key=lambda step: step.step)

    def _named_step(
        self, folder: str, step: int, verify: bool
    ) -> tuple[list[StepFolder], list[Facts]]:
        """Return (all steps, the facts of this step's local and uploaded folders)."""
        folders = self._steps(folder)
        copies = [f.path for f in reversed(folders) if f.step == step]
        if not copies:
            steps = ", ".join(str(step) for step in sorted({f.step for f in folders})) or "none"
            raise FileNotFoundError(
                f"There is no checkpoint of step {step} in {folder} (steps there: {steps}). "
                "Set checkpoint.load_step to one of them, or to -1 for the newest"
            )
        return folders, [_read(path, verify, step) for path in copies]

    def _newest_step(
        self, folder: str, verify: bool, passed_over: Collection[str]
    ) -> tuple[list[StepFolder], Facts | None]:
        """Return (steps, facts of the newest usable step).

        The facts are None if no step is usable, or if the steps equal those of the cached result.
        """
        folders = self._steps(folder)
        if not passed_over and folders == self._folders:
            return folders, None
        for step in reversed(folders):
            may_be_whole = step.is_finished or step.contents == Contents.DAMAGED
            if may_be_whole and step.path not in passed_over:
                return folders, _read(step.path, verify, step.step)
        return folders, None


_ELSEWHERE = "its files are on the disks of several machines, and no machine has all of them"


def at_path(path: str, key: str, verify: bool, in_hf: bool | None = None) -> Facts:
    """Return the facts of the folder `path`, which the setting `key` names. Collective.

    in_hf: True: read Hugging Face files. False: refuse a folder with only such files. None: read either.
    Raises FileNotFoundError or ValueError if `path` is not a complete checkpoint.
    """

    def read() -> Facts:
        if not storage.is_folder(path):
            error = FileNotFoundError if in_hf is None else ValueError
            raise error(f"{key} must be a folder with a checkpoint, got {path!r}; correct the path")
        facts = _read(path, verify, in_hf=bool(in_hf))
        if facts.contents == Contents.UNKNOWN:
            steps = ", ".join(os.path.basename(step.path) for step in list_steps(path)) or "none"
            raise ValueError(
                f"{key} must be the folder of a checkpoint (with a file .metadata), got {path!r}; name "
                f"one of the checkpoints in it: {steps}"
            )
        if facts.is_hf and in_hf is False:
            raise ValueError(
                f"{key} {path!r} holds Hugging Face weights; set "
                "checkpoint.initial_load_in_hf = true to read them"
            )
        return facts

    return from_rank_zero(read).require_whole()


def _read(path: str, verify: bool = False, step: int = -1, in_hf: bool = False) -> Facts:
    """Return the facts of a folder. in_hf: use its Hugging Face files even if it has DCP files."""
    facts = Facts(path, contents_of(path), step)
    if facts.contents == Contents.UNFINISHED:
        return facts
    is_address = storage.is_address(path)
    if is_address and step >= 0 and hashes_file_in(path) is None:
        return facts._replace(
            damage=f"it has no {HASHES_FILE}"
        )  # an outdated listing may still show the hash file
    try:
        if verify or facts.contents == Contents.DAMAGED:
            facts = facts._replace(hashes=recorded_hashes(path))
        if in_hf:
            return facts._replace(contents=Contents.HF)
        if facts.is_hf and step >= 0 and not is_address:
            check_files(path)
        return facts._replace(shapes=saved_shapes_in(path), record=read_record(path))
    except (ValueError, OSError) as error:
        return facts._replace(damage=str(error))
