"""Weights in Hugging Face's format."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.checkpoint.runs import (
    Net,
    NetAdapter,
    Run,
    assert_same,
    assert_same_weights,
    resumed,
)


def write_index(folder: Path, **shards: str) -> str:
    for i in range(2):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        shards |= {f"model.{i}.weight": file, f"model.{i}.bias": file}
    folder.mkdir(parents=True)
    index = json.dumps({"weight_map": shards})
    (folder / "model.safetensors.index.json").write_text(index)
    return str(folder)


def test_hf_files_that_others_wrote_load_from_the_assets_folder(tmp_path):
    source, assets = Run(tmp_path), write_index(tmp_path / "assets")
    tensors = NetAdapter(None, None).to_hf(source.model.state_dict())
    tensors["model.0.inv_freq"] = torch.ones(2)
    save_file(tensors, f"{assets}/model-00001-of-00002.safetensors")
    run = resumed(tmp_path, adapter=NetAdapter(None, assets), initial_load_in_hf=True, seed=1)
    assert_same_weights(run, source)


def test_hf_tensor_in_two_files_or_with_a_part_missing_is_named(tmp_path):
    tensors, name = NetAdapter(None, None).to_hf(Net().state_dict()), "model.0.weight"
    half = {name: tensors.pop(name)[2:]}
    save_file(tensors, tmp_path / "model-00001-of-00002.safetensors")
    config = dict(initial_load_in_hf=True, initial_load_path=str(tmp_path))
    run = Run(tmp_path, adapter=NetAdapter(None, None), **config)
    before = run.everything()
    # The metadata of torch's distributed writer: this part is rows 2 and 3 of 4.
    where = json.dumps({name: {"saved_offsets": [2, 0]}})
    second = tmp_path / "model-00002-of-00002.safetensors"
    save_file(half, second, {"DCP_SHARDING_INFO": where})
    with pytest.raises(ValueError, match="its 1 chunks of model.0.weight do not cover"):
        run.manager.load()
    save_file(half | {"model.1.bias": torch.ones(4)}, second)
    with pytest.raises(ValueError, match="has model.1.bias twice, in .*00001-of.* and in .*00002-"):
        run.manager.load()
    assert_same(before, run.everything())


@pytest.mark.parametrize("in_bucket", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_hf_export_in_own_folder_continues_with_its_weights(
    tmp_path, caplog, monkeypatch, in_bucket
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = {"folder": f"file://{tmp_path}/bucket"} if in_bucket else {}
    run = Run(tmp_path / "a", adapter=NetAdapter(None, None), last_save_in_hf=True, **config)
    run.train_and_save(1)
    run.train()
    run.manager.save(2, last_step=True)
    run.manager.close()
    if in_bucket:
        shutil.rmtree(tmp_path / "a")
    other = Run(tmp_path / "a", adapter=NetAdapter(None, None), seed=1, **config)
    assert other.manager.newest_step() == 2
    assert other.manager.holds_weights_only(2) and not other.manager.holds_weights_only(1)
    assert other.manager.load()
    assert other.counter.step == 0 and "Hugging Face format" in caplog.text
    assert_same_weights(run, other)


@pytest.mark.filterwarnings("ignore")
def test_tensor_that_the_index_does_not_list_is_exported_all_the_same(tmp_path):
    adapter = NetAdapter(None, write_index(tmp_path / "assets"))
    run = Run(tmp_path, model=Net(layers=3), adapter=adapter, last_save_in_hf=True)
    run.manager.save(1, last_step=True)
    index = tmp_path / "checkpoint" / "step-1" / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    assert weight_map["model.2.weight"] == weight_map["model.1.bias"] != weight_map["model.0.bias"]
    assert Run(tmp_path, model=Net(layers=3), adapter=adapter, seed=1).manager.load()


def test_index_with_a_file_whose_name_has_no_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match="number in the shard's name, got 'last.safetensors'"):
        NetAdapter(None, write_index(tmp_path / "odd", other="last.safetensors"))
