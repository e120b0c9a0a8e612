"""For `experimental.custom_import`: the disk is full when a checkpoint's `.metadata` is written."""

import os

import tests.reliability.tiny_flavor  # noqa: F401
from torchtitan.checkpoint import folder

open_descriptor = folder.open_descriptor


def open_on_full_disk(path, flags):
    if str(path).endswith(".metadata.tmp"):
        return os.open("/dev/full", flags)  # its writes end with "No space left on device"
    return open_descriptor(path, flags)


folder.open_descriptor = open_on_full_disk
