"""PPO with a critic on several gloo ranks takes the steps of one process."""

import pytest

from tests.distributed.rl_runs import LAYOUTS, numbers, run_on_this_rank
from torchtitan.testing.gloo import run_ranks

RUN = ["--rl.advantage.name=gae", "--rl.advantage.lam=0.9", "--rl.critic.lr=3e-3"]
RUN += ["--rl.epochs=2", "--rl.critic.warmup_steps=1", "--optimizer.lr=1e-3"]
CRITICS = ("value_loss", "value_clipped_frac", "explained_variance", "value_mean", "grad_norm")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    (run,) = run_ranks(run_on_this_rank, 1, folder, [*RUN, "--training.steps=6"])
    return run


PACKED = ["--rl.batch.packing", "--model.attn_type=varlen"]
PACKED += ["--model.attn_mask_type=position_block_causal"]
CASES = {name: (2, flags) for name, flags in LAYOUTS.items()}
CASES["FSDP, packed rows"] = (2, [*LAYOUTS["FSDP"], *PACKED])
CASES["HSDP"] = (4, [*LAYOUTS["FSDP"], *LAYOUTS["DDP"]])
SLOW = {"HSDP", "DDP", "CP"}  # policies run in the last two in CI


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_first_steps_are_those_of_one_process(case, one_process, tmp_path):
    n_ranks, flags = CASES[case]
    runs = run_ranks(run_on_this_rank, n_ranks, tmp_path, [*RUN, "--training.steps=6", *flags])
    assert_steps_are_those_of_one_process(runs, one_process)


def assert_steps_are_those_of_one_process(runs, one_process):
    for run in runs[1:]:
        assert numbers(runs[0]) == numbers(run), "every rank reports the numbers of all"
        assert runs[0]["digest"] == run["digest"]
    for step, expected in zip(runs[0]["steps"], one_process["steps"], strict=True):
        assert step["rl/reward"] == expected["rl/reward"], "the same completions were drawn"
        assert step["loss"] == pytest.approx(expected["loss"], abs=2e-5)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        for name in CRITICS:
            found, by_one = (metrics[f"critic/{name}"] for metrics in (step, expected))
            assert found == pytest.approx(by_one, rel=1e-3, abs=2e-5), name
