"""Runs commands, and installs a wheel of this tree outside the checkout."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


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


def install(tmp_path: Path) -> dict[str, str]:
    """Return the variables with which Python finds a wheel of this tree, and a shell its command."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    source = tmp_path / "source"  # a build leaves files behind
    source.mkdir()
    for name in ("torchtitan", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", "dist", str(source)], tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], tmp_path)
    path = f"{site}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PYTHONPATH": str(site), "PATH": path, "OMP_NUM_THREADS": "1"}
    where = [sys.executable, "-c", "import torchtitan; print(torchtitan.__file__)"]
    assert run(where, tmp_path, **variables).startswith(str(site))
    return variables
