"""Faults of mixtures, epochs, packing, and of the order that a resumed run goes on with."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.reliability import jobs
from tests.reliability.faults import SAVING, Fault
from tests.reliability.faults.config import flags

Arrange = Callable[[Path], Sequence[str]]
TEXTS = f'dataset_path = "{jobs.ROOT}/tests/assets/c4_test/data.json"'
TABLES = f"""\
[[training.mixture]]
{TEXTS}
weight = 3
[[training.mixture]]
dataset = "python_docs"
"""
OWN_DATA = "--experimental.custom_import=tests.reliability.own_data"


def mixture(*arguments: str, tables: str = TABLES, path: str = "None"):
    """Arranges a job with these tables. path: training.dataset_path."""

    def arrange(folder: Path) -> list[str]:
        (folder / "job.toml").write_text(tables)
        return [
            f"--job.config_file={folder}/job.toml",
            f"--training.dataset_path={path}",
            *arguments,
        ]

    return arrange


def table(old: str, new: str):
    """One text in `TABLES` is another one."""
    assert old in TABLES
    return mixture(tables=TABLES.replace(old, new))


def own_data(flags: Sequence[str], **more):
    """A job with tests/reliability/own_data.py is refused when it builds its data."""
    return Fault(lambda _folder: [OWN_DATA, *flags], **more)


# Without it, another order is refused before the data position is read.
ALLOWED = ("--checkpoint.allow_changed=training.shuffle,training.data_seed",)


def other_order(*arguments: str, arrange: Arrange | None = None):
    """A finished run, of one dataset in its own order, goes on otherwise."""
    return Fault(
        arrange or (lambda _folder: [*SAVING, "--training.steps=6", *arguments]), after_run=True
    )


def after_shuffled_run(folder: Path) -> list[str]:
    shutil.rmtree(folder / "outputs")
    shuffled = [*SAVING, "--training.shuffle", "--training.steps=2"]
    arguments = [*jobs.TINY_JOB, *shuffled, f"--job.dump_folder={folder}/outputs"]
    first = jobs.run([*arguments, "--training.data_seed=5"], folder / "logs_before")
    assert first.exit_codes == [0], first.output
    return [*shuffled, "--training.steps=4", "--training.data_seed=6", *ALLOWED]


FAULTS = {
    "weight of 0": table("weight = 3", "weight = 0"),
    "weight that is not a number": table("weight = 3", "weight = nan"),
    "unknown key in a table of a mixture": table("weight", "wieght"),
    "unknown dataset in a table of a mixture": table("python_docs", "python_dosc"),
    "table of a mixture without a path": table(TEXTS, ""),
    "passes below 0 in a table of a mixture": table("weight = 3", "epochs = -1"),
    "mixture that is one table": table(TABLES, "[training.mixture]\nweight = 3\n"),
    "mixture of values": mixture(tables='[training]\nmixture = ["local", "python_docs"]\n'),
    "path beside a mixture": mixture(path=f"{jobs.ROOT}/tests"),
    "epochs beside a mixture": mixture("--training.epochs=2"),
    "validation beside a mixture without a dataset": mixture("--validation.enable"),
    "epochs of 0": flags("--training.epochs=0"),
    "epochs of a stream": own_data(("--training.dataset=stream", "--training.epochs=2")),
    "epochs of a model with its own dataloader": own_data(
        ("--model.name=own_loader", "--training.epochs=2")
    ),
    "data seed below 0": flags("--training.data_seed=-1"),
    "unknown packing": flags("--training.packing=best"),
    "stream whose files the ranks cannot share": own_data(("--training.dataset=stream",), ranks=2),
    "resuming with a shuffled order": other_order(
        "--training.shuffle", "--training.data_seed=5", *ALLOWED
    ),
    "resuming with another data seed": other_order(arrange=after_shuffled_run),
    "resuming with a mixture": other_order(arrange=mixture(*SAVING, "--training.steps=6")),
}
