"""Rows after kills and other layouts are those of the unbroken run; the script does it with 10,000."""

import pytest

from tests.reliability import elastic_data


@pytest.mark.parametrize(
    ("kind", "packing"),
    [
        ("mixture", "concat"),
        pytest.param("chats", "fit", marks=pytest.mark.slow),
        pytest.param("tokens", "none", marks=pytest.mark.slow),
    ],
)
def test_rows_are_those_of_the_unbroken_run(kind, packing, tmp_path):
    assert elastic_data.run(kind, tmp_path, 300, packing) >= 300
