"""RL by verl's own `main_ppo`, with Ray, on the CPU: engine, rollout and weight sync together."""

import asyncio
import os
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


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    make_toy(folder)
    return folder


def run(folder, tmp_path, *settings):
    """name -> the metric's values, step by step; the rollout must have had the trainer's weights."""
    command = ["bash", ROOT / "examples/verl/grpo.sh", folder]
    command += [f"trainer.default_local_dir={tmp_path}/checkpoints", *settings]
    variables = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"}
    with open(tmp_path / "log", "w") as log:
        options = dict(stdout=log, stderr=log, cwd=tmp_path, env=os.environ | variables)
        returncode = subprocess.call(command, **options)
    output = (tmp_path / "log").read_text()
    assert returncode == 0, output[-5000:]
    steps = list(cases.logged_steps(output).values())
    names = set(steps[0]).intersection(*steps)
    metrics = {name: [step[name] for step in steps] for name in names}
    # If the rollout had kept old weights, the difference would be as large as the steps.
    assert max(metrics["training/rollout_probs_diff_max"]) < 1e-6
    return metrics


@pytest.mark.slow
def test_reward_rises_and_rollout_and_trainer_agree(toy, tmp_path):
    scores = run(toy, tmp_path)["critic/score/mean"]
    assert len(scores) == 20
    assert sum(scores[-3:]) > 3 * sum(scores[:3]), scores


ACTOR, TP = "actor_rollout_ref.actor", "torchtitan.tensor_parallel_size=2"
CRITIC = ["algorithm.adv_estimator=gae", f"{ACTOR}.{TP}", f"critic.{TP}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [[f"{ACTOR}.torchtitan.data_parallel_shard_size=2"], CRITIC], ids=["fsdp", "critic"]
)
def test_two_training_processes_share_the_policy(settings, toy, tmp_path):
    metrics = run(toy, tmp_path, *TWO_PROCESSES, *settings)
    norms = [metrics["actor/grad_norm"]]
    norms += [metrics["critic/grad_norm"]] if settings is CRITIC else []
    for of_steps in norms:
        assert len(of_steps) == 3 and all(0 < norm < 10 for norm in of_steps)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "tp", "pp"])
def test_adapters_learn_with_their_base_as_the_reference(toy, tmp_path, layout):
    ((size, degree),) = cases.LAYOUTS[layout].items()
    model = [f"actor_rollout_ref.model.{x}" for x in ("lora_rank=8", "lora.merge=true")]
    own = [f"{ACTOR}.torchtitan.{size}={degree}", f"{ACTOR}.use_kl_loss=true"]
    metrics = run(toy, tmp_path, *TWO_PROCESSES, *model, *own)
    assert all(0 < norm < 10 for norm in metrics["actor/grad_norm"])
    kl = metrics["actor/kl_loss"]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 0


def test_log_probs_of_answers_are_those_of_the_trainer(tmp_path, alone):
    """Compared token by token, in nats, after steps whose weights the rollout got."""
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
    pairs = zip(prompts, answers, strict=True)
    samples = [torch.tensor([*prompt, *answer.token_ids]) for prompt, answer in pairs]
    data = cases.batch_of_samples(samples, temperature=temperature)
    scores = torch.cat([score[15:-1] for score in cases.score(worker, data)["log_probs"]])
    differences = (scores - torch.tensor([x for y in answers for x in y.token_logprobs])).abs()
    print(f"{len(differences)} tokens: {differences.max():.1e} at most, {differences.mean():.1e}")
    assert differences.max() < 5e-6 and differences.mean() < 5e-7
