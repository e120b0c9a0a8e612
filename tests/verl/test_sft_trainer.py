"""verl's SFT trainer, started as its users do: losses are equal in every layout, after a resume in
another layout, and with verl's own FSDP engine."""

import os
import subprocess
import sys

import pytest
import torch

from examples.verl.toy import make_toy
from tests.verl import cases

STEPS, TIMEOUT_SECONDS = 20, 300
# Without it, AdamW turns rounding errors into full steps.
EPS = 1e-3


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, its tokenizer, and data: 64 dialogues to train on, 16 to validate."""
    folder = tmp_path_factory.mktemp("sft")
    make_toy(folder)
    return folder


def run_trainer(place, name, n_ranks=1, engine="torchtitan", **settings):
    """{step: {metric: value}} of a run of the example, which saves below `place / name`."""
    settings["trainer.default_local_dir"] = place / name
    is_ours = engine == "torchtitan"
    settings["optim.eps" if is_ours else "+optim.override_optimizer_config.eps"] = EPS
    command = ["bash", "examples/verl/sft.sh", str(place)]
    bin_folder = os.path.dirname(sys.executable)
    variables = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    variables |= {"NPROC": str(n_ranks), "ENGINE": engine}
    options = dict(capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    command += [f"{key}={value}" for key, value in settings.items()]
    result = subprocess.run(command, env=os.environ | variables, **options)
    assert result.returncode == 0, result.stderr[-4000:]
    return cases.logged_steps(result.stdout)


def assert_same_run(metrics, expected, steps, **tolerances):
    """tolerances: last part of a metric's name -> relative tolerance; 1e-5 for other metrics."""
    for name in ("loss", "grad_norm", "lr", "global_tokens"):
        ours, theirs = (
            torch.tensor([run[step][f"train/{name}"] for step in steps], dtype=torch.float64)
            for run in (metrics, expected)
        )
        worst = ((ours - theirs).abs() / theirs.clamp(min=1e-12)).max()
        print(f"{name}: differs by {worst:.1e} relative at most")
        torch.testing.assert_close(ours, theirs, rtol=tolerances.get(name, 1e-5), atol=0)
    for step in steps:
        if step % 5 == 0:
            val_loss = expected[step]["val/loss"]
            assert metrics[step]["val/loss"] == pytest.approx(val_loss, rel=1e-5)


@pytest.fixture(scope="module")
def alone(place):
    # The checkpoint is in the middle of the second of three epochs of eight steps.
    return run_trainer(place, "alone", **{"trainer.save_freq": "10"})


def test_loss_falls_in_twenty_steps(alone):
    assert sorted(alone) == list(range(1, STEPS + 1))
    assert alone[STEPS]["val/loss"] < alone[5]["val/loss"] < alone[1]["train/loss"]
    assert alone[STEPS]["train/lr"] == 0.0  # the rate of the step after the last


@pytest.mark.parametrize(
    "layout",
    ["fsdp", "tp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pp", "cp"))],
)
def test_layouts_report_the_same_losses(place, alone, layout):
    sizes = {f"engine.{name}": size for name, size in cases.LAYOUTS[layout].items()}
    metrics = run_trainer(place, layout, 2, **sizes)
    assert_same_run(metrics, alone, range(1, STEPS + 1))


def test_run_of_one_process_is_resumed_by_two_within_an_epoch(place, alone):
    """verl saves the data position of each data-parallel rank, so their number stays the same."""
    settings = {
        "engine.tensor_parallel_size": 2,
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": place / "alone/global_step_10",
    }
    metrics = run_trainer(place, "resumed", 2, **settings)
    assert min(metrics) == 11
    assert_same_run(metrics, alone, range(11, STEPS + 1))


@pytest.fixture(scope="module")
def at_constant_rate(place):
    """The only schedule that both engines have."""
    settings = {"optim.lr_warmup_steps": 0, "optim.min_lr_factor": 1.0}
    return run_trainer(place, "constant", **settings)


@pytest.mark.parametrize(
    "n_ranks, is_packed", [(2, True), pytest.param(1, False, marks=pytest.mark.slow)]
)
def test_fsdp_engine_of_verl_reports_the_same_losses(place, at_constant_rate, n_ranks, is_packed):
    settings = {
        "optim.lr_warmup_steps": 0,
        "optim.lr_scheduler_type": "constant",
        "model.use_remove_padding": is_packed,
    }
    metrics = run_trainer(place, f"fsdp_{n_ranks}", n_ranks, "fsdp", **settings)
    tolerances = dict(loss=1e-6, grad_norm=2e-6)
    assert_same_run(metrics, at_constant_rate, range(1, STEPS + 1), **tolerances)
