"""The contract with embedding programs holds, and the conformance kit finds violations."""

import pytest

from tests.distributed import contract_checks
from torchtitan.testing import conformance, contract
from torchtitan.testing.contract import Check
from torchtitan.testing.gloo import RankFailure, run_ranks
from torchtitan.tools import host

ALL_CHECKS = contract.CHECKS | contract_checks.CHECKS


@pytest.mark.parametrize(
    "nproc, least_min_ranks",
    [
        pytest.param(1, 1, id="1"),
        # In CI one rank runs the checks that do not need two.
        pytest.param(2, 2, id="2, checks that need ranks"),
        pytest.param(2, 1, id="2", marks=pytest.mark.slow),
        pytest.param(4, 1, id="4", marks=pytest.mark.slow),
    ],
)
def test_contract_holds(nproc, least_min_ranks, tmp_path):
    checks = [c for c in ALL_CHECKS.values() if nproc >= c.min_ranks >= least_min_ranks]
    run_ranks(contract_checks.run_checks_on_rank, nproc, checks, str(tmp_path), timeout_seconds=900)


def test_command_runs_checks_on_ranks_of_their_own(capsys):
    assert conformance.main(["--nproc", "2", "--only", "forward_step"]) == 0
    output = capsys.readouterr().out
    assert "pass  forward_step_pp_varlen" in output and "4 passed, 0 failed" in output


def wrong(kit):
    """What is wrong."""
    raise ValueError("1 is not 2")


def test_check_that_fails_is_a_failure():
    outcome, why = conformance.run_check(Check(wrong), 1, 60.0)
    assert outcome == "FAIL" and "ValueError: 1 is not 2" in why


def break_and_run(folder):
    host.move_out = lambda *_: None
    contract_checks.run_checks_on_rank([ALL_CHECKS["guest_leaves_what_it_found"]], folder)


def test_broken_contract_is_noticed(tmp_path):
    with pytest.raises(RankFailure, match="AssertionError"):
        run_ranks(break_and_run, 1, str(tmp_path))
