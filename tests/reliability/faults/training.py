"""Faults of numbers, and of the course of training."""

from tests.reliability.faults import Fault
from tests.reliability.faults.config import flags

EXPLODES = "--optimizer.lr=1e38"

FAULTS = {
    "loss that is not a number": flags(
        EXPLODES, "--training.steps=2", "--training.global_batch_size=2"
    ),
    "loss that is not a number, where that stops the run": flags(
        EXPLODES, "--training.nonfinite_grad_norm=stop"
    ),
    "loss that is not a number on two ranks": Fault(
        flags(EXPLODES, "--training.nonfinite_grad_norm=stop"), ranks=2
    ),
    "eleven bad steps in a row": flags(EXPLODES, "--training.steps=20"),
}

# Looking at a run

NO_REPORT = dict(module="torchtitan.report", whole_command=True)
FAULTS |= {
    "report of a folder without a run": Fault(lambda folder: [str(folder)], **NO_REPORT),
    "report that cannot be written": Fault(
        lambda folder: [f"{folder}/outputs", f"-o={folder}/nowhere/report.html"],
        after_run=True,
        **NO_REPORT,
    ),
    "history that cannot be written": lambda folder: (
        (folder / "outputs/events.jsonl").mkdir(parents=True) or []
    ),
}
