"""Three steps of verl's losses: our engine in each layout against plain transformers."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.verl import cases

FAMILIES, KINDS = ["qwen3", "llama3"], ["sft", "ppo", "value"]
LAYOUTS = cases.LAYOUTS | {"ep": {"data_parallel_shard_size": 2, "expert_parallel_size": 2}}


def records_of(folders, layouts):
    """(family, kind, layout) -> record, on one rank."""
    records = {}
    for (family, kind), folder in folders.items():
        model_type = "value_model" if kind == "value" else "language_model"
        for layout in layouts:
            worker = cases.make_worker(folder, model_type, **LAYOUTS[layout])
            records[family, kind, layout] = cases.train(worker, kind)
    return records


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(family, kind) -> folder."""
    folder = str(tmp_path_factory.mktemp("models"))
    return {
        (family, kind): cases.save_model(folder, family, is_critic=kind == "value")
        for family in FAMILIES
        for kind in KINDS
    }


@pytest.fixture(scope="module")
def references(folders):
    return {case: cases.reference(folder, case[1]) for case, folder in folders.items()}


def merged(ranks, case):
    """Join the ranks' records of a case; each data-parallel share of the outputs comes once, in order."""
    records = [records[case] for records in ranks]
    (first, *_) = [record for record in records if record.losses]
    shares = [record.outputs for record in records if record.outputs]
    assert len(shares) == (2 if case[-1] in ("fsdp", "ep") else 1)
    outputs = {name: [x for share in shares for x in share[name]] for name in first.outputs}
    return cases.Record(first.losses, first.norms, outputs)


def test_one_process_trains_as_transformers_does(folders, references):
    ranks = cases.on_ranks(1, records_of, folders, ["one"])
    for case in ranks[0]:
        cases.assert_same_run(merged(ranks, case), references[case[:2]])


@pytest.fixture(scope="module")
def on_two_ranks(folders):
    return cases.on_ranks(2, records_of, folders, ["fsdp", "tp", "pp", "cp"])


@pytest.mark.parametrize("layout", ["fsdp", "tp", "pp", "cp"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_train_as_transformers_does(on_two_ranks, references, family, kind, layout):
    record = merged(on_two_ranks, (family, kind, layout))
    cases.assert_same_run(record, references[family, kind])


@pytest.mark.parametrize(
    ("family", "changes", "kinds", "layouts"),
    [
        ("qwen3", {"tie_word_embeddings": True}, ["sft", "ppo"], {2: ["fsdp", "pp"]}),
        ("qwen3_moe", {}, ["sft", "ppo"], {1: ["one"], 2: ["ep"]}),
        ("qwen3_5", {}, ["ppo"], {2: ["fsdp", "pp"]}),
    ],
    ids=["tied embeddings", "mixture of experts", "linear attention"],
)
def test_other_models_train_as_in_transformers(family, changes, kinds, layouts, tmp_path):
    folder = cases.save_model(str(tmp_path), family, **changes)
    expected = {kind: cases.reference(folder, kind) for kind in kinds}
    for n_ranks, own in layouts.items():
        ranks = cases.on_ranks(n_ranks, records_of, {(family, kind): folder for kind in kinds}, own)
        for case in ranks[0]:
            cases.assert_same_run(merged(ranks, case), expected[case[1]])


def test_text_model_of_a_multimodal_folder_trains_and_keeps_its_names(tmp_path, alone):
    plain = cases.save_model(str(tmp_path), "qwen3_5")
    tensors = load_file(f"{plain}/model.safetensors")
    config = json.loads(Path(plain, "config.json").read_text())
    nested = {re.sub(r"^model\.", "model.language_model.", k): v for k, v in tensors.items()}
    (folder := tmp_path / "multimodal").mkdir()
    file = "model-00001-of-00001.safetensors"
    files = nested | {"model.visual.x.weight": torch.ones(3)}
    save_file(files, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(files, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    vision = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32)
    outer = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    outer |= {"text_config": config, "vision_config": vision, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(outer))

    worker = cases.make_worker(str(folder))
    cases.assert_same_run(cases.train(worker, "ppo"), cases.reference(plain, "ppo"))
    pushed, _ = worker.engine.get_per_tensor_param()
    assert {name for name, _ in pushed} == nested.keys()  # vLLM's names for such a folder
    worker.engine.engine.save_hf(tmp_path / "export")
    exported = {}
    for path in (tmp_path / "export").glob("*.safetensors"):
        exported |= load_file(path)
    assert exported.keys() == files.keys()
    assert torch.equal(exported["model.visual.x.weight"], torch.ones(3))
    worker.engine.engine.close()
