"""Train from the command line: `torchrun -m torchtitan.train --job.config_file job.toml`.

`Trainer` is loaded on first use, so config errors and --help only wait for the import of torch.
"""

import contextlib
import copy
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torchtitan.tools import signals

if __name__ == "__main__":
    signals.at_start.start()  # handle signals during the imports, which take seconds

import torch

import torchtitan
from torchtitan.config import JobConfig
from torchtitan.distributed.processes.peers import SECONDS_TO_REPORT, PeerError, Peers
from torchtitan.distributed.processes.process_group import find_peers
from torchtitan.job import resolve_job
from torchtitan.tools import events
from torchtitan.tools.errors import (
    ConfigError,
    LostConnectionError,
    RunError,
    allow_open_files,
    as_run_error,
)
from torchtitan.tools.folder_lock import FolderLock
from torchtitan.tools.host import has_peers, keep_freed_memory, signal_at_parents_death
from torchtitan.tools.lazy_names import load_on_access
from torchtitan.tools.logging import init_logger, logger

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

# Regular expressions for the beginnings of harmless warnings of torch, and why they are harmless.
_NOISE = (
    # The complex operators of RoPE run uncompiled.
    "Torchinductor does not support code generation for complex operators",
    # Nothing writes to the view in place.
    "FSDP2-wrapped module .* returned a view tensor",
    # RMSNorm has fp32 weights on purpose.
    "(?s).*Mismatch dtype between input and weight",
)

_mains = itertools.count()

__all__ = ["Trainer", "main"]
__getattr__ = load_on_access(__name__, {"Trainer": "torchtitan.trainer"})


def main(
    trainer_class: "Callable[[Any], Trainer] | None" = None,
    *,
    config_cls: type[JobConfig] = JobConfig,
    check_config: Callable[[Any], None] | None = None,
) -> None:
    """Read the command line and train. All ranks compare their configs, and exit together on an error.

    trainer_class: called with the config; returns an object with `train()`, `close()` and
        `checkpointer`. config_cls, check_config: an extended config, and a function with its rules.
    Exit code 2: the config cannot run; 1: data, files, memory or another rank failed;
    `job.stopped_exit_code`: the run saved and ended before its last step.
    """
    # Imported here, because programs that only import `Trainer` need no parser.
    from torchtitan.config.manager import ConfigManager, exit_on_config_error

    if not torch.distributed.is_initialized():  # else a host program handles signals
        signals.at_start.start()
    init_logger()
    _quiet_libraries()
    logger.info("torchtitan version: %s", torchtitan.__version__)
    try:
        keep_freed_memory()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            signal_at_parents_death(signal.SIGTERM)
        with exit_on_config_error(_report_config_error if has_peers() else None):
            config = ConfigManager(config_cls).parse_args()
            config = resolve_job(config).config
            if check_config is not None:
                check_config(config)
        _run(config, trainer_class)
    except KeyboardInterrupt:
        print("interrupted; what was not saved is lost", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    finally:
        signals.at_start.close()


def _quiet_libraries() -> None:
    """Silence library warnings that a user cannot act on, and progress bars in log files."""
    for message in _NOISE:
        warnings.filterwarnings("ignore", message, UserWarning)
    # The tokenizer gets one text at a time; with threads it would warn of forked data workers.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def _run(config: JobConfig, trainer_class: "Callable[[Any], Trainer] | None") -> None:
    peers = trainer = None
    try:
        # Ranks that already have a process group do not need to find each other.
        is_guest = torch.distributed.is_initialized()
        if has_peers() and config.comm.mode == "default" and not is_guest:
            world_size = int(os.environ["WORLD_SIZE"])
            helpers = range(config.trainer_ranks(world_size), world_size)
            peers = _find_peers(config.comm.init_timeout_seconds, helpers)
            signals.at_start.tell_by(peers.report)
            peers.compare(config.to_dict())
        else:
            signals.at_start.tell_by(lambda _: None)
        allow_open_files()
        with contextlib.ExitStack() as at_end:
            if os.environ.get("RANK", "0") == "0":  # lock before anything in the folder changes
                at_end.callback(FolderLock(config.job.dump_folder).release)
            at_end.enter_context(events.recording(config))
            if trainer_class is None:
                from torchtitan.trainer import Trainer  # a slow import

                trainer = Trainer(config)
            else:
                trainer = trainer_class(copy.deepcopy(config))  # a client may change the config
            if peers is not None:
                checkpointer = getattr(trainer, "checkpointer", None)
                peers.compare_data(getattr(checkpointer, "run_record", {}))
                peers.watch(config.comm, getattr(trainer, "progress", None))
            if config.comm.mode == "local_tensor":
                logger.info("comm.mode = local_tensor: set-up is done, and nothing is trained")
            elif config.checkpoint.create_seed_checkpoint:
                trainer.checkpointer.save(curr_step=0, last_step=True)
                logger.info("seed checkpoint created")
            else:
                trainer.train()
            trainer.close()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    except BaseException as error:
        # Report before closing, because closing may wait for other ranks.
        exit_code = _report_failure(error, config, peers)
        if trainer is not None:
            with contextlib.suppress(Exception):  # the first error has been reported
                trainer.close()
        if exit_code is None:
            raise
        sys.exit(exit_code)
    if peers is not None:
        peers.leave()
    code = config.job.stopped_exit_code
    if code and getattr(getattr(trainer, "checkpointer", None), "has_stopped", False):
        _write_for_torchrun("stopped after a save; the same command continues the run")
        sys.exit(code)


def _find_peers(seconds: float, helpers: range = range(0)) -> Peers:
    """Connect to the other ranks, under a new store prefix because a process may call `main` again."""
    store, rank, world_size = find_peers(timedelta(seconds=seconds))
    store = torch.distributed.PrefixStore(f"torchtitan_main_{next(_mains)}", store)
    return Peers(store, rank, world_size, helpers)


def _report_config_error(message: str) -> None:
    """Have rank 0 print the message, once for all ranks with the same message, and end all ranks."""
    is_first = os.environ["RANK"] == "0"
    if is_first:
        print(message, file=sys.stderr, flush=True)
    _write_for_torchrun(message)
    try:
        _find_peers(SECONDS_TO_REPORT).compare(None, message)
    except PeerError:
        return
    except Exception:  # rank 0 cannot be reached
        if not is_first:
            print(f"rank {os.environ['RANK']}: {message}", file=sys.stderr, flush=True)


def _report_failure(error: BaseException, config: JobConfig, peers: Peers | None) -> int | None:
    """Report an error on stderr, to the other ranks and to torchrun.

    Returns the exit code, or None for KeyboardInterrupt.
    """
    # After the death of a data worker, torch's SIGCHLD handler would raise again here.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    tell = (lambda _: None) if peers is None else peers.report
    if isinstance(error, PeerError):  # rank 0 has printed the message
        _write_for_torchrun(str(error))
        tell(str(error))  # tell ranks that have not compared their configs yet
        return 2
    if isinstance(error, KeyboardInterrupt):
        tell("it was interrupted by SIGINT")
        return None
    run_error = as_run_error(error, config)
    if isinstance(run_error, LostConnectionError):
        # Another rank failed, and reports its failure to torchrun.
        failure = str(run_error) if peers is None else peers.describe_failure(wait_seconds=3)
        print(f"error: {failure}", file=sys.stderr, flush=True)
        tell(failure)
        return 1
    is_bug = not isinstance(run_error, (ValueError, OSError, FloatingPointError, RunError))
    message = f"{type(error).__name__}: {error}" if is_bug else str(run_error)
    if not is_bug and "\nOriginal Traceback" in message:
        # The message of an error in a data worker begins with the worker's stack.
        message = re.split(rf"\n[\w.]*{type(run_error).__name__}: ", message)[-1].strip()
    sentence = f"error: {message}"
    shows_stack = is_bug or bool(os.environ.get("TORCHTITAN_TRACEBACK"))
    if shows_stack:
        where = traceback.extract_tb(error.__traceback__)[-1]
        sentence += f"\n(found at {where.filename}:{where.lineno})"
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except Exception:  # a hook that a client has set may fail
            traceback.print_exception(error)
    elif not isinstance(run_error, ConfigError):
        sentence += "\n(TORCHTITAN_TRACEBACK=1 shows the stack)"
    # Printed before the other ranks get the message and end, so that it is the last line of the log.
    print(sentence, file=sys.stderr, flush=True)
    tell(message)
    stack = "".join(traceback.format_exception(error))
    _write_for_torchrun(stack if shows_stack else f"error: {message}")
    return 1 if is_bug else events.exit_code(run_error)


def _write_for_torchrun(message: str) -> None:
    """Have torchrun show `message` when it ends, because this rank's own output may be hidden."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with open(path, "w") as file:
            json.dump({"message": {"message": message, "extraInfo": details}}, file)


if __name__ == "__main__":
    main()
