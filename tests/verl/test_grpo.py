"""RL by verl's own `main_ppo`, with Ray, on the CPU: engine, rollout and weight sync together."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from verl_on_cpu.sampler import Sampler

from examples.verl.toy import make_toy
from tests.verl import cases

ROOT = Path(__file__).resolve().parents[2]
# Three steps.
TWO_PROCESSES = (
    "trainer.n_gpus_per_node=2",
    "ray_kwargs.ray_init.num_gpus=2",
    "trainer.total_training_steps=3",
)
METRICS = {
    "score": "critic/score/mean",
    "norm": "actor/grad_norm",
    "difference": "training/rollout_probs_diff_max",
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    make_toy(folder)
    return folder


def run(folder, tmp_path, *settings, metrics=METRICS):
    """name -> the metric's values, step by step."""
    command = ["bash", ROOT / "examples/verl/grpo.sh", folder]
    command += [f"trainer.default_local_dir={tmp_path}/checkpoints", *settings]
    with open(tmp_path / "log", "w+") as log:
        process = subprocess.Popen(
            command,
            env=os.environ
            | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"},
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        process.wait()
        log.seek(0)
        output = log.read()
    assert process.returncode == 0, output[-5000:]
    steps = re.findall(r"step:\d+ - .*", output)
    return {
        name: [float(re.search(rf"{key}:([-\d.e+]+)", step)[1]) for step in steps]
        for name, key in metrics.items()
    }


@pytest.mark.slow
def test_reward_rises_and_rollout_and_trainer_agree(toy, tmp_path):
    metrics = run(toy, tmp_path)
    scores = metrics["score"]
    assert len(scores) == 20
    assert sum(scores[-3:]) > 3 * sum(scores[:3]), scores
    # If the rollout had kept old weights, the difference would be as large as the steps.
    assert max(metrics["difference"]) < 1e-6


@pytest.mark.slow
def test_two_training_processes_share_the_policy(toy, tmp_path):
    fsdp = "actor_rollout_ref.actor.torchtitan.data_parallel_shard_size=2"
    metrics = run(toy, tmp_path, *TWO_PROCESSES, fsdp)
    assert len(metrics["score"]) == 3
    assert all(0 < norm < 10 for norm in metrics["norm"])
    assert max(metrics["difference"]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "tp", "pp"])
def test_adapters_learn_with_their_base_as_the_reference(toy, tmp_path, layout):
    model, actor = "actor_rollout_ref.model", "actor_rollout_ref.actor"
    ((size, degree),) = cases.LAYOUTS[layout].items()
    settings = (
        f"{model}.lora_rank=8",
        f"{model}.lora.merge=true",
        f"{actor}.torchtitan.{size}={degree}",
        f"{actor}.use_kl_loss=true",
    )
    metrics = run(
        toy, tmp_path, *TWO_PROCESSES, *settings, metrics=METRICS | {"kl": "actor/kl_loss"}
    )
    assert all(0 < norm < 10 for norm in metrics["norm"])
    assert metrics["kl"][0] == pytest.approx(0, abs=1e-6) and metrics["kl"][-1] > 0
    assert max(metrics["difference"]) < 1e-6


@pytest.mark.slow
def test_critic_learns_beside_the_policy_in_two_processes(toy, tmp_path):
    names = {"loss": "critic/vf_loss", "critic_norm": "critic/grad_norm"}
    tp = "torchtitan.tensor_parallel_size=2"
    settings = "algorithm.adv_estimator=gae", f"actor_rollout_ref.actor.{tp}", f"critic.{tp}"
    metrics = run(toy, tmp_path, *TWO_PROCESSES, *settings, metrics=METRICS | names)
    assert len(metrics["loss"]) == 3
    assert all(0 < norm < 10 for norm in metrics["norm"] + metrics["critic_norm"])
    assert max(metrics["difference"]) < 1e-6


def test_log_probs_of_answers_are_those_of_the_trainer(tmp_path, monkeypatch):
    """Compared token by token, in nats, after steps whose weights the rollout got."""
    cases.pretend_torchrun(monkeypatch)
    folder, temperature = cases.save_model(str(tmp_path), "qwen3"), 0.8
    worker = cases.make_worker(folder)
    cases.train(worker, "sft")
    sampler = Sampler(folder, max_len=64)
    prompts = torch.randint(1, cases.VOCAB, (64, 16)).tolist()

    async def draw():
        await sampler.load_weights(worker.engine.get_per_tensor_param()[0])
        return await asyncio.gather(
            *(sampler.draw(prompt, 24, {"temperature": temperature}) for prompt in prompts)
        )

    answers = asyncio.run(draw())
    samples = [
        torch.tensor([*prompt, *answer.token_ids])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    data = cases.batch_of_samples(samples, temperature=temperature)
    scores = cases.score(worker, data)["log_probs"]
    differences = torch.cat(
        [
            (score[15:-1] - torch.tensor(answer.token_logprobs)).abs()
            for score, answer in zip(scores, answers, strict=True)
        ]
    )
    print(f"{len(differences)} tokens: {differences.max():.1e} at most, {differences.mean():.1e}")
    assert differences.max() < 5e-6 and differences.mean() < 5e-7
