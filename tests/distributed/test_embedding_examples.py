"""The programs under examples/embedding and examples/preference run as they stand, with a debug
model that has a quarter of its width."""

import contextlib
import dataclasses
import io
import os
import re
import sys
from pathlib import Path

import pytest

from torchtitan.models.llama3 import llama3_args
from torchtitan.testing.gloo import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def output_of(paths, folder, parallelism):
    """What each program prints on this rank; parallelism goes into its config."""
    os.chdir(folder)
    sys.argv = sys.argv[:1]
    narrow = dataclasses.replace(llama3_args["debugmodel"], dim=64, n_heads=4)
    llama3_args["debugmodel"] = narrow
    outputs = {}
    for path in map(Path, paths):
        source = path.read_text()
        if parallelism:
            section = f"JobConfig(parallelism=config.Parallelism(**{parallelism}),"
            source = source.replace("JobConfig(", section)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(source, path, "exec"), {"__name__": "__main__"})
        outputs[path.stem] = output.getvalue()
    return outputs


def run_examples(names, world_size, folder, **parallelism):
    folders = {"dpo": "preference"}
    paths = [str(EXAMPLES / folders.get(name, "embedding") / f"{name}.py") for name in names]
    return run_ranks(output_of, world_size, paths, str(folder), parallelism, timeout_seconds=200)


def numbers_in(output, name):
    """What stands behind `name` in each line that has it."""
    return [float(number) for number in re.findall(rf"{name} ([-\d.]+)", output)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    (outputs,) = run_examples(["sft", "score", "ppo", "dpo"], 1, tmp_path_factory.mktemp("alone"))
    return outputs


def test_examples_for_one_process(alone):
    losses = numbers_in(alone["sft"], "loss")
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)
    assert len(numbers_in(alone["score"], "perplexity")) == 3
    first, second = numbers_in(alone["ppo"], "loss")
    assert abs(first) < 1e-6  # ratios of 1 and advantages that add up to nothing
    assert second < first
    losses = numbers_in(alone["dpo"], "loss")
    assert losses[0] == pytest.approx(0.69315) and losses[-1] < losses[0]  # log 2: no preference


def test_examples_on_two_data_parallel_ranks(alone, tmp_path):
    outputs = run_examples(["pipeline", "sft", "score", "ppo", "dpo"], 2, tmp_path)
    losses = [numbers_in(output["pipeline"], "loss") for output in outputs]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
    assert ["by heart" in output["pipeline"] for output in outputs] == [False, True]

    both = [numbers_in(output["sft"], "loss") for output in outputs]
    losses = [sum(shares) for shares in zip(*both, strict=True)]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)
    assert outputs[0]["score"] == alone["score"] != outputs[1]["score"]
    assert outputs[1]["score"].count("perplexity") == 3
    for output in outputs:
        expected = numbers_in(alone["dpo"], "loss")
        assert numbers_in(output["dpo"], "loss") == pytest.approx(expected, abs=2e-5)


SLOW = [pytest.param(axis, marks=pytest.mark.slow) for axis in ("tensor", "context")]


@pytest.mark.parametrize("axis", [*SLOW, "pipeline"])
def test_examples_on_two_ranks_that_share_a_batch_say_what_one_process_says(axis, alone, tmp_path):
    names = ["sft", "score", "ppo", "dpo"]
    outputs = run_examples(names, 2, tmp_path, **{f"{axis}_parallel_degree": 2})
    for rank, output in enumerate(outputs):
        values = "sft norm, ppo norm, ppo loss, ppo ratio, dpo loss, dpo right, score perplexity"
        for name, value in map(str.split, values.split(",")):
            expected = numbers_in(alone[name], value)
            assert expected, (name, value)
            # As many digits as are printed.
            tolerance = 2e-5 if value == "loss" else 0.011
            actual = numbers_in(output[name], value)
            assert actual == pytest.approx(expected, rel=1e-3, abs=tolerance), (rank, name, value)
    shares = [numbers_in(output["sft"], "loss") for output in outputs]
    loss = [sum(both) for both in zip(*shares, strict=True)] if axis == "context" else shares[1]
    assert loss == pytest.approx(numbers_in(alone["sft"], "loss"), abs=0.0021)
