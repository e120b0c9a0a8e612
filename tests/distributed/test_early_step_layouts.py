"""Optimizers that step in backward, under layouts that split what they step."""

import torch

from tests.distributed.layout_matrix import (
    ONE_PROCESS,
    Layout,
    measure_on_rank,
)
from torchtitan.testing.gloo import run_ranks

TOLERANCE = 1e-5  # fp32: the order of summation differs between layouts
EARLY_STEP = ("--optimizer.early_step_in_backward",)

LAYOUTS = [Layout("TP 2", tp=2, extra=EARLY_STEP), Layout("CP 2", cp=2, extra=EARLY_STEP)]


def measure_all(layouts, dump_folder):
    return [measure_on_rank(layout, "llama3", "whole rows", dump_folder) for layout in layouts]


def test_gradients_are_whole_when_a_parameter_steps_in_backward(tmp_path):
    alone = Layout(ONE_PROCESS.name, extra=EARLY_STEP)
    ((expected,),) = run_ranks(measure_all, 1, [alone], str(tmp_path))
    for runs in run_ranks(measure_all, 2, LAYOUTS, str(tmp_path), timeout_seconds=300):
        for layout, run in zip(LAYOUTS, runs, strict=True):
            assert not run.gradients, "a gradient outlived its step"
            torch.testing.assert_close(run.losses, expected.losses, rtol=TOLERANCE, atol=0)
            for name, weight in expected.weights.items():
                difference = (run.weights[name] - weight).norm()
                assert difference < TOLERANCE * weight.norm(), (layout.name, name)
