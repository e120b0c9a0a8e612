"""A job of a user: from a wheel, in an empty folder, by the command `torchtitan` only.

tests/reference compares other jobs with other programs: LoRA with PEFT, preferences with TRL, text by
tokens, exports and generation with transformers (test_commands).
"""

import json
import re

import pytest

from tests.distillation_jobs import make_folders
from tests.reference.test_distillation_transformers import CHAT_TEMPLATE
from tests.reliability.wheel import run

pytest.importorskip("transformers")
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
    lines = (folder / "outputs/metrics.jsonl").read_text().splitlines()
    assert sum("rl/reward/brief" in json.loads(line) for line in lines) == 5
    command("report", "outputs")
    page = (folder / "outputs/report.html").read_text()
    assert '<span class="state good">ended</span>' in page
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1)
    assert "rl/reward/brief" in data and "rl/reward/right" in data
    command("compare", "outputs", "--tolerance", "1e-5")
