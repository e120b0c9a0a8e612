"""Optimizers that step in backward, under layouts that split what they step."""

from tests.distributed.layout_matrix import (
    ONE_PROCESS,
    TOLERANCES,
    Layout,
    differences,
    measure_on_rank,
)
from torchtitan.testing.gloo import run_ranks

LAYOUTS = [Layout("FSDP 2", dp_shard=2), Layout("TP 2", tp=2), Layout("CP 2", cp=2)]
CASE = ("llama3", "whole rows")


def measure_all(layouts, folder):
    flags = ("--optimizer.early_step_in_backward",)
    return [measure_on_rank(layout, *CASE, folder, flags) for layout in layouts]


def test_gradients_are_whole_when_a_parameter_steps_in_backward(tmp_path):
    ((expected,),) = run_ranks(measure_all, 1, [ONE_PROCESS], str(tmp_path))
    for runs in run_ranks(measure_all, 2, LAYOUTS, str(tmp_path), timeout_seconds=300):
        for layout, run in zip(LAYOUTS, runs, strict=True):
            assert not run.gradients, "a gradient outlived its step"
            found = differences(run, expected)
            for kind in ("loss", "weights", "optimizer_state"):
                assert found[kind] <= TOLERANCES[kind], (layout.name, kind)
