"""RL on 2 gloo ranks takes the steps of one process, and goes on after a kill bit for bit."""

import pytest
import torch.distributed as dist

from tests.distributed.rl_runs import (
    LAYOUTS,
    check_that_killed_run_goes_on,
    numbers,
    run_on_this_rank,
)
from tests.unit.rl.toy import toy_config
from torchtitan.rl.controller import Controller
from torchtitan.testing.gloo import run_ranks

GATHERED = {"TP, gathered logits": [*LAYOUTS["TP"], "--parallelism.disable_loss_parallel"]}
IN_CI = {"DDP", "CP"}  # the runs of test_rl_critic.py have the others
STEPS = ["--training.steps=5", "--rl.loss.entropy_coef=0.01", "--optimizer.lr=1e-3"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    (run,) = run_ranks(run_on_this_rank, 1, tmp_path_factory.mktemp("one"), STEPS)
    return run


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in IN_CI)) for n in LAYOUTS | GATHERED],
)
def test_first_steps_are_those_of_one_process(layout, one_process, tmp_path):
    flags = (LAYOUTS | GATHERED)[layout]
    runs = run_ranks(run_on_this_rank, 2, tmp_path, [*STEPS, *flags])
    assert_first_steps_of_one_process(runs, one_process)


LORA = [*STEPS, "--model.converters=lora", "--lora.rank=4", "--rl.loss.kl_coef=0.1"]


@pytest.fixture(scope="module")
def adapters_on_one_process(tmp_path_factory):
    (run,) = run_ranks(run_on_this_rank, 1, tmp_path_factory.mktemp("lora"), LORA)
    return run


@pytest.mark.parametrize(
    "layout", ["TP", *(pytest.param(name, marks=pytest.mark.slow) for name in ("FSDP", "PP", "CP"))]
)
def test_adapters_take_the_first_steps_of_one_process(layout, adapters_on_one_process, tmp_path):
    runs = run_ranks(run_on_this_rank, 2, tmp_path, [*LORA, *LAYOUTS[layout]])
    assert_first_steps_of_one_process(runs, adapters_on_one_process)


def assert_first_steps_of_one_process(runs, one_process):
    assert numbers(runs[0]) == numbers(runs[1]), "every rank reports the numbers of all"
    assert runs[0]["digest"] == runs[1]["digest"]
    for step, expected in zip(runs[0]["steps"], one_process["steps"], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert step["rl/reward"] == expected["rl/reward"], "the same completions were drawn"
        for name in ("policy_loss", "entropy", "ratio_mean", "logprob_diff_max"):
            assert step[f"loss/{name}"] == pytest.approx(expected[f"loss/{name}"], abs=2e-5)


RESUMED = ["--training.steps=8", "--checkpoint.enable", "--checkpoint.interval=4"]
RESUMED += ["--checkpoint.no_last_save_model_only", "--lr_scheduler.warmup_steps=5"]


@pytest.mark.slow
@pytest.mark.parametrize("async_steps", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_run_goes_on_bit_for_bit(world_size, async_steps, tmp_path):
    overrides = [*RESUMED, f"--rl.async_steps={async_steps}"]

    def run(folder, kill=False):
        return run_ranks(run_on_this_rank, world_size, folder, overrides, 6 if kill else None)

    check_that_killed_run_goes_on(run, tmp_path, [5, 6, 7, 8])


# Four updates per batch, prompts drawn again, long completions penalized, buckets, corrections.
SEVERAL_UPDATES = [
    "--rl.epochs=2",
    "--rl.minibatches=2",
    "--rl.redraws=2",
    "--rl.overlong_tokens=2",
]
SEVERAL_UPDATES += ["--rl.batch.bucketing", "--rl.batch.skip_zero_advantage"]
SEVERAL_UPDATES += ["--rl.loss.correction=token", "--rl.loss.max_token_mismatch=5"]
SEVERAL_UPDATES += ["--rl.task.num_letters=2", "--rl.num_samples_per_prompt=2"]


@pytest.mark.parametrize("async_steps", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_several_updates_on_drawn_again_prompts_are_those_of_one_process(async_steps, tmp_path):
    overrides = [*SEVERAL_UPDATES, "--training.steps=8", f"--rl.async_steps={async_steps}"]
    (expected,) = run_ranks(run_on_this_rank, 1, tmp_path / "one", overrides)
    runs = run_ranks(run_on_this_rank, 2, tmp_path / "two", overrides + LAYOUTS["FSDP"])
    assert numbers(runs[0]) == numbers(runs[1])
    assert len(expected["steps"]) == 2
    assert any(step["rl/redraws"] > 0 for step in expected["steps"])
    for step, by_one in zip(runs[0]["steps"], expected["steps"], strict=True):
        assert step["loss"] == pytest.approx(by_one["loss"], abs=1e-5)
        assert step["grad_norm"] == pytest.approx(by_one["grad_norm"], rel=1e-4)
        for name in ("rl/reward", "rl/redraws", "rl/lag", "rl/skipped_samples"):
            assert step[name] == by_one[name], name


def fail_on_rank_one(dump_folder, async_steps):
    """Rank 1 cannot grade episodes of the second step."""
    controller = Controller(toy_config(dump_folder, f"--rl.async_steps={async_steps}"))
    controller.setup()
    grade, n_graded = controller.task.grade, 0

    def failing_grade(prompt, text):
        nonlocal n_graded
        n_graded += 1
        return 1 / 0 if n_graded > 8 else grade(prompt, text)

    if dist.get_rank() == 1:
        controller.task.grade = failing_grade
    controller.train_step()
    try:
        controller.train_step()
    except Exception as error:
        return repr(error)
    return "no error"


@pytest.mark.parametrize("async_steps", [0, 1])
def test_reward_function_that_fails_on_one_rank_ends_the_step_on_all(async_steps, tmp_path):
    first, second = run_ranks(fail_on_rank_one, 2, tmp_path, async_steps)
    assert "rank 1 could not draw or grade its episodes: ValueError" in first
    assert all(
        "grading failed" in error and "division by zero" in error for error in (first, second)
    )
    assert "rank 1 could" not in second
