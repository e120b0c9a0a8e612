"""Faults of the config: one message, before anything is built."""

from pathlib import Path

from tests.reliability.faults import Fault


def toml(text: str):
    """Arranges a TOML file with this text."""

    def arrange(folder: Path) -> list[str]:
        (folder / "job.toml").write_text(text)
        return [f"--job.config_file={folder}/job.toml"]

    return arrange


def flags(*arguments: str):
    return lambda folder: arguments


FAULTS = [
    Fault(
        name="TOML that cannot be parsed",
        message="config error: …job.toml, line 2: not valid TOML: …",
        cause="A typing error in the file.",
        remedy="Correct the line.",
        arrange=toml("[training]\nsteps = = 3\n"),
    ),
    Fault(
        name="dump folder that cannot be written",
        message="config error: job.dump_folder …'/proc/x'…",
        cause="The folder is on a read-only file system, or belongs to somebody else.",
        remedy="Set job.dump_folder to a folder that this user may write to.",
        arrange=flags("--job.dump_folder=/proc/x"),
    ),
]
