"""Faults of weights and other files that came from elsewhere, damaged or made to do harm."""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests import hostile
from tests.reliability import jobs
from tests.reliability.faults import SAVING, Fault

TO_HF = "scripts/checkpoint_conversion/convert_to_hf.py"
GENERATE = "scripts.generate.test_generate"
LR = "optimizer.param_groups.norm.weight.lr"


def step_in(folder: Path) -> Path:
    return folder / "outputs/checkpoint/step-4"


def canary_in(folder: Path) -> Path:
    return folder / "canary"


def nothing_was_executed(folder: Path) -> None:
    assert not canary_in(folder).exists()


# What is done to the newest step, which is the only one, and has no hashes.


after_run = partial(Fault, after_run=True, check=nothing_was_executed)


def resumed(change: Callable[[Path], object], ranks: int = 1) -> Fault:
    """A run goes on from a step that `change` was called with."""

    def arrange(folder: Path) -> list[str]:
        hostile.keep_only(step_in(folder))
        hostile.forget_hashes(step_in(folder))
        change(step_in(folder))
        return [*SAVING, "--training.steps=6"]

    return after_run(arrange, ranks=ranks)


def with_entry(name: str, value: Any) -> Fault:
    content = io.BytesIO()
    torch.save(value, content)
    return resumed(lambda step: hostile.replace_entry(step, name, content.getvalue()))


def plant(plant_in: Callable[..., None], *names: str) -> Callable[[Path], None]:
    return lambda step: plant_in(step, canary_in(step.parents[2]), *names)


def link_out(step: Path) -> None:
    elsewhere = step.parents[1] / "elsewhere"
    shutil.move(step / "__0_0.distcp", elsewhere)
    (step / "__0_0.distcp").symlink_to(elsewhere)


def hostile_step(folder: Path) -> Path:
    """A step of the finished run, elsewhere, with something planted in its `.metadata`."""
    step = folder / "given"
    shutil.move(step_in(folder), step)
    hostile.plant_in_metadata(step, canary_in(folder))
    return step


def start_from_hostile_step(folder: Path) -> list[str]:
    step = hostile_step(folder)
    shutil.rmtree(folder / "outputs")
    return [*SAVING, f"--checkpoint.initial_load_path={step}"]


def convert_hostile_step(folder: Path) -> list[str]:
    return [str(hostile_step(folder)), f"{folder}/new", "--model_flavor=debugmodel"]


def generate_from_hostile_step(folder: Path) -> list[str]:
    (folder / "job.toml").write_text(
        f'[model]\nname = "llama3"\nflavor = "debugmodel"\nhf_assets_path = "{jobs.TOKENIZER}"\n'
    )
    return [f"--config={folder}/job.toml", f"--checkpoint={hostile_step(folder)}"]


# Hugging Face files.


def hf(**files: Any) -> Callable[[Path], list[str]]:
    """Arranges a start from Hugging Face files: header and data of each, and an index."""

    def arrange(folder: Path) -> list[str]:
        weights = folder / "hf"
        weights.mkdir()
        for name, content in files.items():
            if isinstance(content, tuple):
                hostile.safetensors_file(weights / f"{name}.safetensors", *content)
            else:
                (weights / "model.safetensors.index.json").write_text(json.dumps(content))
        return [
            *SAVING,
            "--checkpoint.initial_load_in_hf",
            f"--checkpoint.initial_load_path={weights}",
        ]

    return arrange


def tensor(begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [1], "data_offsets": [begin, end]}


ONE_TENSOR = ({"a": tensor(0, 4)}, bytes(4))


FAULTS = {
    # Made to do harm
    "resume from `.metadata` that executes code": resumed(plant(hostile.plant_in_metadata)),
    "resume from a checkpoint with a hole": resumed(
        lambda step: hostile.change_chunks(step, "output.weight", ([0, 0], [1024, 16]))
    ),
    "start from `.metadata` that executes code": after_run(start_from_hostile_step),
    "conversion of `.metadata` that executes code": after_run(
        convert_hostile_step, module=TO_HF, whole_command=True
    ),
    "generation from `.metadata` that executes code": after_run(
        generate_from_hostile_step, module=GENERATE, whole_command=True
    ),
    "optimizer entry that executes code": resumed(plant(hostile.plant_in_entry, LR)),
    "data position that executes code": resumed(plant(hostile.plant_in_position)),
    "checkpoint that reads a file elsewhere": resumed(
        lambda step: hostile.redirect_files(step, "../../../secret")
    ),
    "checkpoint file that is a link out of its folder": resumed(link_out),
    # Damaged checkpoints without hashes
    "checkpoint file that is cut off": resumed(
        lambda step: os.truncate(step / "__0_0.distcp", 1000), ranks=2
    ),
    "`.metadata` of something else": resumed(
        lambda step: (step / ".metadata").write_bytes(b"\x80\x04 no pickle")
    ),
    "step counter that is a text": with_entry("train_state.step", "many"),
    "data position of another dataset": with_entry(
        "dataloader.dp_rank_0", pickle.dumps({"position": 7})
    ),
    # Safetensors and their index
    "safetensors file of an unknown kind of numbers": hf(
        model=({"a": tensor(0, 4, "Q7")}, bytes(4))
    ),
    "safetensors file of whole numbers": hf(
        model=({"model.embed_tokens.weight": tensor(0, 4, "I32")}, bytes(4))
    ),
    "safetensors file of another model": hf(model=ONE_TENSOR),
    "folder without safetensors files": hf(),
    "index that is no table": hf(model=ONE_TENSOR, index=["model.safetensors"]),
    "index of files that are missing": hf(
        **{"model-00001-of-00002": ONE_TENSOR},
        index={"weight_map": {"b": "model-00002-of-00002.safetensors"}},
    ),
}
