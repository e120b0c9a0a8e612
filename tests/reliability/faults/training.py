"""Faults of numbers, and of the course of training."""

from tests.reliability.faults import Fault
from tests.reliability.faults.config import flags

EXPLODES = "--optimizer.lr=1e38"

FAULTS = [
    Fault(
        name="loss that is not a number",
        message="WARNING: step 2: the first bad loss of rank 0, nan, is that of microbatch 1 of 2, "
        "row 1 (document…)",
        cause="The learning rate is too high, a document is odd, or a device is faulty.",
        remedy="Look at the documents; lower optimizer.lr; docs/debugging.md says how to tell the causes.",
        arrange=flags(EXPLODES, "--training.steps=2", "--training.global_batch_size=2"),
        exit_code=0,
    ),
    Fault(
        name="loss that is not a number, where that stops the run",
        message="error: step 2: the gradient norm is nan, 1 time(s) in a row (ranks with a bad loss "
        "have logged its microbatch; if there is none, a gradient overflowed); lower optimizer.lr, "
        "look at the data of this step, or set training.nonfinite_grad_norm",
        cause="As above; training.nonfinite_grad_norm is stop.",
        remedy="As above. The checkpoint before this step is whole.",
        arrange=flags(EXPLODES, "--training.nonfinite_grad_norm=stop"),
        exit_code=1,
    ),
    Fault(
        name="loss that is not a number on two ranks",
        message="error: step 2: the gradient norm is nan, 1 time(s) in a row (ranks with a bad loss "
        "have logged its microbatch; …",
        cause="As above. All ranks take the same decision, and each logs its own bad microbatch.",
        remedy="As above. If it is always the same rank, suspect its device.",
        arrange=flags(EXPLODES, "--training.nonfinite_grad_norm=stop"),
        exit_code=1,
        ranks=2,
    ),
    Fault(
        name="eleven bad steps in a row",
        message="error: step 12: the gradient norm is nan, 11 time(s) in a row (…",
        cause="Weights that are not finite give no finite gradient any more.",
        remedy="Go back to a checkpoint before the first bad step, with a lower optimizer.lr.",
        arrange=flags(EXPLODES, "--training.steps=20"),
        exit_code=1,
    ),
    Fault(
        name="run that is complete",
        message="this run is complete: its checkpoint of step 4 reaches training.steps = 4",
        cause="A finished run was started again.",
        remedy="Raise training.steps to go on, or give a new run another job.dump_folder.",
        arrange=flags("--checkpoint.enable", "--training.steps=4"),
        exit_code=0,
        after_run=True,
    ),
    Fault(
        name="validation rows longer than the model's",
        message="config error: validation.seq_len must not be above training.seq_len, …",
        cause="training.seq_len sets how many positions the model knows.",
        remedy="Set validation.seq_len to training.seq_len or less.",
        arrange=flags("--validation.enable", "--validation.seq_len=64"),
    ),
    Fault(
        name="gradients of steps in backward that cannot accumulate",
        message="config error: optimizer.early_step_in_backward updates in every backward, so it "
        "cannot accumulate gradients, …",
        cause="A step of several microbatches needs their gradients together.",
        remedy="Make a step one microbatch, or turn early_step_in_backward off.",
        arrange=flags("--optimizer.early_step_in_backward", "--training.global_batch_size=2"),
    ),
]

# Looking at a run

NO_REPORT = dict(module="torchtitan.report", whole_command=True)
FAULTS += [
    Fault(
        name="report of a folder without a run",
        message="error: …holds no run: there is no events.jsonl, no file of metrics…",
        cause="The folder is not the job.dump_folder of a run, or the run was refused before it "
        "began.",
        remedy="Name the folder that job.dump_folder says.",
        arrange=lambda folder: [str(folder)],
        **NO_REPORT,
    ),
    Fault(
        name="report of a folder that is not there",
        message="error: …nowhere is not a folder; name the job.dump_folder of a run",
        cause="A typing error in the path.",
        remedy="Name the folder that job.dump_folder says.",
        arrange=lambda folder: [f"{folder}/nowhere"],
        **NO_REPORT,
    ),
    Fault(
        name="report that cannot be written",
        message="error: …nowhere/report.html…: No such file or directory",
        cause="The folder of -o is missing or read-only.",
        remedy="Name a file in a folder that this user may write to.",
        arrange=lambda folder: [f"{folder}/outputs", f"-o={folder}/nowhere/report.html"],
        after_run=True,
        **NO_REPORT,
    ),
    Fault(
        name="history that cannot be written",
        message="training completed",
        cause="events.jsonl in the dump folder is not a file that this user may write to.",
        remedy="None for the run, which goes on. For a history, remove what is there.",
        arrange=lambda folder: (folder / "outputs/events.jsonl").mkdir(parents=True) or [],
        exit_code=0,
    ),
]
