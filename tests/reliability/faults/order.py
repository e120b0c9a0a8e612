"""Faults of mixtures, epochs, packing, and of the order that a resumed run goes on with."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.reliability import jobs
from tests.reliability.faults import SAVING, Fault
from tests.reliability.faults.config import flag_fault

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
BEGIN_AGAIN = "Resume as before, or begin again with the data."


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


def table_fault(name: str, old: str, new: str, message: str, cause: str, remedy: str):
    """One text in `TABLES` is another one."""
    assert old in TABLES
    tables = TABLES.replace(old, new)
    return Fault(name, f"config error: {message}", cause, remedy, mixture(tables=tables))


def mixture_fault(name: str, arrange: Arrange, message: str, cause: str, remedy: str):
    return Fault(name, f"config error: {message}", cause, remedy, arrange)


def own_data_fault(name: str, flags: Sequence[str], message: str, cause: str, remedy: str, **more):
    """A job with tests/reliability/own_data.py is refused when it builds its data."""
    arguments = [OWN_DATA, *flags]
    return Fault(name, f"error: {message}", cause, remedy, lambda _folder: arguments, **more)


# Without it, another order is refused before the data position is read.
ALLOWED = ("--checkpoint.allow_changed=training.shuffle,training.data_seed",)


def resume_fault(
    name: str, message: str, cause: str, *arguments: str, arrange: Arrange | None = None
):
    """A finished run, of one dataset in its own order, goes on otherwise."""
    return Fault(
        name,
        f"error: the checkpoint's data position is for {message}, or begin with this data from its "
        "start: checkpoint.exclude_from_loading = ['dataloader']",
        cause,
        BEGIN_AGAIN,
        arrange or (lambda _folder: [*SAVING, "--training.steps=6", *arguments]),
        exit_code=1,
        after_run=True,
    )


def after_shuffled_run(folder: Path) -> list[str]:
    shutil.rmtree(folder / "outputs")
    shuffled = [*SAVING, "--training.shuffle", "--training.steps=2"]
    arguments = [*jobs.TINY_JOB, *shuffled, f"--job.dump_folder={folder}/outputs"]
    first = jobs.run([*arguments, "--training.data_seed=5"], folder / "logs_before")
    assert first.exit_codes == [0], first.output
    return [*shuffled, "--training.steps=4", "--training.data_seed=6", *ALLOWED]


FAULTS = [
    table_fault(
        "weight of 0",
        "weight = 3",
        "weight = 0",
        "training.mixture[0].weight must be above 0, got 0…; the default is 1.0",
        "The dataset should be left out.",
        "Remove its table.",
    ),
    table_fault(
        "weight below 0",
        "weight = 3",
        "weight = -0.5",
        "training.mixture[0].weight must be above 0, got -0.5; …",
        "A typing error.",
        "Correct the weight.",
    ),
    table_fault(
        "weight that is not a number",
        "weight = 3",
        "weight = nan",
        "training.mixture[0].weight must be above 0, got nan; …",
        "A tool computed the weights, and divided by 0.",
        "Correct the weight.",
    ),
    table_fault(
        "unknown key in a table of a mixture",
        "weight",
        "wieght",
        "'wieght' in [training.mixture[0]] is unknown, did you mean 'weight'?",
        "A typing error.",
        "Correct the name.",
    ),
    table_fault(
        "unknown dataset in a table of a mixture",
        "python_docs",
        "python_dosc",
        "training.mixture[1].dataset must be a registered dataset (…), got 'python_dosc', did you mean "
        "'python_docs'?; correct it, …",
        "A typing error, or the module that registers it was not imported.",
        "Correct the name, or name the module in experimental.custom_import.",
    ),
    table_fault(
        "table of a mixture without a path",
        TEXTS,
        "",
        "training.mixture[0].dataset = 'local' reads the file or folder training.mixture[0].dataset_path, "
        "which must exist, got None …; set or correct the path",
        "The key was left out.",
        "Set dataset_path in the table.",
    ),
    table_fault(
        "passes below 0 in a table of a mixture",
        "weight = 3",
        "epochs = -1",
        "training.mixture[0].epochs must be above 0, got -1…; the default is None",
        "It should mean: without a limit.",
        "Leave the key out.",
    ),
    table_fault(
        "mixture that is one table",
        TABLES,
        "[training.mixture]\nweight = 3\n",
        "[training] mixture = {'weight': 3}: expected a list of tables, each under a heading in double "
        "brackets, got dict",
        "A pair of brackets is missing.",
        "Write [[training.mixture]].",
    ),
    mixture_fault(
        "mixture of values",
        mixture(tables='[training]\nmixture = ["local", "python_docs"]\n'),
        "training.mixture[0] is a table of settings, got the single value 'local'; write "
        "[[training.mixture]] on a line of its own and its keys below it",
        "Datasets were listed by their names.",
        "Write a table for each.",
    ),
    mixture_fault(
        "path beside a mixture",
        mixture(path=f"{jobs.ROOT}/tests"),
        "[[training.mixture]] has its own datasets, whose passes end at different steps; each table can "
        "have the key, got training.dataset_path = '…tests'; change one of the two",
        "The key is from a config without a mixture.",
        "Make it a table of its own.",
    ),
    mixture_fault(
        "epochs beside a mixture",
        mixture("--training.epochs=2"),
        "[[training.mixture]] has its own datasets, whose passes end at different steps; each table can "
        "have the key, got training.epochs = 2.0; change one of the two",
        "Which of the datasets should be read twice is unknown.",
        "Set training.steps.",
    ),
    mixture_fault(
        "validation beside a mixture without a dataset",
        mixture("--validation.enable"),
        "validation.dataset must be named beside [[training.mixture]], because a mixture has no held-out "
        "part, got None; set it and validation.dataset_path",
        "Without a mixture, the held-out part of training.dataset is the default.",
        "Set validation.dataset.",
    ),
    flag_fault(
        "epochs of 0",
        ("--training.epochs=0",),
        "training.epochs must be above 0, got 0.0; the default is None",
        "A typing error.",
        "Leave it out, or give a number above 0.",
    ),
    own_data_fault(
        "epochs of a stream",
        ("--training.dataset=stream", "--training.epochs=2"),
        "training.epochs = 2.0 needs documents that can be counted, and dataset 'stream' is a stream; "
        "set training.steps",
        "The length of a stream is unknown.",
        "Set training.steps.",
    ),
    own_data_fault(
        "epochs of a model with its own dataloader",
        ("--model.name=own_loader", "--training.epochs=2"),
        "training.epochs = 2.0 needs a dataset whose documents are counted, and model 'own_loader' has a "
        "dataloader of its own; set training.steps",
        "The train spec has a build_dataloader_fn.",
        "Set training.steps.",
    ),
    flag_fault(
        "data seed below 0",
        ("--training.data_seed=-1",),
        "training.data_seed must be at least 0, got -1; the default is 0",
        "It should mean: a random seed.",
        "Give a number.",
    ),
    flag_fault(
        "unknown packing",
        ("--training.packing=best",),
        "invalid choice 'best' for argument '--training.packing'. Expected one of ('concat', 'fit', 'none'). …",
        "A typing error, or another tool's name.",
        "Take a name from the message.",
    ),
    own_data_fault(
        "stream whose files the ranks cannot share",
        ("--training.dataset=stream",),
        "2 data-parallel ranks cannot share the stream's files: the number of files, 3, and the global "
        "batch of 2 rows have the divisor 1 in common; train on 1 rank, or copy the "
        "data to this machine",
        "Each part of a stream is read by one rank.",
        "Train on another number of ranks, or copy the data.",
        ranks=2,
    ),
    resume_fault(
        "resuming with a shuffled order",
        "training.shuffle = False, got training.shuffle = True with data_seed = 5: resume with the same "
        "order",
        "training.shuffle was not set before.",
        "--training.shuffle",
        "--training.data_seed=5",
        *ALLOWED,
    ),
    resume_fault(
        "resuming with another data seed",
        "training.shuffle = True with data_seed = 5, got training.shuffle = True with data_seed = 6: "
        "resume with the same order",
        "A seed was changed for another run, whose dump folder is the same.",
        arrange=after_shuffled_run,
    ),
    resume_fault(
        "resuming with a mixture",
        "1 sources, but training.mixture has 2: resume with the same sources",
        "A dataset was added.",
        arrange=mixture(*SAVING, "--training.steps=6"),
    ),
]
