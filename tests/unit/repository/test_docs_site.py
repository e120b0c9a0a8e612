"""The documentation site: it builds without a warning, and its links lead to its own pages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytest.importorskip("material", reason="needs mkdocs-material: pip install -e '.[docs]'")


def build(folder: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder, *options],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


def test_site_builds_strictly_and_links_within_itself(tmp_path):
    result = build(tmp_path)
    assert result.returncode == 0, result.stderr
    links = re.findall(r'href="([^"#]+)', (tmp_path / "index.html").read_text())
    inside = [link for link in links if not link.startswith(("http", "data:"))]
    assert {"rl.html", "differences.html", "CONTRIBUTING.html"} <= set(inside)
    assert [link for link in inside if not (tmp_path / link).exists()] == []
    assert (tmp_path / "examples/embedding/sft.py").read_text().startswith('"""')
