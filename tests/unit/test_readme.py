"""The README's example runs as it stands there."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def test_python_example_of_the_readme_runs(tmp_path, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    exec(compile(example.replace("/tmp/embedded", str(tmp_path)), "README.md", "exec"), {})
    assert "OptimStepResult" in capsys.readouterr().out


def test_files_and_folders_that_the_readme_names_exist():
    root = README.parent
    named = re.findall(
        r"\]\(([\w./]+)\)|((?:scripts|benchmarks)/[\w./]+\.(?:sh|py))", README.read_text()
    )
    for path in {first or second for first, second in named}:
        assert (root / path).exists(), path
