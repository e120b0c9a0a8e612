"""Faults of mixtures, epochs, packing, and of the order that a resumed run goes on with."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.reliability import jobs
from tests.reliability.faults import SAVING, Fault

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


FAULTS = {
    "weight of 0": table("weight = 3", "weight = 0"),
    "unknown key in a table of a mixture": table("weight", "wieght"),
    "mixture of values": mixture(tables='[training]\nmixture = ["local", "python_docs"]\n'),
    "path beside a mixture": mixture(path=f"{jobs.ROOT}/tests"),
    "validation beside a mixture without a dataset": mixture("--validation.enable"),
    "epochs of a stream": own_data(("--training.dataset=stream", "--training.epochs=2")),
    "epochs of a model with its own dataloader": own_data(
        ("--model.name=own_loader", "--training.epochs=2")
    ),
    "stream whose files the ranks cannot share": own_data(("--training.dataset=stream",), ranks=2),
    "resuming with a shuffled order": other_order(
        "--training.shuffle", "--training.data_seed=5", *ALLOWED
    ),
}
