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
REFUSED = (
    "it names posix.mkdir, which is not plain data and might execute code; nothing was executed"
)
HARM = "Somebody made the file so that reading it executes code."
DAMAGED = "The file was cut or changed on its way, and there are no hashes to show it."
FETCH = "Fetch it again, from a source that you trust."


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


resuming = partial(Fault, exit_code=1, after_run=True, check=nothing_was_executed)
from_hf_files = partial(Fault, exit_code=1, cause=DAMAGED, remedy=FETCH)
describing = partial(
    Fault,
    exit_code=1,
    module="torchtitan.models.hf_config",
    whole_command=True,
    cause="The config.json is not one of a model, or somebody changed it.",
    remedy="Fetch the file again, or give the folder of the right model.",
)
converting = partial(
    Fault, exit_code=1, after_run=True, whole_command=True, check=nothing_was_written
)

FAULTS = [
    # Made to do harm
    resuming(
        name="resume from `.metadata` that executes code",
        message=f"error: …step-4/.metadata cannot be read: {REFUSED}",
        cause=HARM,
        remedy=FETCH,
        arrange=resume(plant(hostile.plant_in_metadata)),
    ),
    resuming(
        name="resume from a checkpoint with a hole",
        message="error: …step-4/.metadata is damaged: its 1 chunks of output.weight do not cover every "
        "number of the [2048, 16] once; load another checkpoint",
        cause="The checkpoint was put together, or written, in part.",
        remedy=FETCH,
        arrange=resume(
            lambda step: hostile.change_chunks(step, "output.weight", ([0, 0], [1024, 16]))
        ),
    ),
    resuming(
        name="start from `.metadata` that executes code",
        message=f"error: …given/.metadata cannot be read: {REFUSED}",
        cause=HARM,
        remedy=FETCH,
        arrange=start_from_hostile_step,
    ),
    resuming(
        name="conversion of `.metadata` that executes code",
        message=f"error: …given/.metadata cannot be read: {REFUSED}",
        cause=HARM,
        remedy=FETCH,
        arrange=convert_hostile_step,
        module=TO_HF,
        whole_command=True,
    ),
    resuming(
        name="generation from `.metadata` that executes code",
        message=f"error: …given/.metadata cannot be read: {REFUSED}",
        cause=HARM,
        remedy=FETCH,
        arrange=generate_from_hostile_step,
        module=GENERATE,
        whole_command=True,
    ),
    resuming(
        name="optimizer entry that executes code",
        message=f"error: …step-4… could not be read…__0_0.distcp cannot be read: the entry {LR}: {REFUSED}",
        cause=HARM,
        remedy=FETCH,
        arrange=resume(plant(hostile.plant_in_entry, LR)),
    ),
    resuming(
        name="data position that executes code",
        message=f"error: the data position of dp_rank_0 cannot be read: {REFUSED}",
        cause=HARM,
        remedy=FETCH,
        arrange=resume(plant(hostile.plant_in_position)),
    ),
    resuming(
        name="checkpoint that reads a file elsewhere",
        message="error: …../../../secret in …step-4 leads out of the folder, to …/secret…",
        cause="Somebody made `.metadata` so that another file is read.",
        remedy=FETCH,
        arrange=resume(lambda step: hostile.redirect_files(step, "../../../secret")),
    ),
    resuming(
        name="checkpoint file that is a link out of its folder",
        message="error: …__0_0.distcp in …step-4 leads out of the folder, to …/elsewhere; put the file itself there",
        cause="A file of the checkpoint is a symbolic link.",
        remedy="Copy the file there, or make the folder the link.",
        arrange=resume(link_out),
    ),
    # Damaged checkpoints without hashes
    resuming(
        name="checkpoint file that is cut off",
        message="error: …__0_0.distcp is cut off: it has 1000 bytes, but .metadata lists …",
        cause=DAMAGED,
        remedy="Copy the checkpoint again, or set checkpoint.load_step to another one.",
        arrange=resume(shorten_file("__0_0.distcp", 1000)),
        ranks=2,
    ),
    resuming(
        name="checkpoint file that is missing, without hashes",
        message="error: …__0_0.distcp cannot be read: No such file or directory",
        cause=DAMAGED,
        remedy="Copy the checkpoint again, or set checkpoint.load_step to another one.",
        arrange=resume(lambda step: (step / "__0_0.distcp").unlink()),
    ),
    resuming(
        name="checkpoint file of zeros",
        message="error: …__0_0.distcp cannot be read: …",
        cause=DAMAGED,
        remedy="Copy the checkpoint again, or set checkpoint.load_step to another one.",
        arrange=resume(zero_the_middle),
    ),
    resuming(
        name="`.metadata` of something else",
        message="error: …step-4/.metadata cannot be read: …",
        cause=DAMAGED,
        remedy="Copy the checkpoint again, or set checkpoint.load_step to another one.",
        arrange=resume(overwrite(".metadata", b"\x80\x04 no pickle")),
    ),
    resuming(
        name="`.metadata` that is empty",
        message="error: …step-4/.metadata cannot be read: Ran out of input",
        cause=DAMAGED,
        remedy="Copy the checkpoint again, or set checkpoint.load_step to another one.",
        arrange=resume(overwrite(".metadata", b"")),
    ),
    resuming(
        name="step counter that is a text",
        message="error: …__0_0.distcp cannot be read: the entry train_state.step is of type str, but int was expected",
        cause=DAMAGED,
        remedy="Copy the checkpoint again, or set checkpoint.load_step to another one.",
        arrange=resume(lambda s: hostile.replace_entry(s, "train_state.step", saved("many"))),
    ),
    resuming(
        name="data position of another dataset",
        message="error: the data position in the checkpoint is not one of this dataset and dataloader (…); start the data over with checkpoint.exclude_from_loading = ['dataloader']",
        cause="The data were changed since then, to a kind with another form of position.",
        remedy="Resume with the earlier data, or leave out the position.",
        arrange=resume(
            lambda s: hostile.replace_entry(
                s, "dataloader.dp_rank_0", saved(pickle.dumps({"position": 7}))
            )
        ),
    ),
    # Safetensors and their index
    from_hf_files(
        name="safetensors file with a header of many GB",
        message="error: …model.safetensors is not a safetensors file, or it is cut off (…header too large…); fetch it again",
        arrange=hf(model=(2**40).to_bytes(8, "little") + b"{}"),
    ),
    from_hf_files(
        name="safetensors file whose header is no JSON",
        message="error: …model.safetensors is not a safetensors file, or it is cut off (…); fetch it again",
        arrange=hf(model=(b"{not JSON}",)),
    ),
    from_hf_files(
        name="safetensors file that is cut off",
        message="error: …model.safetensors is not a safetensors file, or it is cut off (…); fetch it again",
        arrange=hf(model=(ONE_TENSOR[0], bytes(3))),
    ),
    from_hf_files(
        name="safetensors file that is empty",
        message="error: …model.safetensors is not a safetensors file, or it is cut off (…); fetch it again",
        arrange=hf(model=b""),
    ),
    from_hf_files(
        name="safetensors file whose tensors overlap",
        message="error: …model.safetensors is not a safetensors file, or it is cut off (…); fetch it again",
        arrange=hf(model=({"a": tensor(0, 4), "b": tensor(2, 6)}, bytes(6))),
    ),
    from_hf_files(
        name="safetensors file whose tensors end beyond it",
        message="error: …model.safetensors is not a safetensors file, or it is cut off (…); fetch it again",
        arrange=hf(model=({"a": tensor(0, 2**62)}, bytes(4))),
    ),
    from_hf_files(
        name="safetensors file of an unknown kind of numbers",
        message="error: …model.safetensors is not a safetensors file, or it is cut off (…Q7…); fetch it again",
        arrange=hf(model=({"a": tensor(0, 4, "Q7")}, bytes(4))),
    ),
    from_hf_files(
        name="safetensors file of whole numbers",
        message="error: …model.embed_tokens.weight is saved as torch.int32, but the model has torch.float32",
        cause="The weights are quantized, in a way that is not read.",
        remedy="Give the weights as they are before quantization.",
        arrange=hf(
            model=(
                {"model.embed_tokens.weight": tensor(0, 4, "I32")},
                bytes(4),
            )
        ),
    ),
    from_hf_files(
        name="safetensors file of another model",
        message="error: The checkpoint …hf does not fit llama3 debugmodel, the model of the config (…not in the model: a)…",
        cause="The folder holds the weights of another model.",
        remedy="Set model.name and model.flavor to the saved model, or give another folder.",
        arrange=hf(model=ONE_TENSOR),
    ),
    from_hf_files(
        name="folder without safetensors files",
        message="error: There are no safetensors files in …hf…",
        cause="The path is wrong, or the download was not of weights.",
        remedy="Correct checkpoint.initial_load_path, or fetch the weights.",
        arrange=hf(),
    ),
    from_hf_files(
        name="safetensors file that is a link out of its folder",
        message="error: model.safetensors in …hf leads out of the folder, to …elsewhere; put the file itself there",
        cause="The file is a symbolic link to another place than the hub's own cache.",
        remedy="Copy the file there, or make the folder the link.",
        arrange=linked_weights,
    ),
    from_hf_files(
        name="index that is no table",
        message="error: …model.safetensors.index.json is not valid JSON: it must hold a JSON object, got a list; fetch the file again",
        arrange=hf(model=ONE_TENSOR, index=["model.safetensors"]),
    ),
    from_hf_files(
        name="index without a weight map",
        message="error: …model.safetensors.index.json is not a safetensors index: it has no table 'weight_map'",
        arrange=hf(model=ONE_TENSOR, index={"weight_map": 3}),
    ),
    from_hf_files(
        name="index that leads out of its folder",
        message="error: …model.safetensors.index.json names a file that is not beside it, for a: '../secret'; an index can only name files of its own folder",
        cause="Somebody made the index so that another file is read or written.",
        arrange=hf(model=ONE_TENSOR, index={"weight_map": {"a": "../secret"}}),
    ),
    from_hf_files(
        name="index of files that are missing",
        message="error: …hf is incomplete: model.safetensors.index.json names files that are missing: model-00002-of-00002.safetensors; fetch them. The checkpoint …hf does not fit llama3 debugmodel, …",
        cause="The download ended too early.",
        remedy="Fetch the files that are named.",
        arrange=hf(
            **{"model-00001-of-00002": ONE_TENSOR},
            index={"weight_map": {"b": "model-00002-of-00002.safetensors"}},
        ),
    ),
    # Tokenizer and config.json
    Fault(
        name="tokenizer.json of something else",
        message="error: cannot read the tokenizer in …tokenizer.json: …; fetch the file again",
        cause=DAMAGED,
        remedy=FETCH,
        arrange=tokenizer("tokenizer.json", "[" * 100_000),
        exit_code=1,
    ),
    Fault(
        name="tokenizer_config.json that is nested too deeply",
        message="error: …tokenizer_config.json is not valid JSON: it is nested too deeply; fetch the file again",
        cause=DAMAGED,
        remedy=FETCH,
        arrange=tokenizer("tokenizer_config.json", '{"a":' * 100_000),
        exit_code=1,
    ),
    describing(
        name="config.json with fewer than no layers",
        message="error: …config.json: No model here matches the Hugging Face config: it has num_hidden_layers = -2, but it must be an integer from 1 to 1000",
        arrange=config_json(num_hidden_layers=-2),
    ),
    describing(
        name="config.json with a size beyond all models",
        message="error: …config.json: No model here matches the Hugging Face config: it has vocab_size = 1000000000000, but it must be an integer from 1 to …",
        arrange=config_json(vocab_size=10**12),
    ),
    describing(
        name="config.json with a text for a number",
        message="error: …config.json: No model here matches the Hugging Face config: it has hidden_size = '64', but it must be an integer from 1 to …",
        arrange=config_json(hidden_size="64"),
    ),
    describing(
        name="config.json with nan",
        message="error: …config.json: No model here matches the Hugging Face config: it has rms_norm_eps = nan, but it must be a number, not negative and below 1e12",
        arrange=config_json(rms_norm_eps=float("nan")),
    ),
    # Conversions
    converting(
        name="conversion over a checkpoint",
        message="error: …given holds files already (.metadata, .sha256sums, __0_0.distcp, run.json); give another folder, or --overwrite to replace the weights in it",
        cause="The folder to write to holds a checkpoint, with its optimizer state.",
        remedy="Give another folder, or --overwrite.",
        arrange=convert("hf", "given"),
        module=FROM_HF,
    ),
    converting(
        name="conversion from Hugging Face files into their own folder",
        message="error: …hf cannot be written while …hf is read, because one is in the other; give another folder to write to",
        cause="Both folders are the same, or one lies in the other.",
        remedy="Give another folder to write to.",
        arrange=convert("hf", "hf"),
        module=FROM_HF,
    ),
    converting(
        name="conversion of a checkpoint into its own folder",
        message="error: …given… cannot be written while …given is read, because one is in the other; give another folder to write to",
        cause="Both folders are the same, or one lies in the other.",
        remedy="Give another folder to write to.",
        arrange=convert("given", "given/../given/hf"),
        module=TO_HF,
    ),
    converting(
        name="conversion of another model",
        message="error: The checkpoint …hf does not fit llama3 debugmodel, the model of the config (…",
        cause="--model_name and --model_flavor are not those of the files.",
        remedy="Give the name and flavor of the files, or --hf_config.",
        arrange=convert("hf", "new"),
        module=FROM_HF,
    ),
    converting(
        name="conversion of a folder without a checkpoint",
        message="error: …hf is not the folder of a finished checkpoint",
        cause="The path is wrong; it must be a step folder of a run.",
        remedy="Give <dump_folder>/checkpoint/step-<N>.",
        arrange=convert("hf", "new"),
        module=TO_HF,
    ),
]
