"""A torchrun that lets the ranks handle signals.

    python -m torchtitan.tools.launch [torchrun's options] -m torchtitan.train [...]

On Ctrl-C, plain torchrun prints a traceback, exits with code 1, and kills a rank whose save takes
longer than 30 seconds. This launcher forwards the signal to the ranks and waits for them. After a
failure, the last line printed and the exit code are those of the rank that failed first.

With `--max-restarts`, ranks start again after a failure, except after a config error (exit code 2) and
on the node whose launcher got a signal. The other nodes go on without that node, if `--nnodes` allows it.
"""

import logging
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from torchtitan.tools.signals import SIGNALS, end_now

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext, RunProcsResult
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

# Exit code of `torchtitan.train` for a job that cannot run.
CONFIG_ERROR = 2
_running: "list[PContext]" = []
_passed_on: list[int] = []


def main(arguments: list[str]) -> None:
    """Run torchrun with these arguments, and exit with the code of the rank that failed first."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # SIGHUP is ignored under nohup
            signal.signal(number, _pass_on)

    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing import PContext, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # With torch's shared rendezvous store (2.11 to 2.15), a new agent that joins running agents waits for an
    # address that the running agents published only in their first round.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    start, wait = PContext.start, PContext.wait
    # Failures of ranks after a signal.
    ended: list[ChildFailedError] = []

    def start_and_remember(self: "PContext") -> None:
        if _passed_on:  # the signal came while torchrun was between two attempts
            raise SignalException("ended by a signal", signal.Signals(_passed_on[0]))
        start(self)
        _running[:] = [self]

    def wait_and_judge(self: "PContext", *args: Any, **options: Any) -> "RunProcsResult | None":
        result = wait(self, *args, **options)
        if result is None or not result.is_failed():
            return result
        failures = {int(self.envs[n]["RANK"]): failure for n, failure in result.failures.items()}
        error = ChildFailedError(str(self.entrypoint), failures)
        if any(failure.exitcode == CONFIG_ERROR for failure in failures.values()):
            raise error
        if _passed_on:
            ended.append(error)
            # Any other exception would make torch close the rendezvous for the other nodes, too.
            raise SignalException("ended by a signal", signal.Signals(_passed_on[0]))
        return result

    PContext.start, PContext.wait = start_and_remember, wait_and_judge
    try:
        torchrun(["--signals-to-handle=SIGQUIT", *arguments])
    except ChildFailedError as error:
        _exit_with(error)
    except SignalException:
        if ended:
            _exit_with(ended[0])
        sys.exit(128 + _passed_on[0])
    except DistNetworkError as error:
        sys.exit(f"error: torchrun's port cannot be used ({error}); set a free --master-port")
    finally:
        PContext.start, PContext.wait = start, wait


def _exit_with(error: "ChildFailedError") -> NoReturn:
    """Print the message of the rank that failed first, and exit with that rank's exit code."""
    rank, failure = error.get_first_failure()
    names = [signal.Signals(n).name for n in _passed_on if failure.exitcode in (-n, 128 + n)]
    if names:
        sentence = f"interrupted by {names[0]}; what was not saved is lost"
    else:
        sentence = _sentence(rank, failure)
        if not sentence.startswith("stopped "):
            print(error, file=sys.stderr)
    print(sentence, file=sys.stderr, flush=True)
    sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)


def _pass_on(number: int, _frame: Any) -> None:
    """Forward the signal to the ranks; end this process if the ranks have not started."""
    if not _running:
        end_now(number, f"{signal.Signals(number).name}: the run ends before its ranks have begun")
    _passed_on.append(number)
    # Otherwise torchrun logs the exit codes of interrupted ranks as failures.
    logging.disable()
    has_rank = False
    for pid in _running[0].pids().values():
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            has_rank = True
    if not has_rank:  # torchrun is waiting for other nodes
        end_now(number, f"{signal.Signals(number).name}: the run ends between two attempts")


def _sentence(rank: int, failure: "ProcessFailure") -> str:
    if failure.exitcode < 0:
        return (
            f"error: rank {rank} was ended by {failure.signal_name()}; if nobody sent the signal, look "
            "for the kernel's out-of-memory killer (SIGKILL), or for a crash above"
        )
    message: Any = failure.message
    if isinstance(message, dict):  # from `torchtitan.train` or torch's `record`
        message = message["message"]
    is_sentence = message.startswith(("error: ", "config error: ", "stopped "))
    return message if is_sentence else f"error: rank {rank}: {message.strip().splitlines()[-1]}"


if __name__ == "__main__":
    main(sys.argv[1:])
