"""No sample is lost or repeated over other ranks; `elastic_data.py` does it with 10,000."""

import pytest

from tests.reliability import elastic_data


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "a document per row"])
@pytest.mark.parametrize("workers", [[0, 0, 0, 0], [0, 2, 0, 2]], ids=["no workers", "workers"])
def test_no_sample_is_lost_or_repeated_over_4_1_3_and_2_ranks(packed, workers, tmp_path):
    found = elastic_data.run(tmp_path, 600, [4, 1, 3, 2], workers, packed)
    assert (found["lost"], found["repeated"]) == (0, 0)
    assert found["read"] + found["left over"] == found["tokens"]
    assert found["left over"] < 0.05 * found["tokens"]
