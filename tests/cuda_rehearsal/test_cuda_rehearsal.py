"""Training on CUDA, rehearsed without it: what runs there, and where the host waits for it.

In a process of its own, as the device has to be there before torch is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_rehearsal.cases import ALLOWED, CASES, QUICK
from tests.cuda_rehearsal.scenarios import SCENARIOS
from torchtitan.estimate.device import why_not

ROOT = Path(__file__).resolve().parents[2]
reason = why_not()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"cannot rehearse CUDA: {reason}")


@pytest.fixture(scope="module")
def recorded(request):
    """Name -> record, of all selected cases, in one process: to start costs 10 seconds."""
    test = test_host_waits_for_the_device_only_where_the_table_says
    cases = [i.callspec.params["name"] for i in request.session.items if i.function is test]
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda_rehearsal.run", "--json", *cases],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert len(lines) == len(cases), done.stderr[-4000:]
    return {record["name"]: record for record in map(json.loads, lines)}


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in (*CASES, *SCENARIOS)],
)
def test_host_waits_for_the_device_only_where_the_table_says(recorded, name):
    record = recorded[name]
    assert record["error"] is None, record["error"]
    noted = {part: waits for part, waits in record["notes"].items() if waits}
    assert noted == ALLOWED.get(name, {})
