"""Jobs of a user: from a wheel, in an empty folder, by the command `torchtitan` only.

tests/reference compares other jobs with other programs: LoRA with PEFT, preferences with TRL.
"""

import json
import re

import pytest
import torch

from tests.distillation_jobs import make_folders
from tests.reference.test_distillation_transformers import CHAT_TEMPLATE
from tests.reliability.wheel import run

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the user works: folders `student`, with a chat template, and `teacher`; texts and chats."""
    monkeypatch.chdir(tmp_path)
    make_folders(tmp_path)
    (tmp_path / "student/chat_template.jinja").write_text(CHAT_TEMPLATE)
    return tmp_path


@pytest.fixture
def command(folder, installed):
    """command("train", ...) returns what `torchtitan train ...` printed."""
    return lambda *arguments: run(["torchtitan", *arguments], folder, **installed)


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logged(folder, name):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def test_own_text_becomes_a_model_that_transformers_computes_alike(folder, command):
    """The user writes a TOML of 13 lines."""
    job = """\
[model]
hf_config = "student"
hf_assets_path = "student"
[training]
dataset = "tokens"
dataset_path = "tokens"
seq_len = 64
steps = 40
[optimizer]
lr = 1e-2
[checkpoint]
enable = true
initial_load_in_hf = true
"""
    assert len(job.splitlines()) == 13
    (folder / "job.toml").write_text(job)
    command("tokenize", "texts.jsonl", "tokens", "--tokenizer", "student")
    assert "training completed" in command("train", "job.toml")
    losses = logged(folder / "outputs", "loss_metrics/global_avg_loss")
    assert losses[-1] < losses[0] - 1
    command("export", "outputs", "model")
    said = command("compare", "model", "--tolerance", "1e-5")
    assert "same likeliest token                    128 of 128 positions" in said
    prompt = "3 and"
    greedy = ["--max_new_tokens", "12", "--temperature", "0"]
    continued = command("generate", "model", "--prompt", prompt, *greedy)
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    ids = [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False).input_ids]
    expected = load("model").generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0]
    text = tokenizer.decode(expected, skip_special_tokens=True)
    assert continued.startswith(f"weights: model\n{text}")


def test_task_trains_a_policy_and_leaves_a_report(folder, command):
    """The user writes a TOML of 15 lines and a reward function of 4."""
    rewards = """\
def score(completion, answer):
    right = float(answer in completion)
    brief = 20 / (20 + len(completion))
    return {"total": right + brief, "right": right, "brief": brief}
"""
    job = """\
[model]
hf_config = "student"
hf_assets_path = "student"
[training]
steps = 5
seq_len = 64
[checkpoint]
enable = true
initial_load_in_hf = true
[rl.task]
name = "jsonl"
path = "questions.jsonl"
reward_fn = "my_rewards:score"
[metrics]
log_freq = 1
"""
    assert len(rewards.splitlines()) == 4
    (folder / "my_rewards.py").write_text(rewards)
    assert len(job.splitlines()) == 15
    (folder / "job.toml").write_text(job)
    questions = ({"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(20))
    (folder / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    command("rl", "job.toml")
    assert len(logged(folder / "outputs", "rl/reward/brief")) == 5
    command("report", "outputs")
    page = (folder / "outputs/report.html").read_text()
    assert '<span class="state good">ended</span>' in page
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1)
    assert "rl/reward/brief" in data and "rl/reward/right" in data
    command("compare", "outputs", "--tolerance", "1e-5")
