"""Train from the command line.

    torchrun --nproc-per-node 8 -m torchtitan.train --job.config_file job.toml
    python -m torchtitan.train --job.config_file job.toml            # one process

Config mistakes and --help answer before anything heavy is imported: `Trainer` is loaded from
`torchtitan.trainer` when it is first asked for.
"""

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torchtitan
from torchtitan.config import JobConfig
from torchtitan.config.checks import ConfigError
from torchtitan.job import resolve_job
from torchtitan.tools.errors import RunError
from torchtitan.tools.logging import init_logger, logger

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

__all__ = ["Trainer", "main"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from torchtitan.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(
    trainer_class: "Callable[[Any], Trainer] | None" = None,
    *,
    config_cls: type[JobConfig] = JobConfig,
    check_config: Callable[[Any], None] | None = None,
) -> None:
    """Read the command line and train.

    trainer_class: called with the config; what it returns has `train()`, `close()` and a
        `checkpointer`. config_cls, check_config: an extended config and its own rules.
    Exit code 2: the config cannot run; 1: data or files are not what the config says.
    """
    from torchtitan.config.manager import ConfigManager, exit_on_config_error

    init_logger()
    logger.info("torchtitan version: %s", torchtitan.__version__)
    with exit_on_config_error():
        config = ConfigManager(config_cls).parse_args()
        resolve_job(config)
        if check_config is not None:
            check_config(config)
    try:
        _run(config, trainer_class)
    except ConfigError as error:
        _exit_with_message(error, 2)
    except (ValueError, OSError, FloatingPointError, RunError) as error:
        _exit_with_message(error, 1)
    except Exception as error:
        # A lost connection is another rank's failure, which that rank reports.
        if "by peer" not in str(error):
            _tell_torchrun(traceback.format_exc())
        raise


def _run(config: JobConfig, trainer_class: "Callable[[Any], Trainer] | None") -> None:
    import torch

    if trainer_class is None:
        from torchtitan.trainer import Trainer as trainer_class
    trainer = None
    try:
        trainer = trainer_class(config)
        if config.comm.mode == "local_tensor":
            logger.info("comm.mode = local_tensor: set-up done, nothing is trained")
        elif config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
            logger.info("seed checkpoint created")
        else:
            trainer.train()
    finally:
        if trainer is not None:
            trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _exit_with_message(error: Exception, exit_code: int) -> None:
    """Say on stderr what to mend, and where it was found; the whole trace is for bugs."""
    if os.environ.get("TORCHTITAN_TRACEBACK"):
        raise error
    where = traceback.extract_tb(error.__traceback__)[-1]
    message = f"error: {_without_stack(error)}"
    print(
        f"{message}\n(found at {where.filename}:{where.lineno}; TORCHTITAN_TRACEBACK=1 shows "
        "the stack)",
        file=sys.stderr,
        flush=True,
    )
    _tell_torchrun(message)
    sys.exit(exit_code)


def _without_stack(error: Exception) -> str:
    """The message; that of an error in a data worker comes with the worker's stack before it."""
    text = str(error)
    if "\nOriginal Traceback" not in text:
        return text
    return re.split(rf"\n[\w.]*{type(error).__name__}: ", text)[-1].strip()


def _tell_torchrun(message: str) -> None:
    """Have torchrun show `message` when it ends, since this rank's own output may be hidden."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    details = {"py_callstack": message, "timestamp": str(int(time.time()))}
    with open(path, "w") as file:
        json.dump({"message": {"message": message, "extraInfo": details}}, file)


if __name__ == "__main__":
    main()
