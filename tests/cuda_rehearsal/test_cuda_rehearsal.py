"""Training on CUDA, rehearsed without it: what runs there, and where the host waits for it."""

import pytest

from tests.cuda_rehearsal.cases import ALLOWED, CASES, QUICK
from tests.cuda_rehearsal.records import records
from tests.cuda_rehearsal.scenarios import SCENARIOS
from torchtitan.estimate.device import why_not

reason = why_not()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"cannot rehearse CUDA: {reason}")


@pytest.fixture(scope="module")
def recorded(request):
    """Name -> record, of all selected cases, in one process: to start costs 10 seconds."""
    test = test_host_waits_for_the_device_only_where_the_table_says
    cases = [i.callspec.params["name"] for i in request.session.items if i.function is test]
    return records("tests.cuda_rehearsal.run", *cases)


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in (*CASES, *SCENARIOS)],
)
def test_host_waits_for_the_device_only_where_the_table_says(recorded, name):
    record = recorded[name]
    assert record["error"] is None, record["error"]
    noted = {part: waits for part, waits in record["notes"].items() if waits}
    assert noted == ALLOWED.get(name, {})
