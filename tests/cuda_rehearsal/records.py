"""Records of cases, which run in a process of their own: the device has to be there before torch."""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]


def print_records(names: Iterable[str], function: Callable[[str], dict[str, Any]]) -> NoReturn:
    """Print a line of JSON per name: name, cpu_seconds, error (a text, or None), and what the function
    returns. The exit code is the number of errors."""
    failed = 0
    for name in names:
        started, found, error = time.process_time(), {}, None
        try:
            found = function(name)
        except Exception:
            failed, error = failed + 1, traceback.format_exc(limit=-8, chain=False)
        seconds = round(time.process_time() - started, 1)
        record = {"name": name, "cpu_seconds": seconds, "error": error} | found
        print(json.dumps(record), flush=True)
    raise SystemExit(failed)


def records(module: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """Run `python -m module` with arguments; return name -> record, of its lines of JSON."""
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    lines = [json.loads(x) for x in done.stdout.splitlines() if x.startswith('{"name"')]
    assert lines, done.stderr[-4000:]
    return {record["name"]: record for record in lines}
