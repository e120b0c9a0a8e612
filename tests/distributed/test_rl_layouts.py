"""RL on 2 gloo ranks takes the steps of one process."""

import functools
import itertools

import pytest
import torch.distributed as dist

from tests.distributed.rl_runs import LAYOUTS, numbers, run_on_this_rank
from tests.reliability.jobs import flags_in
from tests.unit.rl.test_dialogues import GUESS, STOPS
from tests.unit.rl.toy import toy_config
from torchtitan.rl.controller import Controller
from torchtitan.testing.gloo import run_ranks

STEPS = ["--training.steps=5", "--rl.loss.entropy_coef=0.01", "--optimizer.lr=1e-3"]
LORA = ["--model.converters=lora", "--lora.rank=4", "--rl.loss.kl_coef=0.1"]
CRITIC = ["--rl.advantage.name=gae", "--rl.advantage.lam=0.9", "--rl.critic.lr=3e-3"]
CRITIC += ["--rl.epochs=2", "--rl.critic.warmup_steps=1", "--training.steps=6"]
RUNS = {"policy": STEPS, "adapters": [*STEPS, *LORA], "critic": [*CRITIC, "--optimizer.lr=1e-3"]}
PACKED = ["--rl.batch.packing", "--model.attn_type=varlen"]
PACKED += ["--model.attn_mask_type=position_block_causal"]
MORE_LAYOUTS = LAYOUTS | {
    "TP, gathered logits": [*LAYOUTS["TP"], "--parallelism.disable_loss_parallel"],
    "FSDP, packed rows": [*LAYOUTS["FSDP"], *PACKED],
    "HSDP": [*LAYOUTS["FSDP"], *LAYOUTS["DDP"]],
}
# run -> layouts in CI, layouts that are slow
CASES = {
    "policy": (["DDP", "CP"], ["FSDP", "TP", "PP", "TP, gathered logits"]),
    "adapters": (["TP"], ["FSDP", "PP", "CP"]),
    "critic": (["FSDP", "FSDP, packed rows", "TP", "PP"], ["HSDP", "DDP", "CP"]),
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Return a function that returns the run of this name on one process."""
    folder = tmp_path_factory.mktemp("one")
    return functools.cache(
        lambda name: run_ranks(run_on_this_rank, 1, folder / name, RUNS[name])[0]
    )


@pytest.mark.parametrize(
    ("run", "layout"),
    [
        pytest.param(run, layout, marks=marks)
        for run, cases in CASES.items()
        for layouts, marks in zip(cases, ([], pytest.mark.slow), strict=True)
        for layout in layouts
    ],
)
def test_first_steps_are_those_of_one_process(run, layout, one_process, tmp_path):
    n_ranks = 4 if layout == "HSDP" else 2
    flags = [*RUNS[run], *MORE_LAYOUTS[layout]]
    runs = run_ranks(run_on_this_rank, n_ranks, tmp_path, flags)
    assert_first_steps_of_one_process(runs, one_process(run))


def assert_first_steps_of_one_process(runs, one_process):
    for run in runs[1:]:
        assert numbers(runs[0]) == numbers(run), "every rank reports the numbers of all"
        assert runs[0]["digest"] == run["digest"]
    for step, expected in zip(runs[0]["steps"], one_process["steps"], strict=True):
        assert step["rl/reward"] == expected["rl/reward"], "the same completions were drawn"
        of_critic = [name for name in expected if name.startswith("critic/")]
        # The critic's values go into the advantages.
        loss_close, rel = (2e-5, 1e-3) if of_critic else (1e-5, 1e-4)
        assert step["loss"] == pytest.approx(expected["loss"], abs=loss_close)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=rel)
        for name in of_critic:
            assert step[name] == pytest.approx(expected[name], rel=1e-3, abs=2e-5), name
        names = [] if of_critic else ["policy_loss", "entropy", "ratio_mean", "logprob_diff_max"]
        for name in (f"loss/{name}" for name in names):
            assert step[name] == pytest.approx(expected[name], abs=2e-5)


# Four updates per batch, prompts drawn again, long completions penalized, buckets, corrections.
SEVERAL_UPDATES = flags_in("""
    rl.epochs=2 rl.minibatches=2 rl.redraws=2 rl.overlong_tokens=2
    rl.batch.bucketing rl.batch.skip_zero_advantage
    rl.loss.correction=token rl.loss.max_token_mismatch=5
    rl.task.num_letters=2 rl.num_samples_per_prompt=2 training.steps=8
""")


@pytest.mark.parametrize("async_steps", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_several_updates_on_drawn_again_prompts_are_those_of_one_process(async_steps, tmp_path):
    overrides = [*SEVERAL_UPDATES, f"--rl.async_steps={async_steps}"]
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


def fail_on_rank_one(dump_folder, method, flags):
    """Rank 1's calls of this method of the task fail, beginning with the ninth; return the error."""
    controller = Controller(toy_config(dump_folder, *flags))
    controller.setup()
    inner, calls = getattr(controller.task, method), itertools.count()

    def failing(prompt, given):
        return 1 / 0 if next(calls) >= 8 else inner(prompt, given)

    if dist.get_rank() == 1:
        setattr(controller.task, method, failing)
    try:
        for _ in range(4):
            controller.train_step()
    except Exception as error:
        return repr(error)
    return "no error"


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    ("method", "message", "flags"),
    [("grade", "grading failed", []), ("reply", "a reply failed", [*GUESS, *STOPS])],
)
def test_task_that_fails_on_one_rank_ends_the_step_on_all(method, message, flags, ahead, tmp_path):
    flags = [*flags, f"--rl.async_steps={ahead}", *LAYOUTS["FSDP"]]
    first, second = run_ranks(fail_on_rank_one, 2, tmp_path, method, flags)
    assert all(message in error and "division by zero" in error for error in (first, second))
    if method == "grade":  # replies are exchanged, so all ranks have the same error
        assert "rank 1 could not draw or grade its episodes: ValueError" in first
        assert "rank 1 could" not in second
