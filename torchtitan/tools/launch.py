"""A torchrun for the ranks of one machine that lets the ranks handle signals.

    python -m torchtitan.tools.launch [torchrun's options] -m torchtitan.train [...]

On Ctrl-C, torchrun itself prints a traceback, exits with code 1, and kills a rank whose save takes
longer than 30 seconds. This launcher forwards the signal to the ranks and waits for them. After a
failure, the last line printed and the exit code are those of the rank that failed first.

Don't use it with `--max-restarts`: it would restart ranks that a signal ended.
"""

import logging
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torchtitan.tools.signals import SIGNALS, end_now

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_running: "list[PContext]" = []
_passed_on: list[int] = []


def main(arguments: list[str]) -> None:
    """Run torchrun with these arguments, and exit with the code of the rank that failed first."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # SIGHUP is ignored under nohup
            signal.signal(number, _pass_on)

    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing import PContext
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    start = PContext.start

    def start_and_remember(self: "PContext") -> None:
        start(self)
        _running[:] = [self]

    PContext.start = start_and_remember
    try:
        torchrun(["--signals-to-handle=SIGQUIT", *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        names = [signal.Signals(n).name for n in _passed_on if failure.exitcode in (-n, 128 + n)]
        if names:
            sentence = f"interrupted by {names[0]}; what was not saved is lost"
        else:
            print(error, file=sys.stderr)
            sentence = _sentence(rank, failure)
        print(sentence, file=sys.stderr, flush=True)
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
    except DistNetworkError as error:
        sys.exit(f"error: torchrun's port cannot be used ({error}); set a free --master-port")
    finally:
        PContext.start = start


def _pass_on(number: int, _frame: Any) -> None:
    """Forward the signal to the ranks; end this process if the ranks have not started."""
    if not _running:
        end_now(number, f"{signal.Signals(number).name}: the run ends before its ranks have begun")
    _passed_on.append(number)
    logging.disable()  # torchrun would log the exit codes of interrupted ranks as failures
    for pid in _running[0].pids().values():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _sentence(rank: int, failure: "ProcessFailure") -> str:
    if failure.exitcode < 0:
        return (
            f"error: rank {rank} was ended by {failure.signal_name()}; if nobody sent the signal, look "
            "for the kernel's out-of-memory killer (SIGKILL), or for a crash above"
        )
    message: Any = failure.message
    if isinstance(message, dict):  # the format of `torchtitan.train` and torch's `record`
        message = message["message"]
    is_sentence = message.startswith(("error: ", "config error: "))
    return message if is_sentence else f"error: rank {rank}: {message.strip().splitlines()[-1]}"


if __name__ == "__main__":
    main(sys.argv[1:])
