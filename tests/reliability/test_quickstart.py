"""docs/quickstart.md, block by block: from an installed wheel, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/quickstart.md"
pytest.importorskip("transformers")


def run(command: list[str], folder: Path, **variables: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def page_with_steps_divided_by(divisor: int) -> str:
    """Return the page with a part of its steps: the same commands and files, in less time."""
    steps = r"(steps[ =]+|interval = |freq[ =]+|step[- ])(\d+)"
    return re.sub(steps, lambda m: f"{m[1]}{int(m[2]) // divisor}", PAGE.read_text())


# The last loss: 6.9 is a uniform guess.
def test_every_block_of_the_quickstart_runs_from_a_wheel_in_an_empty_folder(tmp_path):
    """With a fifth of its steps."""
    divisor, largest_loss = 5, 6.0
    site, folder = tmp_path / "site", tmp_path / "mine"
    folder.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    source = tmp_path / "source"  # a build leaves files behind
    source.mkdir()
    for name in ("torchtitan", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", "dist", str(source)], tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PYTHONPATH": str(site), "PATH": path, "OMP_NUM_THREADS": "1"}
    where = run(
        [sys.executable, "-c", "import torchtitan; print(torchtitan.__file__)"], folder, **variables
    )
    assert where.startswith(str(site))

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
