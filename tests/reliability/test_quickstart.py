"""The command and docs/quickstart.md, block by block: from an installed wheel, in an empty folder."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.reliability.wheel import run
from torchtitan.commands import COMMANDS

PAGE = Path(__file__).parents[2] / "docs/quickstart.md"
pytest.importorskip("transformers")


def page_with_steps_divided_by(divisor: int) -> str:
    """Return the page with a part of its steps: the same commands and files, in less time."""
    steps = r"(steps[ =]+|interval = |freq[ =]+|step[- ])(\d+)"
    return re.sub(steps, lambda m: f"{m[1]}{int(m[2]) // divisor}", PAGE.read_text())


def test_installed_command_lists_its_tools_without_importing_torch(installed, tmp_path):
    lines = run(["torchtitan", "--help"], tmp_path, **installed).splitlines()
    for name in COMMANDS:
        (line,) = (line for line in lines if line.startswith(f"  {name} "))
        assert len(line) < 100
    code = "import sys; sys.argv[1:] = ['-h']; from torchtitan.commands import main; main()"
    code += (
        "; sys.exit(any(name.split('.')[0] in ('torch', 'tyro', 'numpy') for name in sys.modules))"
    )
    run([sys.executable, "-c", code], tmp_path, **installed)


@pytest.mark.parametrize("name", ["train", "rl", "plan"])
def test_each_tool_of_the_wheel_has_its_options(name, installed, tmp_path):
    assert "usage: torchtitan" in run(["torchtitan", name, "--help"], tmp_path, **installed)


@pytest.mark.slow
def test_default_job_of_an_empty_folder_leaves_a_model_that_the_printed_command_continues(
    installed, tmp_path
):
    options = ["--training.steps=60", "--metrics.log_freq=5"]
    said = run(["torchtitan", "train", *options], tmp_path, **installed)
    assert re.search("the model continues: .Return a list of", said)
    (command,) = re.findall("go on with: (.*)", said)
    printed = run(shlex.split(command), tmp_path, **installed)
    assert printed.startswith("weights: ./outputs/model\nReturn a list of")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "outputs/model")
    assert 6e6 < model.num_parameters() < 7e6
    run(["torchtitan", "compare", "outputs/model"], tmp_path, **installed)


# With a fifth of its steps. The last loss: 6.9 is a uniform guess.
def test_every_block_of_the_quickstart_runs_from_a_wheel_in_an_empty_folder(installed, tmp_path):
    divisor, largest_loss = 5, 6.0
    folder, variables = tmp_path, installed
    page, outputs = page_with_steps_divided_by(divisor), []
    for kind, block in re.findall(r"^```(\w+)\n(.*?)^```", page, re.M | re.S):
        if kind == "toml":
            (folder / block.partition("\n")[0].removeprefix("# ")).write_text(block)
        else:
            shell = ["bash", "-ec"] if kind == "bash" else [sys.executable, "-c"]
            outputs.append(run([*shell, block], folder, **variables))
    assert len(outputs) == 7
    continued = rf"the run continues after step {200 // divisor}\b.*step: +{250 // divisor} "
    assert re.search(continued, outputs[3], re.S)
    losses = re.findall(r"validate step: +\d+ +loss: +([\d.]+)", outputs[4])
    assert len(losses) == 2 and float(losses[-1]) < largest_loss
    assert "The statement" in outputs[-1]
