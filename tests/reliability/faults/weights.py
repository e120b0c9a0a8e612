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

FROM_HF = "scripts/checkpoint_conversion/convert_from_hf.py"
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


def resume(change: Callable[[Path], None]) -> Callable[[Path], list[str]]:
    """Arranges a resume from a step that `change` was called with."""

    def arrange(folder: Path) -> list[str]:
        hostile.keep_only(step_in(folder))
        hostile.forget_hashes(step_in(folder))
        change(step_in(folder))
        return [*SAVING, "--training.steps=6"]

    return arrange


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def plant(plant_in: Callable[..., None], *names: str) -> Callable[[Path], None]:
    return lambda step: plant_in(step, canary_in(step.parents[2]), *names)


def shorten_file(name: str, to: int) -> Callable[[Path], None]:
    return lambda step: os.truncate(step / name, to)


def overwrite(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda step: (step / name).write_bytes(content)


def zero_the_middle(step: Path) -> None:
    data = step / "__0_0.distcp"
    size = data.stat().st_size
    data.write_bytes(data.read_bytes()[: size // 4] + bytes(size - size // 4))


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
    """Arranges a start from Hugging Face files.

    Of each file: its bytes, a header for safetensors with the data after it, or JSON to be.
    """

    def arrange(folder: Path) -> list[str]:
        weights = folder / "hf"
        weights.mkdir()
        for name, content in files.items():
            if isinstance(content, tuple):
                hostile.safetensors_file(weights / f"{name}.safetensors", *content)
            elif isinstance(content, bytes):
                (weights / f"{name}.safetensors").write_bytes(content)
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


def linked_weights(folder: Path) -> list[str]:
    arguments = hf(model=ONE_TENSOR)(folder)
    shutil.move(folder / "hf/model.safetensors", folder / "elsewhere")
    (folder / "hf/model.safetensors").symlink_to(folder / "elsewhere")
    return arguments


def tokenizer(name: str, text: str) -> Callable[[Path], list[str]]:
    def arrange(folder: Path) -> list[str]:
        shutil.copytree(jobs.TOKENIZER, folder / "assets")
        (folder / "assets" / name).write_text(text)
        return [f"--model.hf_assets_path={folder}/assets"]

    return arrange


def config_json(**changes: Any) -> Callable[[Path], list[str]]:
    content = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "intermediate_size": 128,
    }

    def arrange(folder: Path) -> list[str]:
        (folder / "config.json").write_text(json.dumps(content | changes))
        return [str(folder)]

    return arrange


# Conversions.


def convert(source: str, target: str) -> Callable[[Path], list[str]]:
    """Arguments of a converter; `given` is the finished run's checkpoint, `hf` some files."""

    def arrange(folder: Path) -> list[str]:
        shutil.copytree(step_in(folder), folder / "given")
        (folder / "hf").mkdir()
        hostile.safetensors_file(folder / "hf/model.safetensors", *ONE_TENSOR)
        return [f"{folder}/{source}", f"{folder}/{target}", "--model_flavor=debugmodel"]

    return arrange


def nothing_was_written(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"given", "hf", "logs", "outputs"}
    for name in (".metadata", ".sha256sums", "__0_0.distcp"):
        assert (folder / "given" / name).read_bytes() == (step_in(folder) / name).read_bytes()
    assert [path.name for path in (folder / "hf").iterdir()] == ["model.safetensors"]


resuming = partial(Fault, after_run=True, check=nothing_was_executed)
describing = partial(Fault, module="torchtitan.models.hf_config", whole_command=True)
converting = partial(Fault, after_run=True, whole_command=True, check=nothing_was_written)

FAULTS = {
    # Made to do harm
    "resume from `.metadata` that executes code": resuming(
        resume(plant(hostile.plant_in_metadata))
    ),
    "resume from a checkpoint with a hole": resuming(
        resume(lambda step: hostile.change_chunks(step, "output.weight", ([0, 0], [1024, 16])))
    ),
    "start from `.metadata` that executes code": resuming(start_from_hostile_step),
    "conversion of `.metadata` that executes code": resuming(
        convert_hostile_step, module=TO_HF, whole_command=True
    ),
    "generation from `.metadata` that executes code": resuming(
        generate_from_hostile_step, module=GENERATE, whole_command=True
    ),
    "optimizer entry that executes code": resuming(resume(plant(hostile.plant_in_entry, LR))),
    "data position that executes code": resuming(resume(plant(hostile.plant_in_position))),
    "checkpoint that reads a file elsewhere": resuming(
        resume(lambda step: hostile.redirect_files(step, "../../../secret"))
    ),
    "checkpoint file that is a link out of its folder": resuming(resume(link_out)),
    # Damaged checkpoints without hashes
    "checkpoint file that is cut off": resuming(
        resume(shorten_file("__0_0.distcp", 1000)), ranks=2
    ),
    "checkpoint file that is missing, without hashes": resuming(
        resume(lambda step: (step / "__0_0.distcp").unlink())
    ),
    "checkpoint file of zeros": resuming(resume(zero_the_middle)),
    "`.metadata` of something else": resuming(
        resume(overwrite(".metadata", b"\x80\x04 no pickle"))
    ),
    "step counter that is a text": resuming(
        resume(lambda s: hostile.replace_entry(s, "train_state.step", saved("many")))
    ),
    "data position of another dataset": resuming(
        resume(
            lambda s: hostile.replace_entry(
                s, "dataloader.dp_rank_0", saved(pickle.dumps({"position": 7}))
            )
        )
    ),
    # Safetensors and their index
    "safetensors file with a header of many GB": hf(model=(2**40).to_bytes(8, "little") + b"{}"),
    "safetensors file whose header is no JSON": hf(model=(b"{not JSON}",)),
    "safetensors file of an unknown kind of numbers": hf(
        model=({"a": tensor(0, 4, "Q7")}, bytes(4))
    ),
    "safetensors file of whole numbers": hf(
        model=(
            {"model.embed_tokens.weight": tensor(0, 4, "I32")},
            bytes(4),
        )
    ),
    "safetensors file of another model": hf(model=ONE_TENSOR),
    "folder without safetensors files": hf(),
    "safetensors file that is a link out of its folder": linked_weights,
    "index that is no table": hf(model=ONE_TENSOR, index=["model.safetensors"]),
    "index that leads out of its folder": hf(
        model=ONE_TENSOR, index={"weight_map": {"a": "../secret"}}
    ),
    "index of files that are missing": hf(
        **{"model-00001-of-00002": ONE_TENSOR},
        index={"weight_map": {"b": "model-00002-of-00002.safetensors"}},
    ),
    # Tokenizer and config.json
    "tokenizer_config.json that is nested too deeply": tokenizer(
        "tokenizer_config.json", '{"a":' * 100_000
    ),
    "config.json with fewer than no layers": describing(config_json(num_hidden_layers=-2)),
    "config.json with a size beyond all models": describing(config_json(vocab_size=10**12)),
    # Conversions
    "conversion over a checkpoint": converting(convert("hf", "given"), module=FROM_HF),
    "conversion from Hugging Face files into their own folder": converting(
        convert("hf", "hf"), module=FROM_HF
    ),
    "conversion of a checkpoint into its own folder": converting(
        convert("given", "given/../given/hf"), module=TO_HF
    ),
    "conversion of a folder without a checkpoint": converting(convert("hf", "new"), module=TO_HF),
}
