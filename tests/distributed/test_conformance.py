"""The conformance kit passes, and reports a broken contract without stopping."""

import pytest

from torchtitan.testing import conformance
from torchtitan.testing.conformance_checks import CHECKS


@pytest.mark.parametrize("nproc", [1, 2])
def test_contract_holds(nproc):
    results = conformance.run_checks(nproc)
    failed = {r.name: r.problem for r in results if r.outcome == "FAIL"}
    assert not failed, "\n".join(failed.values())
    assert len(results) == len(CHECKS) < 100


def test_every_check_says_what_it_holds_and_where_it_comes_from():
    for check in CHECKS.values():
        assert check.row in {"1a", "1b", "1c", "1d", "1e", "3", "api"}, check.name
        assert len(check.holds) > 20, check.name


def test_failing_check_is_reported_and_ends_its_ranks_only(tmp_path):
    seconds, problems = {}, {}
    pending = ["config_model", "no such check", "config_compile"]
    conformance._run_until_failure(pending, 2, str(tmp_path), 60.0, seconds, problems)
    assert list(seconds) == ["config_model", "no such check"]
    assert "KeyError" in problems["no such check"]


def test_table_names_results_and_counts(capsys):
    assert conformance.main(["--only", "config_model"]) == 0
    output = capsys.readouterr().out
    assert "pass  1b   config_model" in output
    assert "1 passed, 0 failed, 0 skipped, on 1 rank(s)" in output
    with pytest.raises(ValueError, match="is in no check's name"):
        conformance.run_checks(1, "no such check")
