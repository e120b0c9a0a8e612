"""Converting weights there and back."""

import dataclasses
import json
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from scripts.checkpoint_conversion import convert_from_hf as convert_from_hf_script
from scripts.checkpoint_conversion import convert_to_hf as convert_to_hf_script
from scripts.checkpoint_conversion.convert_from_hf import convert_from_hf
from scripts.checkpoint_conversion.convert_to_hf import convert_to_hf
from tests.tiny_hf import tiny_hf_config
from torchtitan.checkpoint import hf
from torchtitan.checkpoint.conversion import (
    load_weights,
    prepare_conversion,
    replacing,
    zero_weights,
)
from torchtitan.checkpoint.folder import find_damage, mark_unfinished
from torchtitan.protocols.train_spec import get_train_spec

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.long]
MODEL = ("llama3", "debugmodel")


@pytest.fixture(scope="module")
def hf_weights():
    spec = get_train_spec(MODEL[0])
    args = spec.model_args[MODEL[1]]
    weights = zero_weights(spec.model_cls, args)
    torch.manual_seed(0)
    random = {name: torch.randn_like(tensor) for name, tensor in weights.items()}
    return {k: t.contiguous() for k, t in spec.state_dict_adapter(args, None).to_hf(random).items()}


@pytest.fixture
def hf_folder(tmp_path, hf_weights):
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file(hf_weights, folder / "model.safetensors")
    return folder


def test_there_and_back_is_bit_for_bit_the_same(tmp_path, hf_folder, hf_weights):
    names = list(hf_weights)
    files = [f"model-0000{1 + 2 * i // len(names)}-of-00002.safetensors" for i in range(len(names))]
    shards = dict(zip(names, files, strict=True))
    convert_from_hf(str(hf_folder), str(tmp_path / "dcp"), *MODEL)
    (hf_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for dtype in ("bfloat16", "float32"):
        folder = str(tmp_path / dtype)
        convert_to_hf(str(tmp_path / "dcp"), folder, *MODEL, str(hf_folder), dtype)
    written = json.loads((tmp_path / "float32" / "model.safetensors.index.json").read_text())
    assert written["weight_map"] == shards
    for dtype in (torch.bfloat16, torch.float32):
        back = {}
        for file in (tmp_path / str(dtype).removeprefix("torch.")).glob("*.safetensors"):
            back |= load_file(file)
        assert back.keys() == hf_weights.keys()
        assert all(torch.equal(back[name], hf_weights[name].to(dtype)) for name in names)


def test_without_an_index_files_are_divided_by_size(tmp_path, hf_folder, hf_weights, monkeypatch):
    largest = max(tensor.nbytes for tensor in hf_weights.values())
    monkeypatch.setattr(hf, "_BYTES_PER_FILE", 2 * largest)
    convert_from_hf(str(hf_folder), str(tmp_path / "dcp"), *MODEL)
    back = tmp_path / "back"
    convert_to_hf(str(tmp_path / "dcp"), str(back), *MODEL, None, "float32")
    assert find_damage(str(back)) is None
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in hf_weights.values())
    for file in back.glob("*.safetensors"):  # as safetensors aligns its own files
        assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0
    files = {file.name: load_file(file) for file in back.glob("*.safetensors")}
    assert len(files) > 2 and set(files) == set(index["weight_map"].values())
    for name, tensor in hf_weights.items():
        assert torch.equal(files[index["weight_map"][name]].pop(name), tensor)
    assert not any(files.values())
    assert not (back / "sharded").exists()


@pytest.mark.parametrize("largest_part", [1, 2**40])
def test_config_stands_for_name_and_flavor(tmp_path, monkeypatch, largest_part):
    monkeypatch.setattr(hf, "_BYTES_PER_PART", largest_part)
    config = tmp_path / "hf" / "config.json"
    tiny_hf_config("qwen3_moe", num_experts=3).save_pretrained(config.parent)
    weights, adapter, _ = prepare_conversion("", "", hf_config=str(config))
    shapes = adapter.to_hf(weights)
    files = {name: torch.randn(shapes[name].shape) for name in shapes}
    assert "model.layers.1.mlp.experts.2.up_proj.weight" in files
    save_file(files, config.parent / "model.safetensors")
    dcp_folder, back = tmp_path / "dcp", tmp_path / "back"
    convert_from_hf(str(config.parent), str(dcp_folder), "", "", hf_config=str(config))
    convert_to_hf(str(dcp_folder), str(back), "", "", None, "float32", hf_config=str(config))
    (file,) = back.glob("*.safetensors")
    written = load_file(file)
    assert written.keys() == files.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in files.items())


def test_mistakes_are_named(tmp_path, hf_folder):
    out = str(tmp_path / "out")
    with pytest.raises(ValueError, match="llama3 has no flavor '9B'; it has debugmodel"):
        convert_from_hf(str(hf_folder), out, "llama3", "9B")
    with pytest.raises(ValueError, match="not the folder of a finished checkpoint"):
        convert_to_hf(str(hf_folder), out, *MODEL, None, "float32")
    mark_unfinished(str(tmp_path / "half"))
    with pytest.raises(ValueError, match="half is incomplete"):
        load_weights({}, str(tmp_path / "half"), "llama3")
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "other")
    with pytest.raises(ValueError, match="other does not fit llama3 debugmodel"):
        convert_to_hf(str(tmp_path / "other"), out, *MODEL, None, "float32")


SCRIPTS = {"from": convert_from_hf_script.main, "to": convert_to_hf_script.main}


def convert(direction, source, target, *arguments, limit_bytes=None):
    """The script's error, or None, if the system refuses files larger than the limit."""
    options = [str(source), str(target), "--model_flavor=debugmodel", *arguments]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["convert", *options])
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes or limits[0], limits[1]))
            SCRIPTS[direction]()
        except SystemExit as stopped:
            return stopped.code
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def contents(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.fixture
def folders(tmp_path, hf_folder):
    """Direction -> (source, an existing whole target)."""
    convert_from_hf(str(hf_folder), str(tmp_path / "dcp"), *MODEL)
    shutil.copytree(hf_folder, tmp_path / "old_hf")
    shutil.copytree(tmp_path / "dcp", tmp_path / "old_dcp")
    return {
        "from": (hf_folder, tmp_path / "old_dcp"),
        "to": (tmp_path / "dcp", tmp_path / "old_hf"),
    }


@pytest.mark.parametrize("direction", SCRIPTS)
def test_what_stands_there_is_replaced_only_when_asked_and_other_files_are_kept(folders, direction):
    source, target = folders[direction]
    (target / "notes.txt").write_text("mine")
    template = target / "additional_chat_templates/tool_use.jinja"
    template.parent.mkdir()
    template.write_text("of an export")
    (target / "model-00007-of-00009.safetensors").write_text("of another export")
    before = contents(target)
    said = convert(direction, source, target)
    assert "holds files already" in said and "--overwrite" in said
    assert contents(target) == before
    assert convert(direction, source, target, "--overwrite") is None
    assert (target / "notes.txt").read_text() == "mine" and template.read_text() == "of an export"
    assert not (target / "model-00007-of-00009.safetensors").exists()
    assert find_damage(str(target)) is None
    assert {path.name for path in target.parent.iterdir()} == {"hf", "dcp", "old_hf", "old_dcp"}


@pytest.mark.parametrize("direction", SCRIPTS)
@pytest.mark.parametrize("target", ["../link", "../{}", "new", ".."])
def test_source_is_never_written_to(folders, tmp_path, direction, target):
    source = folders[direction][0]
    before = contents(source)
    (tmp_path / "link").symlink_to(source)
    said = convert(direction, source, source / target.format(source.name), "--overwrite")
    assert "one is inside the other" in said
    assert contents(source) == before


@pytest.mark.parametrize("direction", SCRIPTS)
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("has_all_but_the_end", [True, False])
def test_write_that_fails_leaves_everything_as_it_was(
    folders, tmp_path, direction, there, has_all_but_the_end
):
    source, target = folders[direction]
    limit = 100 * 1024
    if has_all_but_the_end:
        limit = max(path.stat().st_size for path in target.iterdir()) - 1
    target = target if there else tmp_path / "new"
    before = contents(target) if there else None
    others = {path.name for path in tmp_path.iterdir()}
    said = convert(direction, source, target, "--overwrite", limit_bytes=limit)
    assert f"{target} could not be written" in said and "too large" in said
    assert before is None or contents(target) == before
    assert {path.name for path in tmp_path.iterdir()} == others


def test_folder_of_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "home" / "letters").mkdir(parents=True)
    (tmp_path / "file").touch()
    for name, message in (
        ("home", r"holds folders \(letters\)"),
        ("file", "file is a file; give a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            with replacing(str(tmp_path / name), True, []):
                raise AssertionError("writing has begun")


def test_kill_while_writing_leaves_the_old_target(folders, tmp_path):
    source, target = folders["from"]
    before = contents(target)
    with pytest.raises(KeyboardInterrupt), replacing(str(target), True, [str(source)]) as new:
        (Path(new) / "half").touch()
        raise KeyboardInterrupt
    assert contents(target) == before and not Path(new).exists()


def test_model_that_no_machine_has_memory_for_is_refused():
    spec = get_train_spec("llama3")
    args = dataclasses.replace(spec.model_args["debugmodel"], dim=2**22, n_layers=1, vocab_size=10)
    with pytest.raises(ValueError, match="GiB in fp32, and this machine has"):
        zero_weights(spec.model_cls, args)
