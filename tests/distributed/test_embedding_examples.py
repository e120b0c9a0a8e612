"""The programs under examples/embedding run as they stand."""

import contextlib
import io
import os
import runpy
from pathlib import Path

import pytest

from torchtitan.testing.gloo import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "embedding"


def output_of(paths, folder):
    """What each program prints on this rank."""
    os.chdir(folder)
    outputs = {}
    for path in paths:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            runpy.run_path(path, run_name="__main__")
        outputs[Path(path).stem] = output.getvalue()
    return outputs


def run_examples(names, world_size, folder):
    paths = [str(EXAMPLES / f"{name}.py") for name in names]
    return run_ranks(output_of, world_size, paths, str(folder), timeout_seconds=200)


def losses_in(output):
    return [
        float(line.split("loss ")[1].split(",")[0])
        for line in output.splitlines()
        if "loss" in line
    ]


def test_examples_for_one_process(tmp_path):
    (outputs,) = run_examples(["sft", "score", "ppo"], 1, tmp_path)
    losses = losses_in(outputs["sft"])
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)
    assert outputs["score"].count("perplexity") == 3
    first, second = losses_in(outputs["ppo"])
    assert abs(first) < 1e-6  # ratios of 1 and advantages that add up to nothing
    assert second < first


def test_examples_for_two_ranks(tmp_path):
    outputs = run_examples(["pipeline", "ppo"], 2, tmp_path)
    losses = [losses_in(output["pipeline"]) for output in outputs]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
    assert ["by heart" in output["pipeline"] for output in outputs] == [False, True]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) <= 40
