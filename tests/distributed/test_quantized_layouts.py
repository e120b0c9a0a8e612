"""8-bit linear layers on ranks that split or shard them compute what they do in one process."""

import functools

import pytest
import torch

from tests.distributed.layout_matrix import (
    ONE_PROCESS,
    SHALLOW,
    Layout,
    differences,
    measure_on_rank,
)
from torchtitan.testing.gloo import run_ranks

pytest.importorskip("torchao")

TP = Layout("TP 2", tp=2)
FLOAT8 = (
    "--model.converters=quantize.linear.float8",
    "--quantize.linear.float8.emulate",
    "--quantize.linear.float8.filter_fqns=output,router",
)
ROWWISE = (*FLOAT8, "--quantize.linear.float8.recipe_name=rowwise")
MX = (
    "--model.converters=quantize.linear.mx",
    "--quantize.linear.mx.recipe_name=mxfp8_emulated",
    # In one process, too: 32 numbers share a scale, and a rank's half of these has 16.
    "--quantize.linear.mx.filter_fqns=output,attention.wk,attention.wv",
    "--compile.enable",
    "--compile.backend=eager",
)
# The last has biases, and blocks that gather in high precision, as they have experts.
RUNS = {
    "float8": ("llama3", FLOAT8),
    "rowwise": ("llama3", ROWWISE),
    "mx": ("llama3", MX),
    "float8, experts": ("gpt_oss", FLOAT8),
}

if torch.__version__ < "2.12":  # too old for torchao's MXFP8
    del RUNS["mx"]
QUICK = ("float8", "rowwise")
ROUNDED_ALIKE = [name for name in RUNS if name != "rowwise"]


def measure_runs(layout, runs, dump_folder):
    return [
        measure_on_rank(layout, family, "whole rows", dump_folder, (*flags, SHALLOW))
        for family, flags in runs
    ]


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory):
    """A function that returns the runs of a name, in one process and on two ranks."""
    folder = str(tmp_path_factory.mktemp("runs"))

    @functools.cache
    def runs_of(name):
        runs = [RUNS[name]]
        (alone,) = run_ranks(measure_runs, 1, ONE_PROCESS, runs, folder, timeout_seconds=300)[0]
        (split,) = run_ranks(measure_runs, 2, TP, runs, folder, timeout_seconds=300)[1]
        return alone, split

    return runs_of


def marked(names):
    """A layer is rounded by the same code in every family, and by MX's as by float8's."""
    return [pytest.param(x, marks=pytest.mark.slow) if x not in QUICK else x for x in names]


def _distance(x, expected):
    return (x - expected).abs().max() / expected.abs().max()


@pytest.mark.parametrize("name", marked(ROUNDED_ALIKE))
def test_split_layers_round_as_whole_ones_do(runs_of, name):
    alone, split = runs_of(name)
    assert split.hashes == alone.hashes
    assert split.losses[-1] < split.losses[0]
    found = differences(split, alone)
    # One scale for all parts of a tensor, or blocks within a part: the same numbers in 8 bits.
    # What is left in the first step is the order of summation in fp32. It may move a number over the
    # edge between two of the 256, which shows in the layers before.
    expected = alone.gradients
    off = [n for n, x in split.gradients.items() if _distance(x, expected[n]) >= 1e-5]
    assert len(off) <= len(expected) // 4 and found["gradient"] < 2**-4, off
    # From then on a weight may be off by its last bit, and now and then rounds to the other side.
    assert found["loss"] < 1e-5 and found["grad_norm"] < 1e-4


def test_rows_scaled_by_rank_are_as_close_as_float8_is(runs_of):
    # A rank scales a row by the largest number of its own part: rounded differently, by less than
    # 2**-4 of each number. Gradients are sums of many.
    alone, split = runs_of("rowwise")
    assert split.losses[-1] < split.losses[0]
    found = differences(split, alone)
    assert found["loss"] < 1e-4 and found["grad_norm"] < 1e-2 and found["gradient"] < 0.2


def test_converted_layers_round_at_all(runs_of, tmp_path):
    of_ranks = run_ranks(measure_runs, 1, ONE_PROCESS, [("llama3", ())], str(tmp_path))
    for converted in runs_of("float8"):
        assert differences(converted, of_ranks[0][0])["gradient"] > 1e-3
