"""For `experimental.custom_import`: the disk is full when a checkpoint's `.metadata` is written."""

import tests.reliability.tiny_flavor  # noqa: F401
from torchtitan.checkpoint import folder

open_file = folder.open_file


def open_on_full_disk(path, *arguments, **options):
    if str(path).endswith(".metadata.tmp"):
        return open(
            "/dev/full", *arguments, **options
        )  # its writes end with "No space left on device"
    return open_file(path, *arguments, **options)


folder.open_file = open_on_full_disk
