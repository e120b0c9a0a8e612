"""Runs code where only torch is imported, in forks of a process that has it: an import takes seconds."""

import functools
import json
import subprocess
import sys
import tempfile

_SERVER = """
import json, os, sys
import torch

for line in sys.stdin:
    code, output = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(output, os.O_WRONLY), 1)
        os.dup2(1, 2)
        exec(code, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", _SERVER], **pipes)


def run_with_torch_alone(code: str) -> str:
    """Return what `code` prints in a new process that has imported torch and nothing else.

    Raises AssertionError with what it printed, and its traceback, if it fails.
    """
    server = _server()
    with tempfile.NamedTemporaryFile("r") as output:
        print(json.dumps([code, output.name]), file=server.stdin, flush=True)
        status, printed = server.stdout.readline(), output.read()
    assert status == "0\n", printed
    return printed
