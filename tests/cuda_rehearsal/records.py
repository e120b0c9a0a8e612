"""Records of cases, which run in a process of their own: the device has to be there before torch."""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def record_of(name: str, function: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return name, cpu_seconds, error (a text, or None), and what the function of the name returns."""
    started = time.process_time()
    found, error = {}, None
    try:
        found = function(name)
    except Exception:
        error = traceback.format_exc(limit=-8, chain=False)
    seconds = round(time.process_time() - started, 1)
    return {"name": name, "cpu_seconds": seconds, "error": error} | found


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
