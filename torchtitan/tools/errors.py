"""Failures that end a run and are not bugs of this program.

`as_run_error` recognises such failures among the exceptions of torch and the operating system.
"""

import errno
import re
import resource
import traceback
from contextlib import suppress
from typing import Any

# Enough for one rank with a few data workers.
_FEWEST_FILES = 128


class ConfigError(ValueError):
    """The config cannot work; the message says what to change.

    sentence: the line to print, if it differs from the message. Some messages also contain the text that
        torchtitan 0.2.x raised.
    """

    def __init__(self, message: str, sentence: str | None = None) -> None:
        super().__init__(message)
        self.sentence = sentence or message


class RunError(RuntimeError):
    """Something outside this program failed: a full disk, a lost rank, a damaged file.

    `torchtitan.train.main` prints the message without a stack and exits with 1.
    """


class LostConnectionError(RunError):
    """A collective failed because another rank has ended or does not answer."""


def as_run_error(error: BaseException, config: Any) -> BaseException:
    """Return a RunError that says what happened and what to do; `error` itself if it is not recognised.

    config: the run's JobConfig, whose values the message names.
    """
    cause: BaseException | None = error
    while cause is not None:
        explained = _explain(cause, config)
        if explained is not None:
            return explained
        # A pipeline stage wraps its errors in a RuntimeError.
        cause = cause.__cause__ if type(cause) is RuntimeError else None
    return error


def allow_open_files() -> None:
    """Raise the soft limit of open files to the hard limit; RunError if the limit is still too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # macOS refuses an infinite soft limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft != resource.RLIM_INFINITY and soft < _FEWEST_FILES:
        raise RunError(_too_few_files(f"at least {_FEWEST_FILES} are needed"))


def _too_few_files(detail: str) -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"too many open files: {limit} are allowed to this process (ulimit -n); raise that limit, "
        "or lower training.dataloader.num_workers and prefetch_factor "
        f"({detail.strip().splitlines()[-1]})"
    )


def _explain(error: BaseException, config: Any) -> BaseException | None:
    import torch  # not at the top: programs without torch import the classes above

    text = str(error)
    if isinstance(error, (RunError, ValueError)):
        return error
    if isinstance(error, SystemExit):
        where = traceback.extract_tb(error.__traceback__)[-1]
        return RunError(
            f"sys.exit({'' if error.code is None else error.code}) was called during the run, at "
            f"{where.filename}, line {where.lineno}; have that code raise an error, or return"
        )
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate mem" in text:
        wanted = re.search(r"tried to allocate (\d+) bytes|Tried to allocate ([\d.]+ \w+)", text)
        size = ""
        if wanted:
            size = f", {wanted[2] or f'{int(wanted[1]) / 2**30:.2f} GiB'} more were requested"
        return RunError(
            f"out of memory{size}, with training.local_batch_size = "
            f"{config.training.local_batch_size}, training.seq_len = {config.training.seq_len}, "
            f"activation_checkpoint.mode = {config.activation_checkpoint.mode!r}; lower "
            "local_batch_size (gradients accumulate up to training.global_batch_size), recompute "
            "with activation_checkpoint.mode = 'full', or shard over more ranks"
        )
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) or "open files" in text:
        return RunError(_too_few_files(text))
    # A broken pipe to a child process means that the child is gone.
    frames = traceback.extract_tb(error.__traceback__)
    is_about_pipe = isinstance(error, (EOFError, OSError)) and any(
        frame.filename.endswith("multiprocessing/connection.py") for frame in frames
    )
    if "DataLoader worker (pid" in text or is_about_pipe:
        return RunError(
            "a data worker was killed, most often for lack of host memory; lower "
            f"training.dataloader.num_workers (now {config.training.dataloader.num_workers}), or "
            f"look at the kernel's log ({text.strip() or type(error).__name__})"
        )
    # With several collectives in flight, gloo reports "Timed out" for one and "closure" for the rest.
    timed_out = ("gloo" in text and "Timed out" in text) or "timeout caused pair closure" in text
    if isinstance(error, RuntimeError) and timed_out:
        return RunError(
            "another rank did not take part in a collective in time (comm.init_timeout_seconds up "
            "to the first step, comm.train_timeout_seconds after it): it hangs or is slow; look at "
            f"the other ranks' output. {text.splitlines()[0]}"
        )
    if isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and ("by peer" in text or "gloo/transport" in text)
    ):
        text = text.strip().partition("\n")[0]
        return LostConnectionError(f"the connection to another rank is lost: {text}")
    return None
