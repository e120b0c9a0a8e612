"""RL with a real vLLM on the CPU, in the ranks' processes and as a server. See scripts/run_vllm_tests.sh."""

import dataclasses
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.distributed.rl_runs import LAYOUTS, numbers, run_on_this_rank
from tests.distributed.test_rl_roles import run_roles
from tests.reliability.jobs import flags_in
from tests.tiny_hf import tiny_hf_model
from tests.unit.rl.test_dialogues import GUESS, STOPS
from tests.unit.rl.toy import toy_config
from tests.vllm.server import make_folder, vllm_server
from torchtitan.engine import TrainingEngine
from torchtitan.rl.controller import Controller
from torchtitan.rl.generator import build_generator
from torchtitan.rl.types import SamplingConfig
from torchtitan.rl.weight_sync import push_weights
from torchtitan.testing.gloo import run_ranks

if importlib.util.find_spec("vllm") is None:  # slow to import, and its ranks are other processes
    pytest.skip("needs vLLM", allow_module_level=True)

LORA = flags_in("model.converters=lora lora.rank=4 optimizer.lr=0.05 rl.generator.adapters")
STEPS = ["--training.steps=4", "--rl.sampling.temperature=0.9", "--rl.eval_samples=4"]
# Both sides use fp32 and sum in different orders. The largest difference in 120 steps of
# copy_cpu.toml was 5.3e-6.
CLOSE = 2e-5
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("toy"))


# ---- in the ranks' processes ----


def run_eagerly(*arguments):
    """Like `run_on_this_rank`, but without compiling, which takes a minute."""
    import vllm

    vllm.LLM = functools.partial(vllm.LLM, enforce_eager=True)
    return run_on_this_rank(*arguments)


def flags_in_process(folder):
    backend = ["--rl.generator.backend=vllm", "--rl.generator.memory_share=0.1"]
    return [*STEPS, f"--model.hf_assets_path={folder}", *backend]


def run_in_process(folder, tmp_path, n_ranks, *flags):
    arguments = (tmp_path / f"{n_ranks}", [*flags_in_process(folder), *flags])
    return run_ranks(run_eagerly, n_ranks, *arguments, timeout_seconds=900)


@pytest.fixture(scope="module")
def one_process(folder, tmp_path_factory):
    (run,) = run_in_process(folder, tmp_path_factory.mktemp("one"), 1)
    return run


def test_trainer_scores_what_vllm_drew_as_vllm_did(one_process):
    """vLLM has the weights of each step, and its log-probs are of the distribution that it draws from."""
    assert len(one_process["steps"]) == 4
    assert len({step["rl/reward"] for step in one_process["steps"]}) > 1
    for step in one_process["steps"]:
        assert 0 < step["loss/logprob_diff_max"] <= CLOSE


@pytest.mark.parametrize(
    "flags",
    [LAYOUTS["FSDP"], [*LAYOUTS["FSDP"], "--rl.generator.tensor_parallel_degree=2"]],
    ids=["an engine on each rank", "an engine split by two ranks"],
)
def test_engines_of_two_ranks_draw_what_one_does(flags, folder, one_process, tmp_path):
    first, second = run_in_process(folder, tmp_path, 2, *flags)
    assert numbers(first) == numbers(second)
    for step, expected in zip(first["steps"], one_process["steps"], strict=True):
        assert step["rl/reward"] == expected["rl/reward"]
        assert step["loss/logprob_diff_max"] <= CLOSE


def test_engines_of_two_ranks_get_adapters_alone(folder, tmp_path):
    base = [f"--checkpoint.initial_load_path={folder}", "--checkpoint.initial_load_in_hf"]
    flags = [*base, "--checkpoint.enable", *LAYOUTS["FSDP"], *LORA]
    first, second = run_in_process(folder, tmp_path, 2, *flags)
    assert numbers(first) == numbers(second)
    for step in first["steps"]:
        assert 0 < step["loss/logprob_diff_max"] <= CLOSE


def run_with_experts(tmp_path, flags):
    """The metrics of every step of a run whose vLLM records experts.

    vLLM does so in its second model runner, and runs its kernels on a CPU by a Triton with a CPU
    backend, which PyPI's lacks. Triton's interpreter stands in, in a process that begins with it.
    """
    code = (
        "import json; from types import SimpleNamespace; from triton.backends import backends\n"
        "backends['cpu'] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))\n"
        "from tests.vllm.test_vllm import run_eagerly\n"
        f"print(json.dumps(run_eagerly({str(tmp_path)!r}, {flags!r})['steps']))"
    )
    variables = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    arguments = dict(env=os.environ | variables, timeout=900, check=True)
    found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, **arguments)
    return json.loads(found.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A Qwen3 with experts that matter, as this package exports it."""
    folder = tmp_path_factory.mktemp("mixture")
    sizes = dict(vocab_size=32, hidden_size=64, head_dim=32)  # vLLM's heads have at least 32
    tiny_hf_model("qwen3_moe", **sizes).save_pretrained(folder / "theirs")
    config = toy_config(folder)
    shutil.copytree(config.model.hf_assets_path, folder / "ours")
    engine = TrainingEngine.from_hf(folder / "theirs", config)
    engine.save_hf(folder / "ours")
    engine.close()
    return folder / "ours"


@pytest.mark.parametrize("replays", [False, True], ids=["own choice", "replay"])
def test_trainer_with_vllms_experts_scores_what_vllm_drew_as_vllm_did(replays, mixture, tmp_path):
    """Without replay vLLM chooses other experts from step 2 on: `expert_bias` has no Hugging Face name."""
    flags = ["--model.name=qwen3", f"--model.hf_config={mixture}"]
    flags += ["--checkpoint.enable", f"--checkpoint.initial_load_path={mixture}"]
    flags += ["--checkpoint.initial_load_in_hf", *flags_in_process(mixture)]
    if replays:
        steps = run_with_experts(tmp_path, [*flags, "--rl.generator.replay_experts"])
    else:
        (run,) = run_ranks(run_eagerly, 1, tmp_path, flags, timeout_seconds=900)
        steps = run["steps"]
    first, *later = [step["loss/logprob_diff_max"] for step in steps]
    print(first, later)
    assert 0 < first <= CLOSE
    assert len(later) == 3 and all((difference <= CLOSE) == replays for difference in later)


# ---- as a server ----


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """Flags for a server of the toy policy."""
    with vllm_server(folder, tmp_path_factory.mktemp("server") / "log") as url:
        flags = [f"--model.hf_assets_path={folder}", "--rl.generator.backend=openai"]
        yield [*STEPS, *flags, f"--rl.generator.url={url}", "--rl.generator.model=toy"]


def train_three_steps(config):
    """In each step the trainer scores what the server drew as the server did."""
    controller = Controller(config)
    controller.setup()
    for _ in range(3):
        assert 0 < controller.train_step()["loss/logprob_diff_max"] <= CLOSE
    controller.close()


def test_server_gets_adapters_alone(folder, server, tmp_path):
    """First, because later tests change the base that the server has."""
    base = [f"--checkpoint.initial_load_path={folder}", "--checkpoint.initial_load_in_hf"]
    flags = [*base, "--checkpoint.enable", *LORA]
    train_three_steps(toy_config(tmp_path, *server, *flags))


def test_weights_come_to_the_server_without_files(server, tmp_path):
    flags = [*server, "--rl.generator.weight_transfer=gloo"]
    url = next(flag.partition("=")[2] for flag in server if "generator.url" in flag)
    # A trainer that starts again makes a lane of its own. In the last run few numbers change.
    delta = ["--rl.weight_sync.delta"]
    for run, more in (("first", ["0.05"]), ("again", ["0.05", *delta]), ("few", ["1e-10", *delta])):
        train_three_steps(toy_config(tmp_path / run, *flags, "--optimizer.lr", *more))
        assert not (tmp_path / run / "generator_weights").exists()
        with urllib.request.urlopen(f"{url}/weight_info") as answer:
            assert json.load(answer) == {"weight_version": "3"}


@pytest.mark.parametrize("extra", [[], [*GUESS, *STOPS]], ids=["one turn", "several"])
def test_trainer_scores_what_the_server_drew_as_the_server_did(extra, server, tmp_path):
    train_three_steps(toy_config(tmp_path, *server, *extra))
    (left,) = Path(tmp_path / "generator_weights").iterdir()
    assert left.name == "version-3"


def test_server_stops_where_it_is_asked_to_and_repeats_itself(server, tmp_path):
    engine = TrainingEngine(config := toy_config(tmp_path, *server))
    generator = build_generator(config, engine)
    push_weights(engine, generator)
    free = generator.generate(PROMPTS, sampling := SamplingConfig(max_tokens=8, seed=3), 2)
    assert free == generator.generate(PROMPTS, sampling, 2)
    assert {(len(c.token_ids), c.finish_reason) for c in free} == {(8, "length")}
    stop = free[0].token_ids[3]
    with_stop = dataclasses.replace(sampling, stop_token_ids=(stop,))
    stopped = generator.generate(PROMPTS, with_stop, 2)
    for one, whole in zip(stopped, free, strict=True):
        n = (*whole.token_ids, stop).index(stop) + 1
        assert one.token_ids == whole.token_ids[:n]
        assert one.finish_reason == ("stop" if n <= 8 else "length")
    greedy = generator.generate(PROMPTS, SamplingConfig(max_tokens=8, temperature=0.0))
    assert all(c.token_logprobs == (0.0,) * 8 for c in greedy)
    engine.close()


def test_server_serves_a_rank_that_only_generates(server, tmp_path):
    flags = [*server, "--rl.generator.ranks=1", "--rl.async_steps=1"]
    first, *_ = run_roles(tmp_path, 2, *flags)
    assert [step["rl/lag"] for step in first["steps"]] == [0, 1, 1, 1]
    assert all(step["loss/logprob_diff_mean"] > 1e-4 for step in first["steps"][1:])
