"""What goes wrong in a job that has this module as `experimental.custom_import`: the environment
variable BROKEN says what, BROKEN_RANK on which rank (default 0), and BROKEN_STEP after which step is
logged (default: at once, on import).
"""

import logging
import multiprocessing
import os
import resource
import signal
import sys
import time

import torch

import tests.reliability.tiny_flavor  # noqa: F401
from torchtitan.checkpoint import folder


def open_on_full_disk(path, flags, open_descriptor=folder.open_descriptor):
    is_last = str(path).endswith(".metadata.tmp")  # of the files of a checkpoint
    return os.open("/dev/full", flags) if is_last else open_descriptor(path, flags)


def break_down() -> None:
    action = os.environ["BROKEN"]
    if action == "raise":
        raise RuntimeError("no licence")
    if action == "fail to read":
        raise OSError("the disk is gone")
    if action == "exit":
        sys.exit(0)
    if action == "out of memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 ...")
    if action.startswith("hang"):  # "hang", or "hang SECONDS"
        time.sleep(float(action.partition(" ")[2] or 60))
    elif action == "fill the disk":
        folder.open_descriptor = open_on_full_disk
    elif action == "limit files":  # as `ulimit -f` does, for any user
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, resource.RLIM_INFINITY))
    elif action == "kill data worker":
        multiprocessing.active_children()[0].kill()
    else:
        for _ in range(int(os.environ.get("BROKEN_TIMES", "1"))):
            os.kill(os.getpid(), signal.Signals[action])
            time.sleep(0.2)


class _AtStep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "loss:" in text and f"step: {os.environ['BROKEN_STEP']:>2} " in text:
            break_down()


if os.environ.get("RANK", "0") == os.environ.get("BROKEN_RANK", "0"):
    if "BROKEN_STEP" in os.environ:
        logging.getLogger("torchtitan").addHandler(_AtStep())
    else:
        break_down()
