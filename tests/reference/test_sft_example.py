"""The recipe in examples/sft: its chats, its configs, and a few steps of all of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.sft.evaluate import answers
from torchtitan.config import ConfigManager
from torchtitan.job import resolve_job

RECIPE = Path("examples/sft")


@pytest.mark.parametrize("name, world_size", [("gpu", 1), ("node", 8)])
def test_config_for_gpus_is_a_job_that_can_start(name, world_size, tmp_path, monkeypatch):
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(row) + "\n")
    flags = f"""
        job.config_file={RECIPE / name}.toml job.dump_folder={tmp_path} training.dataset_path={data}
        model.hf_assets_path={tmp_path} validation.dataset_path={data}
    """.split()
    config = ConfigManager().parse_args([f"--{flag}" for flag in flags])
    config.checkpoint.initial_load_in_hf = False  # the weights are a download
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    resolve_job(config)


def test_fine_tuning_starts_from_the_base_model():
    base, tuned = (
        ConfigManager().parse_args([f"--job.config_file={RECIPE / name}.toml"])
        for name in ("base", "cpu")
    )
    folder = f"{base.job.dump_folder}/checkpoint/step-{base.training.steps}"
    assert tuned.model.hf_assets_path == tuned.model.hf_config == folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_recipe_runs_on_a_cpu_and_transformers_reads_and_answers_the_same(tmp_path):
    """A few steps of each part; that answers become right is measured in the example's README."""
    transformers = pytest.importorskip("transformers")
    environment = {"PYTHON": sys.executable, "VENV": "none", "OMP_NUM_THREADS": "1"}
    environment |= {"OUT": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment |= {"NUM_TRAIN": "120", "NUM_HELD_OUT": "6", "BASE_STEPS": "2"}
    result = subprocess.run(
        ["bash", RECIPE / "run.sh", "--training.epochs=1"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    assert result.stdout.count(" of 3 exact") == 4  # two tasks, before and after

    data = tmp_path / "seed_0/data"
    (folder,) = (tmp_path / "seed_0/tuned/checkpoint").glob("step-*")
    template = "chat_template.jinja"
    assert (folder / template).read_text() == (data / "model" / template).read_text()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    held_out = [json.loads(line) for line in (data / "held_out.jsonl").read_text().splitlines()]

    texts = answers(str(folder), held_out)
    for chat, text in zip(held_out, texts, strict=True):
        prompt = tokenizer.apply_chat_template(
            chat["messages"][:-1], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        written = model.generate(**prompt, max_new_tokens=64, do_sample=False)
        length = prompt["input_ids"].shape[1]
        assert tokenizer.decode(written[0, length:], skip_special_tokens=True) == text
    assert any(texts)
