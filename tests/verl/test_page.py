"""Runs the commands of docs/verl.md as a reader does: in their order, in one folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="scripts/run_verl_tests.sh installs it")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/verl.md").read_text()
BLOCKS = "\n".join(re.findall(r"^```\n(.*?)^```$", PAGE, re.M | re.S)).replace("\\\n", " ")
MAKE_TOY, *RUNS = re.findall(r"^(?:\w+=\S+ )?(?:python )?examples/verl/\S+.*$", BLOCKS, re.M)
STEPS = 2


def run(command: str, folder: Path) -> list[int]:
    """The steps that a command of the page reports, in a run that ends after `STEPS`."""
    command = command.replace("/tmp/toy", str(folder))
    if command != MAKE_TOY.replace("/tmp/toy", str(folder)):
        command += f" trainer.total_training_steps={STEPS}"
    bin_folder = os.path.dirname(sys.executable)
    result = subprocess.run(
        ["bash", "-c", command.replace("examples/verl/", f"{ROOT}/examples/verl/")],
        cwd=folder,
        env=os.environ
        | {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, f"{command}\n{(result.stdout + result.stderr)[-5000:]}"
    steps = re.findall(r"(?<!_)step:(\d+) - .*(?:train|actor)/", result.stdout + result.stderr)
    return [int(step) for step in steps]


def test_page_has_the_commands_that_are_run():
    assert MAKE_TOY.startswith("python ")
    scripts = [re.findall(r"(sft|grpo)\.sh", command) for command in RUNS]
    assert scripts == [["sft"], ["sft"], ["grpo"], ["grpo"], ["grpo"], ["grpo"]]


def test_second_fine_tuning_in_a_folder_takes_all_steps(tmp_path):
    run(MAKE_TOY, tmp_path)
    for command in (RUNS[0], RUNS[0]):
        assert run(command, tmp_path) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_commands_of_the_page_run_in_their_order(tmp_path):
    run(MAKE_TOY, tmp_path)
    for command in RUNS:
        assert run(command, tmp_path) == list(range(1, STEPS + 1)), command
